"""What this process has: the compiled module and its devices."""
