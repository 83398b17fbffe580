"""Checkpoints to parameters and back."""
