"""Causal attention for TPUs: JAX's splash attention, a FlashAttention-2 in Pallas.

The kernel keeps the scores of a block of queries and keys on the chip, skips blocks
that the causal mask hides, and has its own derivative
(jax.experimental.pallas.ops.tpu.splash_attention; arXiv:2307.08691).

Shapes: R rows of T queries and S >= T keys, of which the last T are the queries' own
tokens, H query heads, G key/value heads, d features a head.
"""

import jax
import jax.numpy as jnp

_TILE = 128  # lanes of a TPU's vector registers: blocks are a multiple of it
_WIDEST = 512  # tokens of a block; each block costs a fixed time as well (not timed)


def splash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Attention of every query to the keys of its row up to its own.

    Queries and keys are padded at their end to whole blocks: no real query sees a key
    of the padding.

    Args:
      query: float[R, T, H, d].
      key, value: float[R, S, G, d], S >= T, G divides H.
      interpret: run the kernel in plain JAX, on any device; slow.

    Returns:
      float[R, T, H, d].
    """
    # Imported here: only TPUs need Pallas, which takes half a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    length, heads, dim = query.shape[1:]
    ahead = key.shape[1] - length
    of_queries, of_keys = _block(length), _block(key.shape[1])
    # The kernel does not scale scores. A power of two, as for d = 64, rounds nothing.
    query = _heads_first(query * dim**-0.5, of_queries)
    key, value = _heads_first(key, of_keys), _heads_first(value, of_keys)
    causal = masks.CausalMask((query.shape[2], key.shape[2]), offset=ahead)
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([causal] * heads),
        block_sizes=_block_sizes(kernels, of_queries, of_keys),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return jax.vmap(attend)(query, key, value).swapaxes(1, 2)[:, :length]


def _heads_first(x: jax.Array, block: int) -> jax.Array:
    """float[R, heads, T, d] from float[R, T, heads, d], T padded to whole blocks."""
    padding = -x.shape[1] % block
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))


def _block(length: int) -> int:
    """Tokens of a block: whole tiles, of as few blocks as can be."""
    blocks = -(-length // _WIDEST)
    return -(-length // (blocks * _TILE)) * _TILE


def _block_sizes(kernels, queries: int, keys: int):
    """The same blocks forward and backward."""
    return kernels.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
