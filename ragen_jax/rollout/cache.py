"""The KV cache of the slots, and the three passes that write it.

Keys and values of a layer are [slots, kv_heads, head_dim, context]: with the context
last, both products of decoding are plain batched matrix products over contiguous
memory (measured on CPU: 3 to 4 times faster than with head_dim last). Layers are
separate arrays and the layers' loop is unrolled, because a stacked cache carried
through a loop is copied at each step.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models import transformer
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters


@struct.dataclass
class Cache:
    """One entry a layer, each float[S, G, head_dim, C]: key or value at a position."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Policy:
    """How to run the model on one shard. Static."""

    config: ModelConfig  # of the whole model
    dtype: Any  # of the computation and the cache
    combine_heads: Callable[[jax.Array], jax.Array] = lambda x: x
    combine_mlp: Callable[[jax.Array], jax.Array] = lambda x: x


def lay_out(parameters: Parameters, dtype) -> Parameters:
    """The weights as decoding wants them: cast once, one entry a layer.

    Slicing stacked weights inside the decode loop would copy them at every step.
    """
    cast = jax.tree.map(lambda w: w.astype(dtype), parameters)
    count = cast["layers"]["attention_norm"].shape[0]
    layers = tuple(
        jax.tree.map(lambda w, i=i: w[i], cast["layers"]) for i in range(count)
    )
    return {**cast, "layers": layers}


def prefill_prompts(weights: Parameters, policy: Policy, tokens: jax.Array) -> Cache:
    """Keys and values of whole prompts, each from position 0.

    Args:
      weights: from `lay_out`.
      policy: how to run the model.
      tokens: int32[P, Tp], right-padded; what stands behind a prompt's end is
        overwritten before anything attends to it.

    Returns:
      A cache of P entries and C = Tp.
    """

    def attend(_, query, key, value):
        mixed = causal_attention(query, key, value)
        return mixed, (_to_cache(key), _to_cache(value))

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    _, cache = _run_layers(weights, policy, tokens, positions, attend)
    return cache


def decode(
    weights: Parameters,
    policy: Policy,
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    bucket: int,
) -> tuple[jax.Array, Cache]:
    """One token for every slot.

    Args:
      weights: from `lay_out`.
      policy: how to run the model.
      cache: of S slots; `lengths` positions of each are filled.
      tokens: int32[S], the token at position `lengths` of each slot.
      lengths: int32[S], below `bucket`; a slot of length C writes nothing, and its
        logits mean nothing.
      bucket: how many positions of the cache are read.

    Returns:
      float32[S, V] logits of the next token, and the cache with this one added.
    """
    slots = jnp.arange(tokens.shape[0])
    visible = jnp.arange(bucket)[None] <= lengths[:, None]

    def attend(layer, query, key, value):
        # [S, G, head_dim] written at (slot, position); the slice below reads after it.
        keys = cache.keys[layer].at[slots, :, :, lengths].set(key[:, 0], mode="drop")
        values = (
            cache.values[layer].at[slots, :, :, lengths].set(value[:, 0], mode="drop")
        )
        read = (keys[..., :bucket], values[..., :bucket])
        return _attend_to_cache(query, *read, visible[:, None]), (keys, values)

    hidden, cache = _run_layers(
        weights, policy, tokens[:, None], lengths[:, None], attend
    )
    return transformer.vocabulary_logits(weights, hidden[:, 0]), cache


def feed(
    weights: Parameters,
    policy: Policy,
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    buckets: tuple[int, ...],
) -> Cache:
    """Adds M given tokens to every entry of a (gathered) cache.

    Args:
      weights: from `lay_out`.
      policy: how to run the model.
      cache: of W entries; `lengths` positions of each are filled.
      tokens: int32[W, M], right-padded; what stands behind the real ones fills
        positions that decoding overwrites before it attends to them.
      lengths: int32[W], at most C - M: beyond, the write would be moved.
      buckets: of how many positions of the cache one is chosen to be read; the last
        is C.
    """
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    needed = positions.max() + 1
    index = sum((needed > bucket).astype(jnp.int32) for bucket in buckets[:-1])

    def write(entry, new, start):
        return jax.lax.dynamic_update_slice(entry, new, (0, 0, start))

    def attend(layer, query, key, value):
        keys = jax.vmap(write)(cache.keys[layer], _to_cache(key), lengths)
        values = jax.vmap(write)(cache.values[layer], _to_cache(value), lengths)

        def read(bucket: int):
            visible = jnp.arange(bucket)[None, None] <= positions[:, :, None]
            operands = (keys[..., :bucket], values[..., :bucket], visible)
            return _attend_to_cache(query, *operands)

        branches = [functools.partial(read, bucket) for bucket in buckets]
        return jax.lax.switch(index, branches), (keys, values)

    # The logits are not read: the last given token is decoded by the next pass.
    _, cache = _run_layers(weights, policy, tokens, positions, attend)
    return cache


def _run_layers(weights, policy: Policy, tokens, positions, attend):
    config = policy.config
    x = transformer.embed(weights, tokens, policy.dtype)
    kept = []
    for index, layer in enumerate(weights["layers"]):
        x, keys_and_values = transformer.block(
            layer,
            x,
            positions,
            config,
            lambda *qkv, index=index: attend(index, *qkv),
            policy.combine_heads,
            policy.combine_mlp,
        )
        kept.append(keys_and_values)
    keys, values = zip(*kept, strict=True)
    hidden = transformer.rms_norm(x, weights["final_norm"], config.norm_epsilon)
    return hidden, Cache(keys=keys, values=values)


def _to_cache(x: jax.Array) -> jax.Array:
    """[R, T, G, head_dim] as the model makes it -> [R, G, head_dim, T]."""
    return x.transpose(0, 2, 3, 1)


def _attend_to_cache(query, keys, values, visible) -> jax.Array:
    """Attention of [S, T, H, d] queries to [S, G, d, C] keys; visible is [S, T, C]."""
    operands = (query, keys, values, visible)
    parts = [jnp.split(x, _parts(query.shape[0])) for x in operands]
    mixed = [_attend(*part) for part in zip(*parts, strict=True)]
    return jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]


def _parts(slots: int) -> int:
    """In how many operations slots attend, side by side; a divisor of `slots`.

    On a CPU a batch of small matrix products keeps one core busy, and operations that
    do not depend on each other run on different cores. Several processes share a host's
    cores, as far as is known here.
    """
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return 1
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return math.gcd(slots, max(1, cores // jax.local_device_count()))


def _attend(query, keys, values, visible) -> jax.Array:
    slots, length, heads, dim = query.shape
    groups = keys.shape[1]
    grouped = query.reshape(slots, length, groups, heads // groups, dim)
    # Queries of one key head side by side, so that each product is one matrix product.
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(slots, groups, -1, dim)
    scores = jnp.einsum("sgqd,sgdc->sgqc", grouped, keys).astype(jnp.float32)
    mask = jnp.repeat(visible, heads // groups, axis=1)[:, None]
    scores = jnp.where(mask, scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("sgqc,sgdc->sgqd", weights, values)
    mixed = mixed.reshape(slots, groups, length, heads // groups, dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(slots, length, heads, dim)
