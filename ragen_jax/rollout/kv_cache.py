"""The KV cache of the slots, and the three passes that write it.

Letters: S slots (or W of them), P prompts, T tokens of each, G key heads, d features of
a head, C positions of the cache. An "entry" is one slot's keys or values in one layer.

Layers are separate arrays and the loop over layers is unrolled, because a stacked cache
carried through a loop is copied at each step. `cache_attention.py` has the layouts of
an entry, and the attention to it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models import transformer
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import AXES_IN, Parameters
from ragen_jax.models.precision import quantize
from ragen_jax.rollout.cache_attention import XLA, CacheAttention
from ragen_jax.trajectory import first_to_hold


@struct.dataclass
class Cache:
    """Keys and values of S slots, one array for each layer."""

    # float[S, G, d, C], [S, G, C, d] or [S, 1, C, F] each: see `CacheAttention`.
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """How to run the model on one shard. Static."""

    config: ModelConfig  # of the whole model
    dtype: Any  # of the computation and the cache
    # Sum partial results over the tensor axis; see `transformer.block`.
    combine_heads: Callable[[jax.Array], jax.Array] = lambda x: x
    combine_mlp: Callable[[jax.Array], jax.Array] = lambda x: x
    attention: CacheAttention = XLA  # of tokens to the cache
    row_attention: str = "auto"  # the kernel of whole prompts, as model.attention

    def buckets(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the cache's lengths that it pays to compile for; the last is C."""
        return lengths if self.attention.has_buckets else lengths[-1:]


def to_decode_layout(parameters: Parameters, dtype) -> Parameters:
    """The weights for decoding: cast once, and layers unstacked into a tuple.

    Slicing stacked weights inside the decode loop would copy them at every step.
    """
    cast = jax.tree.map(lambda w: w.astype(dtype), parameters)
    count = cast["layers"]["attention_norm"].shape[0]
    layers = tuple(
        jax.tree.map(lambda w, i=i: w[i], cast["layers"]) for i in range(count)
    )
    return {**cast, "layers": layers}


def in_eight_bits(weights: Parameters, kind: str) -> Parameters:
    """The weights with all matrices in 8 bits, which halves what a decode pass reads.

    Embeddings are looked up unrounded; tied ones score the vocabulary in 8 bits. Norms
    and biases stay.

    Args:
      weights: from `to_decode_layout`.
      kind: one of `precision.EIGHT_BITS`.
    """
    layers = tuple(
        {
            name: quantize(weight, kind, AXES_IN[name]) if name in AXES_IN else weight
            for name, weight in layer.items()
        }
        for layer in weights["layers"]
    )
    head = weights["head"] if "head" in weights else weights["embedding"].T
    return {**weights, "layers": layers, "head": quantize(head, kind)}


def prefill_prompts(
    weights: Parameters, model: ShardedModel, tokens: jax.Array
) -> Cache:
    """Keys and values of whole prompts, each from position 0.

    Args:
      weights: from `to_decode_layout`.
      model: how to run the model.
      tokens: int32[P, Tp], right-padded; the padding's entries are overwritten before
        anything attends to them.

    Returns:
      A cache of P entries and C = Tp.
    """

    def attend(_, query, key, value):
        mixed = causal_attention(query, key, value, kernel=model.row_attention)
        return mixed, (model.attention.to_entry(key), model.attention.to_entry(value))

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    _, cache = _run_layers(weights, model, tokens, positions, attend)
    return cache


