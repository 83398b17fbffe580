"""Executes PTX on a CPU: kernels that this machine has no GPU for, run in the tests."""
