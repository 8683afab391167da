"""Attention to the KV cache: how entries are laid out, and what attends to them.

Letters: S slots (or W of them), T tokens of each, H query heads, G key heads, d
features of a head, C positions of the context. Query head h reads key head
h // (H / G).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragen_jax.models.config import ModelConfig
from ragen_jax.parallel import backend

_LANES = 128  # numbers in a row of a TPU's vector registers


@dataclasses.dataclass(frozen=True)
class CacheAttention:
    """One layout of the cache, with attention for decoding and for messages. Static."""

    context_axis: int  # of an entry: 3 in [S, G, d, C], 2 in [S, G, C, d]
    has_buckets: bool  # whether reading a part of the context is cheaper than all of it
    merges_heads: bool  # whether heads stand side by side: [S, 1, C, F], F >= G * d
    # Decoding: query [S, 1, H, d], keys and values (entries), int32[S] how many
    # positions each slot attends to, and the bucket that holds them -> [S, 1, H, d].
    attend_token: Callable[..., jax.Array]
    # Messages: query [W, T, H, d], keys and values, int32[W, T] the queries' positions,
    # and the bucket that holds them -> [W, T, H, d].
    attend_message: Callable[..., jax.Array]

    def to_entry(self, x: jax.Array) -> jax.Array:
        """An entry from keys or values as the model makes them: [R, T, G, d]."""
        axes = (0, 2, 1, 3) if self.context_axis == 2 else (0, 2, 3, 1)
        return self._heads(x).transpose(axes)

    def with_context(self, entry: jax.Array, context: int) -> jax.Array:
        """The entry with `context` positions, zeros behind what it holds."""
        widths = [(0, 0)] * 4
        widths[self.context_axis] = (0, context - entry.shape[self.context_axis])
        return jnp.pad(entry, widths)

    def write_token(self, entry, new, position) -> jax.Array:
        """The entry with [S, G, d] at int32[S]; dropped where that is out of range."""
        slots = jnp.arange(new.shape[0])
        where = [slots, slice(None), slice(None), slice(None)]
        where[self.context_axis] = position
        # Unique: else a deterministic program on a GPU sorts before it writes.
        put = entry.at[tuple(where)].set
        return put(self._heads(new), mode="drop", unique_indices=True)

    def write_message(self, entry, new, start) -> jax.Array:
        """The entry with [W, T, G, d] from int32[W] on; all T have room."""

        def write_slot(entry, new, start):
            where = [0, 0, 0]
            where[self.context_axis - 1] = start
            return jax.lax.dynamic_update_slice(entry, new, where)

        return jax.vmap(write_slot)(entry, self.to_entry(new), start)

    def with_prefix(self, entry, prefix, is_new) -> jax.Array:
        """The entry that begins with `prefix` where bool[W] `is_new`."""
        width, axis = prefix.shape[self.context_axis], self.context_axis
        old = jax.lax.slice_in_dim(entry, 0, width, axis=axis)
        head = jnp.where(is_new[:, None, None, None], prefix, old)
        return jax.lax.dynamic_update_slice(entry, head, (0, 0, 0, 0))

    def _heads(self, x: jax.Array) -> jax.Array:
        """Of [..., G, d] the heads as entries hold them."""
        if not self.merges_heads:
            return x
        merged = x.reshape(*x.shape[:-2], 1, -1)
        padding = [(0, 0)] * (merged.ndim - 1) + [(0, -merged.shape[-1] % _LANES)]
        return jnp.pad(merged, padding)


# Plain operations --------------------------------------------------------------------


def _attend_token(query, keys, values, count, bucket) -> jax.Array:
    """`CacheAttention.attend_token` to entries [S, G, d, C]."""
    visible = jnp.arange(bucket)[None] < count[:, None]
    return _attend_in_parts(
        query, keys[..., :bucket], values[..., :bucket], visible[:, None]
    )


def _attend_message(query, keys, values, positions, bucket) -> jax.Array:
    """`CacheAttention.attend_message` to entries [W, G, d, C]."""
    visible = jnp.arange(bucket)[None, None] <= positions[:, :, None]
    return _attend_in_parts(query, keys[..., :bucket], values[..., :bucket], visible)


def _attend_in_parts(query, keys, values, visible) -> jax.Array:
    """Attention of [S, T, H, d] queries to [S, G, d, C] keys; visible is [S, T, C]."""
    operands = (query, keys, values, visible)
    parts = [jnp.split(x, _parts(query.shape[0])) for x in operands]
    mixed = [_attend(*part) for part in zip(*parts, strict=True)]
    return jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]


def _parts(slots: int) -> int:
    """Into how many independent operations to split attention; a divisor of `slots`.

    XLA's CPU backend runs a batch of small matrix products on one core, but independent
    operations on several. With several processes it is 1: they may share a host's
    cores.
    """
    if backend.name() != "cpu" or jax.process_count() > 1:
        return 1
    cores = backend.cpu_cores() // len(backend.local_devices())
    return math.gcd(slots, max(1, cores))


def _attend(query, keys, values, visible) -> jax.Array:
    """Attention as in `_attend_in_parts`, all slots at once."""
    slots, length, heads, dim = query.shape
    groups = keys.shape[1]
    grouped = query.reshape(slots, length, groups, heads // groups, dim)
    # Queries of one key head side by side, so that each product is one matrix product.
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(slots, groups, -1, dim)
    # Qwen2.5's keys give products in the thousands, which bfloat16 rounds by tens.
    scores = jnp.einsum(
        "sgqd,sgdc->sgqc", grouped, keys, preferred_element_type=jnp.float32
    )
    mask = jnp.repeat(visible, heads // groups, axis=1)[:, None]
    scores = jnp.where(mask, scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("sgqc,sgdc->sgqd", weights, values)
    mixed = mixed.reshape(slots, groups, length, heads // groups, dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(slots, length, heads, dim)


# With the context last both products are plain batched matrix products over contiguous
# memory (measured on CPU: 3 to 4 times faster than with the features last).
XLA = CacheAttention(3, True, False, _attend_token, _attend_message)


# Heads side by side, for TPUs ---------------------------------------------------------


@functools.cache
def merged(queries_per_key: int) -> CacheAttention:
    """Attention to entries [S, 1, C, F]: G * d features, zeros up to whole lanes.

    A TPU writes a token best where the context is not the last axis, and reads keys
    best where the last one fills its lanes. Entries of the layouts with a head axis are
    copied from one to the other and back for each message (compiled for a v5p).

    Args:
      queries_per_key: query heads that read one key head, H / G.
    """
    given = dict(queries_per_key=queries_per_key)
    return CacheAttention(
        2,
        True,
        True,
        functools.partial(_attend_token_merged, **given),
        functools.partial(_attend_message_merged, **given),
    )


def _attend_token_merged(query, keys, values, count, bucket, *, queries_per_key):
    """`CacheAttention.attend_token` to entries [S, 1, C, F].

    A query stands at its key head's place among the features, between zeros. So each
    product is one matrix product of all heads, which reads a key once and where it
    lies. It has G times the arithmetic of G products, while the memory is waited for.
    """
    slots, _, heads, dim = query.shape
    groups = heads // queries_per_key
    keys, values = keys[:, 0, :bucket], values[:, 0, :bucket]
    is_own = jnp.repeat(jnp.eye(groups, dtype=bool), queries_per_key, axis=0)
    is_own = is_own[None, :, :, None]  # [1, H, G, 1]
    placed = jnp.where(is_own, query[:, 0, :, None], 0).reshape(slots, heads, -1)
    padding = keys.shape[-1] - groups * dim
    placed = jnp.pad(placed, ((0, 0), (0, 0), (0, padding)))
    scores = jnp.einsum(
        "shf,scf->shc", placed, keys, preferred_element_type=jnp.float32
    )
    visible = (jnp.arange(bucket)[None] < count[:, None])[:, None]
    scores = jnp.where(visible, scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("shc,scf->shf", weights, values)[..., : groups * dim]
    mixed = mixed.reshape(slots, heads, groups, dim)
    return jnp.where(is_own, mixed, 0).sum(axis=2)[:, None]


def _attend_message_merged(query, keys, values, positions, bucket, *, queries_per_key):
    """`CacheAttention.attend_message` to entries [W, 1, C, F]."""
    slots, _, heads, dim = query.shape
    groups = heads // queries_per_key

    def by_head(entry):
        real = entry[:, 0, :, : groups * dim]
        return real.reshape(slots, -1, groups, dim).transpose(0, 2, 3, 1)

    return _attend_message(query, by_head(keys), by_head(values), positions, bucket)


# Fused kernels that take each slot's length -------------------------------------------


def fused(implementation: str) -> CacheAttention:
    """Attention by `jax.nn.dot_product_attention`, over each slot's filled part alone.

    In decoding each (slot, key head) is a row of the kernel's batch, and the query
    heads of that key head are its queries: each key is read once for all of them, and
    nothing is transposed.

    Args:
      implementation: "cudnn", or "xla", which computes the same on any device.
    """
    return CacheAttention(
        2,
        False,
        False,
        functools.partial(_attend_token_fused, implementation=implementation),
        functools.partial(_attend_message_fused, implementation=implementation),
    )


def _attend_token_fused(query, keys, values, count, bucket, *, implementation):
    """`CacheAttention.attend_token` to entries [S, G, C, d]."""
    del bucket
    slots, _, heads, dim = query.shape
    groups, context = keys.shape[1:3]
    rows, queries = slots * groups, heads // groups
    mixed = jax.nn.dot_product_attention(
        query.reshape(rows, queries, 1, dim),
        keys.reshape(rows, context, 1, dim),
        values.reshape(rows, context, 1, dim),
        query_seq_lengths=jnp.full(rows, queries, jnp.int32),
        key_value_seq_lengths=jnp.repeat(count, groups),
        implementation=implementation,
    )
    return mixed.reshape(query.shape)


def _attend_message_fused(query, keys, values, positions, bucket, *, implementation):
    """`CacheAttention.attend_message` to entries [W, G, C, d]."""
    # An explicit mask, for all heads alike: the kernel's causal mask would align the
    # first query with the first key.
    del bucket
    slots, length = query.shape[:2]
    visible = jnp.arange(keys.shape[2])[None, None] <= positions[:, :, None]
    return jax.nn.dot_product_attention(
        query,
        keys.transpose(0, 2, 1, 3),
        values.transpose(0, 2, 1, 3),
        mask=visible[:, None],
        query_seq_lengths=jnp.full(slots, length, jnp.int32),
        key_value_seq_lengths=positions[:, -1] + 1,
        implementation=implementation,
    )


_CUDNN = fused("cudnn")


def by_name(name: str, config: ModelConfig) -> CacheAttention:
    """The attention that `backend_choices.decode_attention` names, for a model."""
    if name == "merged":
        return merged(config.heads // config.kv_heads)
    return {"xla": XLA, "cudnn": _CUDNN}[name]
