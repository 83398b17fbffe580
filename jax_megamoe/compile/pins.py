"""The distributions that ship headers of kernels: where the headers lie, and the wheels to fetch.

Sizes and SHA-256 are PyPI's; the headers of a version's wheels are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from jax_megamoe.compile.errors import CUDA_EXTRA


@dataclass(frozen=True)
class Wheel:
    """One file of a distribution.

    Attributes:
        platform: pip's tag, ``"manylinux_2_28_x86_64"``.
        num_bytes: size of the file.
        sha256: hexadecimal.
    """

    platform: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Distribution:
    """What a kernel source is on the package index, in the version that plans are for.

    Attributes:
        name: the distribution's.
        version: the pinned one.
        module: top-level module, a folder of the wheel.
        folder: the folder of headers in it.
        variable: environment variable that names an unpacked one.
        install: commands that bring it.
        wheels: by `platform.machine()`.
        kernels: the folder of its kernels among the headers.
        kept: the folder of headers that fetching keeps; empty: all.
        namespace: C++ namespace of its kernels; empty: none.
        cutlass: name of the source whose CUTLASS compiles it; empty: its own; None: it needs none.
        exact: only the pinned version is used: what the host tells the kernels is not in their
            parameter types.
    """

    name: str
    version: str
    module: str
    folder: str
    variable: str
    install: str
    wheels: Mapping[str, Wheel]
    kernels: str = "deep_gemm"
    kept: str = ""
    namespace: str = "deep_gemm"
    cutlass: str | None = ""
    exact: bool = False

    @property
    def headers(self) -> PurePosixPath:
        """The folder of headers in a wheel."""
        return PurePosixPath(self.module, self.folder)


_FLASHINFER_WHEEL = Wheel(
    "any", 101294319, "a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32"
)

DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        "sgl": Distribution(
            "sgl-deep-gemm",
            "0.2.5",
            "deep_gemm",
            "include",
            "JAX_MEGAMOE_SGL_ROOT",
            f"{CUDA_EXTRA}, or python -m jax_megamoe sources fetch sgl",
            {
                "x86_64": Wheel(
                    "manylinux2014_x86_64",
                    5061095,
                    "e13778e53f682b806dd2c799b5ad81701114d9346044643a8df7589a845f34e6",
                ),
                "aarch64": Wheel(
                    "manylinux2014_aarch64",
                    4976687,
                    "b7f2bc341f191afc13ab2d72a733af82f3334682f3667c6a8fad535330752de9",
                ),
            },
        ),
        "vllm": Distribution(
            "vllm",
            "0.33.0",
            "vllm",
            "third_party/deep_gemm/include",
            "JAX_MEGAMOE_VLLM_ROOT",
            "python -m jax_megamoe sources fetch vllm, or pip install --no-deps vllm==0.33.0",
            {
                "x86_64": Wheel(
                    "manylinux_2_28_x86_64",
                    336361138,
                    "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
                ),
                "aarch64": Wheel(
                    "manylinux_2_28_aarch64",
                    333472621,
                    "e9e404f52c8494b69bd83fe99fe7ecfa9f6b89fbd156d2a9639c24ea41d6d606",
                ),
            },
        ),
        "flashinfer": Distribution(
            "flashinfer-python",
            "0.7.4",
            "flashinfer",
            "data/include",
            "JAX_MEGAMOE_FLASHINFER_ROOT",
            "python -m jax_megamoe sources fetch flashinfer, or pip install --no-deps "
            "flashinfer-python==0.7.4",
            {"x86_64": _FLASHINFER_WHEEL, "aarch64": _FLASHINFER_WHEEL},
            kernels="flashinfer/megamoe",
            kept="flashinfer/megamoe",
            namespace="flashinfer::megamoe",
            cutlass="sgl",
            exact=True,
        ),
        "humming": Distribution(
            "humming-kernels",
            "0.1.20",
            "humming",
            "include",
            "JAX_MEGAMOE_HUMMING_ROOT",
            "python -m jax_megamoe sources fetch humming, or pip install --no-deps "
            "humming-kernels==0.1.20",
            {
                "x86_64": Wheel(
                    "manylinux_2_28_x86_64",
                    616445,
                    "d4747cae223f81bb8d18bee766a5f41e67484a65bd665534fdbc8dc7adabd7c1",
                ),
                "aarch64": Wheel(
                    "manylinux_2_28_aarch64",
                    601871,
                    "1c7ecbeacb8f449136140a7fea68be06f2e5ce083e52de6b2e37e91158c3eee3",
                ),
            },
            kernels="humming",
            namespace="",
            cutlass=None,
            exact=True,
        ),
    }
)
"""By the name of the kernel source."""
