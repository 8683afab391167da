"""The forward pass: one block used by the update, by prefill and by decoding.

What differs between them is attention alone, so `block` takes it as a function.
Shapes: R rows (or slots), T tokens of each, D width, H query heads, G key/value heads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.models import lora
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig, RopeScaling
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.precision import add_bias, project, scale

# (query [R,T,H,d], key [R,T,G,d], value [R,T,G,d]) -> (mixed [R,T,H,d], anything)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
KeysAndValues = tuple[jax.Array, ...]  # a pair of arrays, or ()


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last axis, computed in float32 (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return scale(wide.astype(x.dtype), weight)


def rotary_frequencies(
    half: int, base: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """float32[half], radians a position by which each pair of features turns.

    Pair i turns by base^(-i / half) (arXiv:2104.09864, section 3.2). Scaled, a pair
    that turns less than `low_frequency_factor` times in the original context turns
    `factor` times slower, one that turns more than `high_frequency_factor` times as
    before, and between the two the fraction that keeps its speed grows linearly: Llama
    3.1's released code, and `_compute_llama3_parameters` of transformers.

    Args:
      half: of the features of a head.
      base: theta.
      scaling: None for rotations as they are.
    """
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


def rotate(
    x: jax.Array,
    positions: jax.Array,
    base: float,
    scaling: RopeScaling | None = None,
) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864), halves as Hugging Face pairs them.

    Args:
      x: float[R, T, heads, head_dim].
      positions: int32[R, T], 0-based.
      base: theta.
      scaling: of the frequencies, if there is one.
    """
    frequency = rotary_frequencies(x.shape[-1] // 2, base, scaling)
    # float32 throughout: bfloat16 cannot tell position 256 from 257.
    angle = (
        positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None]
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def block(
    layer: Parameters,
    x: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    attend: Attend,
    combine_heads: Callable[[jax.Array], jax.Array] = lambda x: x,
    combine_mlp: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, Any]:
    """One transformer layer.

    Args:
      layer: this layer's parameters, without the leading L, in x's dtype or a wider
        one; see precision.py.
      x: float[R, T, D].
      positions: int32[R, T].
      config: the model's shape.
      attend: attention; its second result is returned as it is.
      combine_heads: sums partial results where each device holds some of the heads.
      combine_mlp: the same for the hidden units of the MLP.

    Returns:
      float[R, T, D], and the second result of `attend`: keys and values, or None.
    """
    with jax.named_scope("attention"):
        h = rms_norm(x, layer["attention_norm"], config.norm_epsilon)
        query, key, value = (
            project("rtd,dhk->rthk", h, layer[name])
            for name in ("query", "key", "value")
        )
        if config.qkv_bias:
            query = add_bias(query, layer["query_bias"])
            key = add_bias(key, layer["key_bias"])
            value = add_bias(value, layer["value_bias"])
        if config.qk_norm:  # Each head by itself.
            query = rms_norm(query, layer["query_norm"], config.norm_epsilon)
            key = rms_norm(key, layer["key_norm"], config.norm_epsilon)
        query, key = (
            rotate(heads, positions, config.rope_base, config.rope_scaling)
            for heads in (query, key)
        )
        mixed, carry = attend(query, key, value)
        x += combine_heads(project("rthk,hkd->rtd", mixed, layer["output"]))
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer["mlp_norm"], config.norm_epsilon)
        gate, up = (project("rtd,df->rtf", h, layer[name]) for name in ("gate", "up"))
        mixed = project("rtf,fd->rtd", jax.nn.silu(gate) * up, layer["down"])
        return x + combine_mlp(mixed), carry


