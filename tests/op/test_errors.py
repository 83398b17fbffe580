"""op.py: every call that `mega_moe` refuses, and what it says."""

import dataclasses
from functools import partial
from typing import Any, cast

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.op import shardings

TOKENS = 16
CONFIG = cases.config("mxfp8")
SHARED = cases.config("mxfp8", num_shared_experts=1)


def call(cfg: mm.MoEConfig = CONFIG, jitted: bool = False, **changes: Any) -> Any:
    """`mega_moe` on right arguments, `changes` apart."""
    x, ids, factors = cases.tokens(cfg, TOKENS)
    arguments = dict(x=x, topk_ids=ids, topk_weights=factors, weights=cases.weights(cfg))
    arguments |= {name: changes.pop(name) for name in list(changes) if name in arguments}
    run = partial(mm.mega_moe, config=cfg, **changes)
    return (jax.jit(run) if jitted else run)(**arguments)


X, IDS, FACTORS = cases.tokens(CONFIG, TOKENS)

ARRAYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"x": X[:, :128]},
        ValueError,
        r"x: expected shape \[num_tokens, 256\], got shape \[16, 128\]",
    ),
    ({"x": X[0]}, ValueError, r"x: expected shape \[num_tokens, 256\], got shape \[256\]"),
    ({"x": X[None]}, ValueError, r"x: expected shape .* got shape \[1, 16, 256\]"),
    (
        {"x": X.astype(jnp.float32)},
        TypeError,
        r"x: expected dtype bfloat16, got float32; x.astype\(jnp.bfloat16\) rounds it",
    ),
    ({"x": X.astype(jnp.float16)}, TypeError, r"x: expected dtype bfloat16, got float16"),
    ({"topk_ids": IDS[:8]}, ValueError, r"topk_ids: expected shape \[16, 4\], got shape \[8, 4\]"),
    ({"topk_ids": IDS[:, :3]}, ValueError, r"topk_ids: expected shape \[16, 4\], got .*\[16, 3\]"),
    (
        {"topk_ids": IDS.astype(jnp.uint32)},
        TypeError,
        r"topk_ids: expected dtype int32, got uint32",
    ),
    (
        {"topk_ids": np.asarray(IDS, np.int64)},
        TypeError,
        r"topk_ids: expected dtype int32, got int64; topk_ids.astype\(jnp.int32\) converts it",
    ),
    (
        {"topk_weights": FACTORS[:, 0]},
        ValueError,
        r"topk_weights: expected shape \[16, 4\], got shape \[16\]",
    ),
    (
        {"topk_weights": FACTORS.astype(jnp.bfloat16)},
        TypeError,
        r"topk_weights: expected dtype float32, got bfloat16",
    ),
    (
        {"padding_mask": jnp.zeros(8, bool)},
        ValueError,
        r"padding_mask: expected shape \[16\], got shape \[8\]",
    ),
    (
        {"padding_mask": jnp.zeros(16, jnp.int32)},
        TypeError,
        r"padding_mask: expected dtype bool, got int32",
    ),
    (
        {"topk_ids": IDS.at[3, 1].set(16)},
        ValueError,
        r"topk_ids: expected expert ids in \[0, 16\), or -1 for unrouted, got ids from \d+ to 16",
    ),
    (
        {"topk_ids": IDS.at[3, 1].set(-2)},
        ValueError,
        r"topk_ids: expected expert ids in \[0, 16\), or -1 for unrouted, got ids from -2 to \d+",
    ),
    ({"eplb": {"a": 1}}, TypeError, r"eplb: expected a ReplicaMap, got dict"),
    (
        {"eplb": mm.replica_map(np.arange(16) % 8, 8)},
        ValueError,
        r"eplb.num_replicas: expected shape \[16\], got shape \[8\]",
    ),
    (
        {"implementation": "triton"},
        ValueError,
        r"implementation: expected one of \['deep_gemm', 'grouped', 'xla', 'reference'\], "
        r"got 'triton'",
    ),
]


ROWS = {"x", "topk_ids", "topk_weights", "padding_mask"}

KINDS: list[tuple[dict[str, Any], str]] = [
    (dict(cfg=None), "config: expected a jax_megamoe.MoEConfig, got NoneType"),
    (dict(weights=None), "weights: expected an ExpertWeights .*, got NoneType"),
    (dict(mesh="ep", axis="ep"), "mesh: expected a jax.sharding.Mesh, got str"),
    (dict(axis=0), "axis: expected the name of a mesh axis, or a tuple of names, got 0"),
    (dict(axis="ep", token_axes=("ep", 1)), r"token_axes: expected .*, got \('ep', 1\)"),
]


