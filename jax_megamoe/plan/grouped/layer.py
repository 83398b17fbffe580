"""A layer by grouped products, as one plan: sort and quantise, product, activation, product, sum.

Humming's products find rows by tables. DeepGEMM's of BF16 weights take rows in slots by expert, so
that a launch more copies tokens into slots. Rows that are too many for one block are sorted by two
launches.

Operands: ``x`` bfloat16 [T, H], ``topk_ids`` int32 [T, K], ``topk_weights`` float32 [T, K],
``padding_mask`` bool [T], ``logical_to_physical`` int32 [num_logical, R] with ``num_replicas``
int32 [num_logical], ``w13_weight``, ``w13_weight_scale``, ``w13_weight_scale_2``, ``w13_bias``
float32 [E, 2I] and the same of ``w2``, ``w2_input_scale`` float32 [1], ``stats`` int32 [E]; results
``y`` bfloat16 [T, H] and the plan's scratch. Nothing outlives the call, and nothing waits for the
host.
"""

from dataclasses import replace

from jax_megamoe.plan.grouped import around, humming
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.rules import SLOT_PRODUCTS
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan
from jax_megamoe.plan.symmetric_buffer import BufferLayout


def plan_grouped(layer: GroupedLayer) -> LaunchPlan:
    """The plan of a call with at least one token."""
    product = _slot_product if layer.in_slots else _product
    steps = [
        around.group(layer),
        product(layer, w2=False),
        around.activate(layer),
        product(layer, w2=True),
        around.combine(layer),
    ]
    if layer.in_slots:
        steps.insert(1, around.gather(layer))
    if layer.sorters > 1:
        steps.insert(1, around.place(layer))
    scratch = (_slot_scratch if layer.in_slots else _scratch)(layer)
    if layer.sorters > 1:
        scratch = (("row_counts", (layer.sorters, layer.num_experts), "uint32"), *scratch)
    buffer = BufferLayout(0, 0, ())
    return LaunchPlan(tuple(steps), buffer, 1, layer.block_m, scratch=scratch)


_Scratch = tuple[tuple[str, tuple[int, ...], str], ...]


def _slot_scratch(layer: GroupedLayer) -> _Scratch:
    rows, slots = layer.rows, layer.slots
    hidden, inter = layer.hidden_size, layer.intermediate_size
    return (
        ("row_experts", (rows,), "int32"),
        ("row_slots", (rows,), "uint32"),
        ("expert_ends", (layer.num_experts,), "int32"),
        ("token_rows", (slots, hidden), "bfloat16"),
        ("h", (slots, 2 * inter), "bfloat16"),
        ("hidden_rows", (slots, inter), "bfloat16"),
        ("outputs", (slots, hidden), "bfloat16"),
    )


def _scratch(layer: GroupedLayer) -> _Scratch:
    rows, hidden, inter = layer.rows, layer.hidden_size, layer.intermediate_size
    arrays = [
        ("row_experts", (rows,), "int32"),
        ("sorted_ids", (layer.slots,), "uint32"),
        ("expert_ids", (layer.slots // layer.block_m,), "uint32"),
        ("num_slots", (1,), "uint32"),
        ("h", (rows, 2 * inter), "bfloat16"),
        ("outputs", (rows, hidden), "bfloat16"),
    ]
    if layer.cuts:
        arrays.append(("locks", (humming.num_locks(layer.num_sms),), "int32"))
    dtype = "float8_e4m3fn" if layer.activations == "fp8_block" else "bfloat16"
    arrays.append(("hidden_rows", (rows, inter), dtype))
    if layer.activations != "bf16":
        arrays.append(("token_rows", (layer.num_tokens, hidden), dtype))
    if layer.activations == "fp8_block":
        arrays.append(("token_scales", (layer.num_tokens, hidden // 128), "float32"))
        arrays.append(("hidden_scales", (rows, inter // 128), "float32"))
    if layer.activations == "nvfp4":
        arrays.append(("token_scales", (layer.num_tokens,), "float32"))
    return tuple(arrays)


def _product(layer: GroupedLayer, *, w2: bool) -> KernelLaunch:
    name = "w2" if w2 else "w13"
    rows, scales = ("hidden_rows", "hidden_scales") if w2 else ("token_rows", "token_scales")
    if layer.activations == "bf16" and not w2:
        rows = "x"
    product = layer.product(w2)
    names = humming.Operands(
        a=rows,
        c="outputs" if w2 else "h",
        w=f"{name}_weight",
        w_scale=f"{name}_weight_scale",
        a_scale=scales if product.input.group else None,
        w_scale_2=None if product.second_scale == "none" else f"{name}_weight_scale_2",
    )
    launch = humming.launch(
        product,
        layer.tiles(w2),
        names,
        rows=layer.rows if w2 else layer.num_tokens,
        top_k=1 if w2 else layer.top_k,
        num_sms=layer.num_sms,
    )
    # It reads the tables before it waits for its predecessor, which makes them for the first; for
    # the second they are older than its predecessor's predecessor.
    early = w2 and layer.overlaps
    return replace(launch, config=replace(launch.config, programmatic_serialization=early))


def _slot_product(layer: GroupedLayer, *, w2: bool) -> KernelLaunch:
    first, second = ("token_rows", "w13_weight", "h"), ("hidden_rows", "w2_weight", "outputs")
    names = second if w2 else first
    place = dict(rows=layer.rows, m=layer.block_m, slots=layer.slots, num_sms=layer.num_sms)
    launch = SLOT_PRODUCTS[layer.arch].launch
    return launch(layer.matrices(w2), names, **place, early=layer.overlaps)