def decode(
    weights: Parameters,
    model: ShardedModel,
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    bucket: int,
) -> tuple[jax.Array, Cache]:
    """One token for every slot.

    Args:
      weights: from `to_decode_layout`.
      model: how to run the model.
      cache: of S slots; `lengths` positions of each are filled.
      tokens: int32[S], the token at position `lengths` of each slot.
      lengths: int32[S], below `bucket`; a slot of length C writes nothing, and its
        logits mean nothing.
      bucket: how many positions of the cache are read.

    Returns:
      float32[S, V] logits of the next token, and the cache with this one added.
    """
    attention = model.attention
    count = lengths + 1
    if not attention.has_buckets:
        # A slot that does not decode reads one key: attention to none is undefined.
        context = cache.keys[0].shape[attention.context_axis]
        count = jnp.where(lengths < context, count, 1)

    def attend(layer, query, key, value):
        keys = attention.write_token(cache.keys[layer], key[:, 0], lengths)
        values = attention.write_token(cache.values[layer], value[:, 0], lengths)
        mixed = attention.attend_token(query, keys, values, count, bucket)
        return mixed, (keys, values)

    hidden, cache = _run_layers(
        weights, model, tokens[:, None], lengths[:, None], attend
    )
    return transformer.vocabulary_logits(weights, hidden[:, 0]), cache


def extend(
    weights: Parameters,
    model: ShardedModel,
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    buckets: tuple[int, ...],
) -> Cache:
    """Prefills M given tokens in each of W gathered slots, after those it holds.

    Args:
      weights: from `to_decode_layout`.
      model: how to run the model.
      cache: of W entries; `lengths` positions of each are filled.
      tokens: int32[W, M], right-padded; the padding's entries are overwritten by
        decoding before anything attends to them.
      lengths: int32[W], at most C - M: `dynamic_update_slice` would clamp a later
        start.
      buckets: rising numbers of positions, the last C; the smallest that holds all
        tokens is read.
    """
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    needed = positions.max() + 1
    buckets = model.buckets(buckets)
    shortest = first_to_hold(buckets, needed)
    attention = model.attention

    def attend(layer, query, key, value):
        keys = attention.write_message(cache.keys[layer], key, lengths)
        values = attention.write_message(cache.values[layer], value, lengths)
        read = functools.partial(
            attention.attend_message, query, keys, values, positions
        )
        branches = [functools.partial(read, bucket) for bucket in buckets]
        return jax.lax.switch(shortest, branches), (keys, values)

    # No logits: the message's last token is pending, and the next decode step runs it.
    _, cache = _run_layers(weights, model, tokens, positions, attend)
    return cache


def with_context(cache: Cache, model: ShardedModel, context: int) -> Cache:
    """The cache with room for `context` positions, zeros behind what it holds."""
    return jax.tree.map(lambda x: model.attention.with_context(x, context), cache)


def with_prompts(
    cache: Cache,
    model: ShardedModel,
    prompts: Cache,
    group: jax.Array,
    is_new: jax.Array,
) -> Cache:
    """The cache whose new entries begin with the prompts of their groups.

    Args:
      cache: of W slots.
      model: how to run the model.
      prompts: of the groups, C at most the cache's.
      group: int32[W], the prompt of each slot.
      is_new: bool[W], the slots to give it to.
    """

    def with_prompt(entry, prompt):
        return model.attention.with_prefix(entry, prompt[group], is_new)

    return jax.tree.map(with_prompt, cache, prompts)


def _run_layers(
    weights: Parameters,
    model: ShardedModel,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
) -> tuple[jax.Array, Cache]:
    """All layers, one after the other, and the final norm.

    Args:
      weights: from `to_decode_layout`.
      model: how to run the model.
      tokens: int32[S, T].
      positions: int32[S, T].
      attend: (layer's index, query [S, T, H, d], key and value [S, T, G, d]) ->
        (mixed [S, T, H, d], that layer's entries of keys and values).

    Returns:
      float[S, T, D] hidden states, and the cache of all layers.
    """
    config = model.config
    x = transformer.embed(weights, tokens, model.dtype)
    entries = []
    for index, layer in enumerate(weights["layers"]):
        x, keys_and_values = transformer.block(
            layer,
            x,
            positions,
            config,
            lambda *qkv, index=index: attend(index, *qkv),
            model.combine_heads,
            model.combine_mlp,
        )
        entries.append(keys_and_values)
    keys, values = zip(*entries, strict=True)
    hidden = transformer.rms_norm(x, weights["final_norm"], config.norm_epsilon)
    return hidden, Cache(keys=keys, values=values)