@pytest.mark.parametrize(("changes", "message"), KINDS)
def test_arguments_of_another_kind(changes: dict[str, Any], message: str) -> None:
    options = dict(x=X, topk_ids=IDS, topk_weights=FACTORS, weights=cases.weights(CONFIG))
    options |= dict(config=changes.pop("cfg", CONFIG)) | changes
    with pytest.raises(TypeError, match=f"^{message}$"):
        mm.mega_moe(**options)


def test_configs_and_weights_of_another_kind() -> None:
    """Of the other public functions."""
    weights, matrices = cases.weights(CONFIG), cases.float_matrices(CONFIG)["routed"]
    spec = "config: expected a jax_megamoe.ExpertSpec, got NoneType"
    config, none = "config: expected a jax_megamoe.MoEConfig, got NoneType", cast(Any, None)
    calls: list[tuple[Any, str]] = [
        (lambda: mm.quantize_experts(none, *matrices), spec),
        (lambda: mm.dequantize_experts(none, weights), spec),
        (lambda: mm.save_experts("never", none, weights), spec),
        (lambda: mm.load_converted("never", none), spec),
        (lambda: mm.load_experts(none, {}, prefix="p"), spec),
        (lambda: mm.einsum_moe(X, IDS, FACTORS, weights, config=none), spec),
        (lambda: mm.check_supported(none, jax.devices()[0]), config),
        (lambda: mm.allocate_buffers(none), config),
        (lambda: mm.moe_stats(IDS, config=none), config),
        (lambda: mm.MegaMoE(none, weights), config),
        (lambda: mm.MegaMoE(CONFIG, cast(Any, CONFIG)), "weights: expected an ExpertWeights"),
        (lambda: mm.dequantize_experts(CONFIG, none), "weights: expected an ExpertWeights"),
        (lambda: mm.to_layout(none, "interleave8"), "weights: expected an ExpertWeights"),
        (lambda: mm.unfold_biases(none), "weights: expected an ExpertWeights"),
        (
            lambda: mm.MegaMoE(CONFIG, rngs=cast(Any, 0)),
            r"rngs: expected an nnx.Rngs\(seed\), got int",
        ),
    ]
    for function, message in calls:
        with pytest.raises(TypeError, match=f"^{message}"):
            function()


