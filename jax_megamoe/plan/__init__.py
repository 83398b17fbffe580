"""Launch planning: pure Python from ints to frozen dataclasses.

Standard library only: no JAX, no CUDA, no environment, no I/O.
"""

from jax_megamoe.plan.planner import check_sizes as check_sizes
from jax_megamoe.plan.planner import plan_mega_moe as plan_mega_moe
