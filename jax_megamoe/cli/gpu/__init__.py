"""`python -m jax_megamoe bench gpu`: layers of known models timed on this machine's GPU."""