def embed(parameters: Parameters, tokens: jax.Array, dtype) -> jax.Array:
    """float[R, T, D], the embedding rows of int32[R, T] tokens."""
    # Looked up before the cast: the gradient adds up in the parameters' own precision.
    return parameters["embedding"][tokens].astype(dtype)


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass over rows is computed, whatever the model. Static.

    The last three say where: by default all on one device, without communication.
    """

    # Of the computation; norms, softmax and rotations are float32 always.
    dtype: Any = jnp.float32
    # Recompute each layer in the backward pass instead of keeping its activations.
    remat: bool = False
    # Fixes the sharding of float[R, T, D] activations between layers.
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x
    # `causal_attention`, or that on each device's rows and heads.
    attention: Callable[..., jax.Array] = causal_attention
    # `embed`, or that by devices that shard the embedding.
    embed: Callable[..., jax.Array] = embed


DEFAULT_OPTIONS = ForwardOptions()


def hidden_states(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    options: ForwardOptions = DEFAULT_OPTIONS,
    *,
    prefix: KeysAndValues = (),
) -> jax.Array:
    """The forward pass over rows, all layers but the vocabulary's.

    Args:
      parameters: as `parameters.declare` or `lora.assemble` lays them out.
      tokens: int32[R, T].
      config: the model's shape.
      options: how to compute.
      prefix: keys and values of tokens before every row, from `prefix_keys_and_values`;
        (): rows begin at position 0.

    Returns:
      float[R, T, D] after the final norm. Position t has seen the prefix and tokens
      0..t.
    """
    first = prefix[0].shape[2] if prefix else 0
    positions = first + jnp.arange(tokens.shape[1])[None]
    positions = jnp.broadcast_to(positions, tokens.shape)

    def one_layer(x, layer_and_prefix):
        layer, prefix_of_layer = layer_and_prefix
        layer = jax.tree.map(lora.weight, layer, is_leaf=lora.is_adapted)
        attend = lambda *qkv: (options.attention(*qkv, *prefix_of_layer), None)
        return options.constrain(block(layer, x, positions, config, attend)[0]), None

    if options.remat:
        one_layer = jax.checkpoint(one_layer)
    x = options.constrain(options.embed(parameters, tokens, options.dtype))
    x, _ = jax.lax.scan(one_layer, x, (parameters["layers"], prefix))
    return rms_norm(x, parameters["final_norm"], config.norm_epsilon)


def prefix_keys_and_values(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    options: ForwardOptions = DEFAULT_OPTIONS,
) -> KeysAndValues:
    """Keys and values of a prefix that all rows begin with, computed once for all.

    Args: `tokens`, int32[S], S >= 1; the others as for `hidden_states`. The functions
      of `options` are given one row, and `constrain` is not called.

    Returns:
      Keys and values of every layer, float[L, 1, S, G, d] each.
    """
    positions = jnp.arange(tokens.shape[0])[None]

    def one_layer(x, layer: Parameters):
        layer = jax.tree.map(lora.weight, layer, is_leaf=lora.is_adapted)
        attend = lambda query, *kv: (options.attention(query, *kv), kv)
        return block(layer, x, positions, config, attend)

    if options.remat:
        one_layer = jax.checkpoint(one_layer)
    x = options.embed(parameters, tokens[None], options.dtype)
    return jax.lax.scan(one_layer, x, parameters["layers"])[1]


def vocabulary_logits(parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """float32[..., V] logits of float[..., D] hidden states."""
    axes = "rtuw"[: hidden.ndim - 1]
    if "head" in parameters:
        spec, weight = f"{axes}d,dv->{axes}v", parameters["head"]
    else:
        spec, weight = f"{axes}d,vd->{axes}v", parameters["embedding"]
    return project(spec, hidden, weight, out_dtype=jnp.float32)


def token_values(parameters: Parameters, hidden: jax.Array) -> jax.Array:
    """float32[R, T], units of reward: the critic's value before each token is known.

    The value at t is read from position t - 1; position 0 has none and holds 0.
    """
    weight = parameters["value_head"]
    values = project("rtd,d->rt", hidden, weight, out_dtype=jnp.float32)
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