@pytest.mark.parametrize(
    ("changes", "error", "message"), [each for each in ARRAYS if each[0].keys() <= ROWS]
)
def test_einsums_take_no_other_arrays(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What the layer is compared with: an array that broadcasts would make it another truth."""
    arrays = dict(x=X, topk_ids=IDS, topk_weights=FACTORS, weights=cases.weights(CONFIG))
    with pytest.raises(error, match=f"^{message}"):
        mm.einsum_moe(**(arrays | changes), config=CONFIG)


def test_exact_einsums_take_float32() -> None:
    wide = X.astype(jnp.float32)
    tokens, weights = (IDS, FACTORS), cases.weights(CONFIG)
    want = mm.einsum_moe(X, *tokens, weights, config=CONFIG, exact=True)
    got = mm.einsum_moe(wide, *tokens, weights, config=CONFIG, exact=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("changes", "error", "message"), ARRAYS)
def test_arrays(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(**changes)


def test_shapes_and_dtypes_are_checked_under_jit() -> None:
    with pytest.raises(ValueError, match=r"^topk_ids: expected shape \[16, 4\], got shape"):
        call(jitted=True, topk_ids=IDS[:, :3])
    with pytest.raises(TypeError, match=r"^x: expected dtype bfloat16, got float32"):
        call(jitted=True, x=X.astype(jnp.float32))


def test_more_tokens_than_the_buffer_holds() -> None:
    cfg = cases.config("mxfp8", max_num_tokens=15)
    message = r"^num_tokens: expected at most max_num_tokens = 15, got 16"
    with pytest.raises(ValueError, match=message):
        call(cfg)
    cfg = cases.config("mxfp8", max_num_tokens=3)
    message = r"^num_tokens: expected at most max_num_tokens = 3, got 4"
    with pytest.raises(ValueError, match=message):
        call(cfg, mesh=cases.ep_mesh(4), axis="ep")
    call(cases.config("mxfp8", max_num_tokens=4), mesh=cases.ep_mesh(4), axis="ep")


def test_logical_ids_beyond_the_logical_experts() -> None:
    cfg = cases.config("mxfp8", num_logical_experts=12)
    message = r"^topk_ids: expected expert ids in \[0, 12\), or -1 for unrouted, got ids from 0 to "
    with pytest.raises(ValueError, match=message):
        call(cfg, topk_ids=IDS)


class TestPlace:
    def test_mesh_without_axis(self) -> None:
        message = r"^axis: expected the expert-parallel axis of the mesh, got None$"
        with pytest.raises(ValueError, match=message):
            call(mesh=cases.ep_mesh(4))

    def test_axis_without_mesh(self) -> None:
        message = (
            r"^axis: expected an axis of a mesh, got 'ep'; pass mesh=, use jax.set_mesh, or call "
            r"inside jax.shard_map over the axis$"
        )
        with pytest.raises(ValueError, match=message):
            call(axis="ep")

    @pytest.mark.parametrize("axis", ["tp", ("ep", "tp"), ()])
    def test_unknown_axis(self, axis: Any) -> None:
        message = rf"^axis: expected one of \['ep'\], got {axis!r}".replace("(", r"\(").replace(
            ")", r"\)"
        )
        with pytest.raises(ValueError, match=message):
            call(mesh=cases.ep_mesh(4), axis=axis)

    def test_unknown_axis_of_the_current_mesh(self) -> None:
        message = r"^axis: expected one of \['ep'\], got 'experts'"
        with jax.set_mesh(cases.ep_mesh(4)), pytest.raises(ValueError, match=message):
            call(axis="experts")

    def test_experts_that_do_not_divide_by_the_ranks(self) -> None:
        cfg = cases.config("mxfp8", num_experts=18)
        message = (
            r"^num_experts: expected a multiple of the 4 expert-parallel ranks, got 18; experts "
            r"are placed whole and evenly: add replicas or change the ranks$"
        )
        with pytest.raises(ValueError, match=message):
            call(cfg, mesh=cases.ep_mesh(4), axis="ep")

    def test_tokens_that_do_not_divide_by_the_ranks(self) -> None:
        message = r"^x rows: expected a multiple of 4, got 15; pad x and mask the padding$"
        with pytest.raises(ValueError, match=message):
            call(
                x=X[:15],
                topk_ids=IDS[:15],
                topk_weights=FACTORS[:15],
                mesh=cases.ep_mesh(4),
                axis="ep",
            )

    def test_all_experts_inside_shard_map(self) -> None:
        weights, rows = cases.weights(CONFIG), P("ep")
        inside = jax.shard_map(
            partial(mm.mega_moe, config=CONFIG, axis="ep"),
            mesh=cases.ep_mesh(4),
            in_specs=(rows, rows, rows, jax.tree.map(lambda _: P(), weights)),
            out_specs=rows,
        )
        message = (
            r"^weights.routed.w13_weight: expected shape \[4, 256, 256\], got shape "
            r"\[16, 256, 256\]"
        )
        with pytest.raises(ValueError, match=message):
            inside(X, IDS, FACTORS, weights)


class TestShared:
    def test_neither_fused_nor_a_function(self) -> None:
        message = (
            r"^shared_experts: expected a function, or fused shared weights, for "
            r"config.num_shared_experts = 1, got neither; use num_shared_experts=0 where the "
            r"shared expert is computed elsewhere$"
        )
        with pytest.raises(ValueError, match=message):
            call(SHARED, weights=cases.weights(CONFIG))

    def test_both(self) -> None:
        expected = "None: the weights hold a fused shared expert"
        message = rf"^shared_experts: expected {expected}, got a function$"
        with pytest.raises(ValueError, match=message):
            call(SHARED, shared_experts=lambda x: x)

    def test_fused_weights_for_a_config_without(self) -> None:
        message = (
            r"^weights.shared: expected None: config.num_shared_experts is 0 or the format fuses "
            r"no shared expert, got an ExpertMatrices$"
        )
        with pytest.raises(ValueError, match=message):
            call(weights=cases.weights(SHARED))

    def test_function_with_a_result_of_another_shape(self) -> None:
        message = r"^shared_experts\(x\): expected shape \[16, 256\], got shape \[16, 128\]$"
        with pytest.raises(ValueError, match=message):
            call(SHARED, weights=cases.weights(CONFIG), shared_experts=lambda x: x[:, :128])


def put(array: Any, *spec: Any, kind: AxisType = AxisType.Auto) -> jax.Array:
    mesh = jax.make_mesh((2, 4), ("tp", "ep"), axis_types=(kind,) * 2)
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


class TestShardings:
    """Nothing is gathered silently (jax#32098, jax#38551)."""

    def test_tokens_over_an_axis_that_was_not_named(self) -> None:
        message = (
            r"^x: expected one device's array, got sharding \(\('ep',\),\); pass mesh= and axis=$"
        )
        with pytest.raises(ValueError, match=message):
            call(x=put(X, "ep"))

    def test_weights_over_an_axis_that_was_not_named(self) -> None:
        weights = cases.weights(CONFIG)
        weights = weights.with_routed(w2_weight=put(weights.routed.w2_weight, "ep"))
        message = (
            r"^weights.routed.w2_weight: expected one device's array, got sharding \(\('ep',\),\)"
        )
        with pytest.raises(ValueError, match=message):
            call(weights=weights)

    def test_tokens_over_another_axis(self) -> None:
        x = put(X, ("ep", "tp"))
        message = (
            r"^x: expected split over \['ep'\] along the first dimension alone, got sharding "
            r"\(\('ep', 'tp'\),\); name the axes in token_axes=, or call inside your own "
            r"jax.shard_map$"
        )
        with pytest.raises(ValueError, match=message):
            call(x=x, mesh=x.sharding.mesh, axis="ep")

    def test_hidden_size_split(self) -> None:
        x = put(X, "ep", "tp")
        message = r"^x: expected split over \['ep'\] .* got sharding \(\('ep',\), \('tp',\)\)"
        with pytest.raises(ValueError, match=message):
            call(x=x, mesh=x.sharding.mesh, axis="ep")

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_tensor_parallelism_inside_an_expert(self, kind: AxisType) -> None:
        weights = cases.weights(CONFIG)
        w13 = put(weights.routed.w13_weight, "ep", "tp", kind=kind)
        weights = weights.with_routed(w13_weight=w13)
        message = (
            r"^weights.routed.w13_weight: expected split over \['ep'\] along the first dimension "
            r"alone, got sharding \(\('ep',\), \('tp',\).*\); there is no tensor parallelism "
            r"inside an expert"
        )
        with pytest.raises(ValueError, match=message):
            call(weights=weights, mesh=w13.sharding.mesh, axis="ep")
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=message):
                call(weights=weights, mesh=w13.sharding.mesh, axis="ep", jitted=True)

    def test_sharded_shared_expert(self) -> None:
        weights = cases.weights(SHARED)
        l2 = put(weights.shared.w2_weight, None, "ep")
        shared = dataclasses.replace(weights.shared, w2_weight=l2)
        weights = dataclasses.replace(weights, shared=shared)
        message = (
            r"^weights.shared.w2_weight: expected a replicated array, got sharding "
            r"\(\(\), \('ep',\)\); pass a sharded shared expert as the function shared_experts=$"
        )
        with pytest.raises(ValueError, match=message):
            call(SHARED, weights=weights, mesh=l2.sharding.mesh, axis="ep")

    def test_sharded_padding_mask(self) -> None:
        mask = put(jnp.zeros(TOKENS, bool), "tp")
        message = r"^padding_mask: expected split over \['ep'\] .* got sharding \(\('tp',\),\)"
        with pytest.raises(ValueError, match=message):
            call(padding_mask=mask, mesh=mask.sharding.mesh, axis="ep")

    @pytest.mark.parametrize(
        ("place", "level", "said"),
        [
            (
                {},
                "WARNING",
                "x lies on a mesh with the axes ['tp', 'ep'], which the call does not name: if its "
                "rows are split over them, JAX gathers the rows and every device computes all of "
                "them; pass mesh= and axis=",
            ),
            (
                dict(axis="ep"),
                "INFO",
                "x lies on a mesh with the axes ['tp'], which the call does not name: if its rows "
                "are split over them, JAX gathers the rows and every device computes all of them; "
                "name them in token_axes=",
            ),
            (dict(axis="ep", token_axes=("tp", "ep")), None, None),
        ],
        ids=["no axis", "another axis", "all named"],
    )
    def test_traced_tokens_over_axes_that_were_not_named(
        self, place: Any, level: Any, said: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A trace knows of Auto axes alone that there are some: said once."""
        shardings._log_unseen.cache_clear()
        x = put(X, ("tp", "ep"))
        place = place | (dict(mesh=x.sharding.mesh) if place else {})
        with caplog.at_level("INFO", logger="jax_megamoe"):
            for _ in range(2):
                run = partial(mm.mega_moe, config=CONFIG, implementation="xla", **place)
                jax.jit(run).lower(x, IDS, FACTORS, cases.weights(CONFIG))
        records = [r for r in caplog.records if r.getMessage().startswith("x lies")]
        got = [(record.levelname, record.getMessage()) for record in records]
        assert got == ([] if said is None else [(level, said)])


@pytest.mark.parametrize("name", ["deep_gemm", "grouped"])
def test_a_named_implementation_never_falls_back(name: str) -> None:
    message = f"^device: expected a CUDA device for implementation {name}, got cpu$"
    with pytest.raises(NotImplementedError, match=message):
        call(implementation=name)


def test_nothing_falls_back_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """The choice made for None is logged once, with the reason."""
    cfg = cases.config("bf16", max_num_tokens=61)
    with caplog.at_level("INFO", logger="jax_megamoe"):
        call(cfg, weights=cases.weights(cases.config("bf16")))
        call(cfg, weights=cases.weights(cases.config("bf16")))
    said = [record.getMessage() for record in caplog.records if "xla" in record.getMessage()]
    reason = "device: expected a CUDA device for implementation deep_gemm, got cpu"
    assert len(said) == 1 and said[0].endswith(f"runs implementation xla: {reason}")
