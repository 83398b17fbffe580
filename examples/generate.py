"""A Qwen3-MoE or GPT-OSS decoder: token ids in, token ids out.

    python examples/generate.py FOLDER --ids 9707,11,1879       # a Hugging Face folder
    python examples/generate.py FOLDER --text "Hello" --new 64  # needs transformers' tokenizer
    python examples/generate.py                                 # tiny, random, over 8 CPU devices

Rotary attention with a key-value cache, RMSNorm and `MegaMoEBlock`s. Layers are stacked and
scanned; the prompt's pass and a step are jitted once each. Sequences are split over the mesh axis
that the experts are spread over: attention is data parallel, the experts are expert parallel.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from attention import FULL, Cache, Place, attend, parts, rotated
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jax_megamoe as mm
from jax_megamoe.weights.checkpoint.tensors import Checkpoint

Read = Callable[[str], Any]
"""An array of a checkpoint by its name."""


@dataclass(frozen=True)
class DecoderConfig:
    """What a config.json says of attention, as far as the two families differ.

    Attributes:
        windows: of each layer, the positions that a token attends to.
        has_biases: of the attention's projections (GPT-OSS).
        has_sinks: a logit per head that takes probability and gives nothing (GPT-OSS).
        has_norms: RMSNorm of each head's queries and keys (Qwen3).
        frequencies: of the rotary embedding, one a pair of a head's values.
        rotary_scale: factor of its sines and cosines (YaRN).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    windows: tuple[int, ...]
    has_biases: bool
    has_sinks: bool
    has_norms: bool
    frequencies: tuple[float, ...]
    rotary_scale: float
    tied_embeddings: bool

    @classmethod
    def read(cls, folder: Path) -> "DecoderConfig":
        """From a model's folder. Raises ValueError for a model of another family."""
        return cls.of(json.loads((folder / "config.json").read_text()))

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "DecoderConfig":
        """From what config.json holds. Raises ValueError for a model of another family."""
        family = raw["model_type"]
        if family not in ("qwen3_moe", "gpt_oss"):
            raise ValueError(f"model_type: expected qwen3_moe or gpt_oss, got {family!r}")
        is_gpt_oss = family == "gpt_oss"
        kinds = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]
        window = raw.get("sliding_window") or FULL
        frequencies, scale = rotary_frequencies(raw)
        return cls(
            hidden_size=raw["hidden_size"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab_size=raw["vocab_size"],
            epsilon=raw["rms_norm_eps"],
            windows=tuple(window if kind == "sliding_attention" else FULL for kind in kinds),
            has_biases=is_gpt_oss,
            has_sinks=is_gpt_oss,
            has_norms=not is_gpt_oss,
            frequencies=tuple(frequencies.tolist()),
            rotary_scale=scale,
            tied_embeddings=raw.get("tie_word_embeddings", False),
        )


def rotary_frequencies(raw: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Frequencies [head_dim / 2] and the factor of sines and cosines.

    YaRN: Peng et al., arXiv:2309.00071, sections 3.2 and 3.4.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw["rope_theta"]
    size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    frequencies = 1.0 / theta ** (np.arange(0, size, 2) / size)
    if rope.get("rope_type", "default") == "default":
        return frequencies, 1.0
    if rope["rope_type"] != "yarn":
        raise ValueError(f"rope_type: expected default or yarn, got {rope['rope_type']!r}")
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        """The pair of values that turns so often over the original context."""
        return size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_that_turns(rope.get(*end)) for end in (("beta_fast", 32), ("beta_slow", 1)))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slow = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
    scale = rope.get("attention_factor") or 0.1 * math.log(factor) + 1
    return frequencies * (1 - slow) + frequencies / factor * slow, scale


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """x at root mean square 1 over its last axis, times the weight; computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return weight * (wide * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. Weights are [out, in], as checkpoints have them.

    Queries', keys' and values' projections are one, in this order, and their norms' weights too.
    """

    def __init__(
        self, config: DecoderConfig, read: Read, prefix: str, has_kernel: bool = False
    ) -> None:
        def held(kind: str, *parts: str) -> nnx.Param[jax.Array]:
            arrays = [jnp.asarray(read(f"{prefix}.{part}.{kind}")) for part in parts]
            return nnx.Param(jnp.concatenate(arrays))

        self.config, self.has_kernel = config, has_kernel
        inputs = "q_proj", "k_proj", "v_proj"
        self.input, self.output = held("weight", *inputs), held("weight", "o_proj")
        self.input_bias = held("bias", *inputs) if config.has_biases else None
        self.output_bias = held("bias", "o_proj") if config.has_biases else None
        sinks = jnp.asarray(read(f"{prefix}.sinks")) if config.has_sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks)
        norms = None
        if config.has_norms:  # a row for each head of queries and keys
            counts = np.array([config.num_heads, config.num_kv_heads])
            norms = [jnp.asarray(read(f"{prefix}.{part}_norm.weight")) for part in "qk"]
            norms = jnp.repeat(jnp.stack(norms), counts, axis=0, total_repeat_length=counts.sum())
        self.norms = None if norms is None else nnx.Param(norms)

    def __call__(self, x: jax.Array, place: Place) -> tuple[jax.Array, Cache]:
        """x [B, T, H], after what the layer's cache has before the first position.

        Returns:
            [B, T, H], and keys and values of x [B, T, kv_heads, head_dim].
        """
        config = self.config
        heads = project(x, self.input, self.input_bias).reshape(*x.shape[:2], -1, config.head_dim)
        turned, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        if self.norms is not None:
            turned = rms_norm(turned, self.norms[...], config.epsilon)
        heads = jnp.concatenate([rotated(turned, place.turns), v], axis=2)
        sinks = None if self.sinks is None else self.sinks[...]
        mixed = attend(heads, place, sinks, self.has_kernel).reshape(*x.shape[:2], -1)
        return project(mixed, self.output, self.output_bias), parts(heads, config.num_kv_heads)[1]


