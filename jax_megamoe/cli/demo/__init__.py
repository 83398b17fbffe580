"""`python -m jax_megamoe demo`: a layer from a checkpoint file, run over CPU devices, checked."""

from jax_megamoe.cli.demo.run import DemoSettings as DemoSettings
from jax_megamoe.cli.demo.run import run_demo as run_demo
