"""Flax NNX layers. Nothing else in the package but the commands imports Flax."""