def project(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    """x times a matrix [out, in], with its bias."""
    y = x @ weight[...].T
    if bias is None:
        return y
    # Apart: a product that adds a layer's bias has its matrix copied, see `COMPILER_OPTIONS`.
    return jax.lax.optimization_barrier(y) + bias[...]


def rotary(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines for positions [B, T], float32 [B, T, 1, head_dim / 2] each."""
    frequencies = jnp.asarray(config.frequencies, jnp.float32)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles) * config.rotary_scale, jnp.cos(angles) * config.rotary_scale


class Layer(nnx.Module):
    """One decoder layer: attention and the given block."""

    def __init__(
        self, config: DecoderConfig, read: Read, index: int, block: mm.MegaMoEBlock
    ) -> None:
        prefix = f"model.layers.{index}"

        def norm(name: str) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.asarray(read(f"{prefix}.{name}.weight")))

        self.epsilon = config.epsilon
        self.input_norm = norm("input_layernorm")
        is_alone = block.experts.used_mesh is None  # a kernel is not split over a mesh
        self.attention = Attention(config, read, f"{prefix}.self_attn", is_alone)
        self.block_norm = norm("post_attention_layernorm")
        self.block = block

    def __call__(self, x: jax.Array, padding: jax.Array, place: Place) -> tuple[jax.Array, Cache]:
        """x [B, T, H]; see `Attention`. Padding, bool [B, T], reaches no expert."""
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.input_norm[...], self.epsilon)
            mixed, rows = self.attention(normed, place)
            x = x + mixed
        with jax.named_scope("experts"):
            normed = rms_norm(x, self.block_norm[...], self.epsilon)
            return x + self.block(normed, padding_mask=padding), rows


class Decoder(nnx.Module):
    """The model: embedding, stacked layers, final norm and head."""

    def __init__(self, config: DecoderConfig, read: Read, layers: Layer) -> None:
        """Makes it of `stacked` layers and what `read` has of the rest."""

        def held(name: str) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.asarray(read(name)))

        self.config = config
        self.layers = layers
        self.embedding = held("model.embed_tokens.weight")
        self.norm = held("model.norm.weight")
        self.head = None if config.tied_embeddings else held("lm_head.weight")

    @classmethod
    def load(
        cls, folder: Path, *, mesh: Mesh | None = None, max_num_tokens: int, **block: Any
    ) -> "Decoder":
        """A model from its folder, as Hugging Face saves it.

        Args:
            folder: of config.json and safetensors files.
            mesh: devices, with the axis "ep"; None: the default device.
            max_num_tokens: most tokens of one call on each device.
            **block: further arguments of `MegaMoEBlock.from_config`.
        """
        tensors = Checkpoint(folder)
        config = DecoderConfig.read(folder)
        block |= dict(mesh=mesh, axis=None if mesh is None else "ep", max_num_tokens=max_num_tokens)

        def read(name: str) -> Any:
            return tensors.tensor(name).read()

        def layers() -> Iterator[Layer]:
            for index in range(len(config.windows)):
                experts = mm.MegaMoEBlock.from_config(
                    folder / "config.json", layer_index=index, **block
                )
                experts.load(folder, index)
                yield Layer(config, read, index, experts)

        return cls(config, read, stacked(layers(), len(config.windows)))

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, padding: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Logits float32 [B, T, vocabulary] of tokens [B, T] at their positions, after what the
        cache has before the first; and their keys and values, for `Cache.put`."""
        graph, state = nnx.split(self.layers)

        def step(x: jax.Array, of_layer: Any) -> tuple[jax.Array, Cache]:
            layer_state, index, sliced = of_layer
            layer = nnx.merge(graph, layer_state)
            return layer(x, padding, Place(cache, sliced, index, windows, positions, turns))

        windows = jnp.asarray(self.config.windows, jnp.int32)
        turns = rotary(self.config, positions)
        x = self.embedding[...][tokens]
        x, rows = jax.lax.scan(step, x, (state, jnp.arange(len(windows)), cache))
        x = rms_norm(x, self.norm[...], self.config.epsilon)
        head = self.embedding if self.head is None else self.head
        return (x @ head[...].T).astype(jnp.float32), rows

    def empty_cache(self, sequences: int, length: int) -> Cache:
        """A cache for so many sequences of so many positions."""
        config = self.config
        shape = (len(config.windows), sequences, config.num_kv_heads, length, config.head_dim)
        return Cache(*(jnp.zeros(shape, jnp.bfloat16) for _ in range(2)))


def stacked(layers: Iterable[Layer], count: int) -> Layer:
    """`count` layers of one structure as one, whose arrays have a leading axis for them.

    Each is put in its place as it comes, so that the model is never there twice.
    """
    graph: Any = None
    stack: Any = None
    for index, layer in enumerate(layers):
        structure, state = nnx.split(layer)
        if stack is None:
            graph, stack = structure, jax.tree.map(partial(_room, count), state)
        stack = jax.tree.map(partial(_put, index=jnp.int32(index)), stack, state)
    return nnx.merge(graph, stack)


def _room(count: int, array: jax.Array) -> jax.Array:
    """Zeros for so many arrays like this one, split as it is."""
    split = None
    if isinstance(array.sharding, NamedSharding):
        split = NamedSharding(array.sharding.mesh, P(None, *array.sharding.spec))
    return jnp.zeros((count, *array.shape), array.dtype, device=split)


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, one: jax.Array, index: jax.Array) -> jax.Array:
    """The stack with `one` at a place."""
    return jax.lax.dynamic_update_index_in_dim(stack, one, index, 0)


def after_prompts(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Logits [B, vocabulary] after each prompt of tokens [B, T], and the cache with all of them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits, rows = model(tokens, positions, positions >= lengths[:, None], cache.first(0))
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
    return last, cache.put(rows, positions)


def after_token(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Logits [B, vocabulary] after one token [B] more, which lies at position `lengths`."""
    padding = jnp.zeros((len(tokens), 1), bool)
    logits, rows = model(tokens[:, None], lengths[:, None], padding, cache)
    return logits[:, 0], cache.put(rows, lengths[:, None])


COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Of a step on a GPU: cuBLAS reads a layer's matrix where it lies among those of all layers, while
XLA's own products have it copied first, which reads and writes every weight once more."""


def jitted(function: Callable[..., tuple[jax.Array, Cache]]) -> Callable[..., Any]:
    """`function(model, tokens, lengths, cache)` compiled; the cache is changed in place."""

    @partial(jax.jit, static_argnums=0, donate_argnums=4, compiler_options=COMPILER_OPTIONS)
    def run(graph: Any, state: Any, tokens: jax.Array, lengths: jax.Array, cache: Cache) -> Any:
        return function(nnx.merge(graph, state), tokens, lengths, cache)

    return lambda model, *rest: run(*nnx.split(model), *rest)


prefill, decode = jitted(after_prompts), jitted(after_token)


def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, mesh: Mesh | None = None
) -> np.ndarray:
    """The most probable continuation of each prompt, int32 [B, new_tokens].

    Args:
        prompts: token ids, of any lengths; with a mesh, as many as its devices or a multiple.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = model.empty_cache(len(prompts), int(lengths.max()) + new_tokens)
    if mesh is not None:
        rows = NamedSharding(mesh, P("ep"))
        tokens, lengths = (jax.device_put(array, rows) for array in (tokens, lengths))
        cache = jax.device_put(cache, NamedSharding(mesh, P(None, "ep")))
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    logits, cache = prefill(model, tokens, lengths, cache)
    chosen = []
    for step in range(new_tokens):
        chosen.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        if step + 1 < new_tokens:
            logits, cache = decode(model, chosen[-1], lengths + step, cache)
    return np.stack([np.asarray(token) for token in chosen], axis=1)


def write_tiny_model(folder: Path, raw: dict[str, Any], seed: int = 0) -> None:
    """A random Qwen3-MoE checkpoint of these sizes, as Hugging Face would save it."""
    rng = np.random.default_rng(seed)
    hidden, head = raw["hidden_size"], raw["head_dim"]
    q, kv = raw["num_attention_heads"] * head, raw["num_key_value_heads"] * head
    inter = raw["moe_intermediate_size"]
    attention = {part: (kv, hidden) for part in ("k_proj", "v_proj")}
    attention |= dict(q_proj=(q, hidden), o_proj=(hidden, q))
    shapes = {name: (raw["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    norms = {"model.norm": hidden}
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{part}": shape for part, shape in attention.items()}
        shapes[f"{prefix}.mlp.gate"] = (raw["num_experts"], hidden)
        for expert in range(raw["num_experts"]):
            name = f"{prefix}.mlp.experts.{expert}"
            shapes |= {f"{name}.{part}_proj": (inter, hidden) for part in ("gate", "up")}
            shapes[f"{name}.down_proj"] = (hidden, inter)
        norms |= {f"{prefix}.self_attn.{part}": head for part in ("q_norm", "k_norm")}
        norms |= {f"{prefix}.{part}_layernorm": hidden for part in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": rng.normal(0, shape[-1] ** -0.5, shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": np.ones(size, ml_dtypes.bfloat16) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


TINY = dict(
    model_type="qwen3_moe", hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=256, rms_norm_eps=1e-6, rope_theta=1e6,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], intermediate_size=256, hidden_act="silu",
)  # fmt: skip


def tiny() -> None:
    """Eight prompts over eight CPU devices, each of which agrees with itself alone on one.

    Eight at once on one device may differ: products of another shape may round otherwise, and the
    first and second of a random model's tokens are often as probable."""
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Auto,))
    prompts = [[1 + 7 * i + j for j in range(3 + i % 4)] for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), TINY)
        load = partial(Decoder.load, Path(folder), max_num_tokens=64)
        spread = generate(load(mesh=mesh), prompts, 16, mesh)
        model = load()
        alone = np.concatenate([generate(model, [prompt], 16) for prompt in prompts])
    print(f"{len(prompts)} sequences of 16 tokens over {mesh.size} devices")
    print("first:", " ".join(map(str, spread[0])))
    print("the same one by one on one device:", bool((spread == alone).all()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A decoder: token ids in, token ids out.")
    parser.add_argument("folder", type=Path, nargs="?", help="a model as Hugging Face saves it")
    parser.add_argument("--ids", help="the prompt as token ids, with commas between them")
    parser.add_argument("--text", help="the prompt as text, which needs transformers")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    arguments = parser.parse_args()
    if arguments.folder is None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        tiny()
        return
    tokenizer = None
    if arguments.text is not None:
        transformers = import_module("transformers")  # only text needs it
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
        ids = tokenizer(arguments.text)["input_ids"]
    elif arguments.ids:
        ids = [int(each) for each in arguments.ids.split(",")]
    else:
        parser.error("a folder needs a prompt: --ids or --text")
    model = Decoder.load(arguments.folder, max_num_tokens=len(ids))
    new = generate(model, [ids], arguments.new)[0].tolist()
    print(tokenizer.decode(new) if tokenizer else " ".join(map(str, new)))


if __name__ == "__main__":
    main()
