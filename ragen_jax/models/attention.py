"""Causal attention over whole rows, by the kernel that suits the device.

Shapes: R rows, T tokens of each, H query heads, G key/value heads, d features a head.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from ragen_jax.models.row_attention import row_attention
from ragen_jax.models.splash_attention import splash_attention
from ragen_jax.parallel import backend_choices

# Lengths are padded to full tiles of cuDNN's kernels. Up to cuDNN 9.15.0 other lengths
# can cause an illegal memory access when trained inside a CUDA graph, and XLA makes
# such graphs (Transformer Engine refuses them: its pull request 2344). JAX, too,
# refuses odd lengths where gradients are taken.
_CUDNN_TILE = 128


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *prefix: jax.Array,
    kernel: str = "auto",
) -> jax.Array:
    """Attention of every token to itself and all before it in its row.

    Rows are filled from position 0, so padding comes after every real token and needs
    no mask of its own. No kernel materializes float[R, H, T, T], or computes its masked
    half.

    Args:
      query: float[R, T, H, d].
      key, value: float[R, T, G, d], G divides H.
      *prefix: nothing, or key and value, float[1, S, G, d], of S tokens that come
        before every row.
      kernel: model.attention, "auto", "xla", "cudnn" or "splash".

    Returns:
      float[R, T, H, d].

    Raises:
      SettingsError: if a kernel is wanted that this device does not have.
    """
    key, value = _after(prefix, key, value)
    match backend_choices.row_attention(kernel, query.dtype, query.shape[-1]):
        case "cudnn":
            return fused_attention(query, key, value, "cudnn")
        case "splash":
            return splash_attention(query, key, value)
        case "rows":
            return row_attention(query, key, value)
    return blocked_attention(query, key, value)


def fused_attention(
    query, key, value, implementation: Literal["cudnn", "xla"]
) -> jax.Array:
    """`jax.nn.dot_product_attention` of the last T of S tokens.

    Its causal mask lets query i see keys 0..i: zero queries are prepended for the S - T
    tokens before, and their results dropped. Padding to a full tile comes last, where
    no real query sees it.

    Args:
      query: float[R, T, H, d].
      key, value: float[R, S, G, d], S >= T, G divides H.
      implementation: "cudnn" or "xla".
    """
    (length, key_count), axes = (query.shape[1], key.shape[1]), ((0, 0), (0, 0))
    padding = -key_count % _CUDNN_TILE
    mixed = jax.nn.dot_product_attention(
        jnp.pad(query, ((0, 0), (key_count - length, padding), *axes)),
        jnp.pad(key, ((0, 0), (0, padding), *axes)),
        jnp.pad(value, ((0, 0), (0, padding), *axes)),
        is_causal=True,
        implementation=implementation,
    )
    return mixed[:, key_count - length : key_count]


def _after(prefix: tuple[jax.Array, ...], *own: jax.Array) -> tuple[jax.Array, ...]:
    """The rows' own keys and values, after those of the prefix if there is one."""
    if not prefix:
        return own
    return tuple(
        jnp.concatenate([jnp.broadcast_to(p, (x.shape[0], *p.shape[1:])), x], axis=1)
        for p, x in zip(prefix, own, strict=True)
    )


def blocked_attention(query, key, value) -> jax.Array:
    """Attention in plain operations, for any device and any precision.

    Blocks of queries are scored one after the other, each only against the keys before
    its end, and recomputed in the backward pass.

    Args: as for `fused_attention`.
    """
    length, mixed = query.shape[1], []
    ahead = key.shape[1] - length
    width = backend_choices.choices().query_block
    for start in range(0, length, width):
        end = min(length, start + width)
        key_count = ahead + end
        block = query[:, start:end]
        mixed.append(
            _attention_of_block(block, key[:, :key_count], value[:, :key_count])
        )
    return jnp.concatenate(mixed, axis=1)


@jax.checkpoint
def _attention_of_block(query, key, value) -> jax.Array:
    """The last t tokens of s: [R, t, H, d] queries, [R, s, G, d] keys and values."""
    rows, length, heads, dim = query.shape
    end = key.shape[1]
    grouped = query.reshape(rows, length, key.shape[2], -1, dim)
    scores = jnp.einsum(
        "rtgnd,rsgd->rgnts", grouped, key, preferred_element_type=jnp.float32
    )
    hidden = jnp.arange(end)[None] > jnp.arange(end - length, end)[:, None]
    # Finite, so that a backward pass through padding rows holds no NaN.
    scores = scores * dim**-0.5 + jnp.where(hidden, -1e30, 0.0)[None, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("rgnts,rsgd->rtgnd", weights, value)
    return mixed.reshape(rows, length, heads, dim)
