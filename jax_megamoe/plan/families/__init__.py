"""The kernel families of each source."""
