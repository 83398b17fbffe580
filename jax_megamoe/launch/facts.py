"""What the processes of a layer compare before they allocate its buffer."""

import dataclasses
import importlib.metadata

from jax_megamoe import compile as compiler
from jax_megamoe.config import MoEConfig


def facts(config: MoEConfig, source: str) -> dict[str, object]:
    """What must be equal in every process, by the name that an error gives it.

    The kernels of a group share one layout and one protocol: sizes, but also the version of the
    kernel source and of this package, decide both.

    Raises:
        MissingDependency: the kernel source is not installed.
    """
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    del fields["activation_format"]
    return {
        **fields,
        "weight_format": config.recipe.name,
        "kernel source": f"{source} {compiler.find_source(source).version}",
        "jax_megamoe": importlib.metadata.version("jax-megamoe"),
    }
