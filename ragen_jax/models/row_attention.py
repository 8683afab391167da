"""Causal attention of one row, in blocks, with its derivative written out.

What a CPU needs: the scores of a block stay in its cache, and each is exponentiated
once forward and once backward (FlashAttention-2, arXiv:2307.08691, sections 2.3 and
3.1). Left to JAX, the backward pass would do the whole softmax again and then
differentiate it: twice the time.

Shapes: T queries, S >= T keys, of which the last T are the queries' own tokens, H query
heads, G key/value heads, n = H / G, d features a head.
"""

import jax
import jax.numpy as jnp

_BLOCK = 128  # queries scored at a time
_HIDDEN = -1e30  # finite, so that a backward pass through padding rows holds no NaN


@jax.custom_vjp
def row_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of every query to the keys up to its own.

    Args:
      query: float[T, H, d]. key, value: float[S, G, d], G divides H.

    Returns:
      float[T, H, d].
    """
    return _forward(query, key, value)[0]


def _forward(query, key, value):
    by_head, keys, values = _split(query, key), _heads_first(key), _heads_first(value)
    mixed, total = [], []
    for start, end, seen in _blocks(query, key):
        scores = _scores(by_head[:, :, start:end], keys[:, :seen])
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        each = weights.sum(axis=-1, keepdims=True)
        product = jnp.einsum(
            "gnts,gsd->gntd", weights.astype(value.dtype), values[:, :seen]
        )
        mixed.append((product / each).astype(query.dtype))
        total.append(highest + jnp.log(each))
    out = jnp.concatenate(mixed, axis=2)
    kept = (query, key, value, out, jnp.concatenate(total, axis=2))
    return _join(out), kept


def _backward(kept, given):
    """With P the weights and O what they mix: dS = P (dP - sum over d of dO O)."""
    query, key, value, out, total = kept
    by_head, keys, values = _split(query, key), _heads_first(key), _heads_first(value)
    given = _split(given, key)
    shift = (given * out).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    by_query: list[jax.Array] = []
    # [G, d, S]: with the scores on the right of their products they are read as they
    # lie; on the left each would be transposed first, a fifth of a CPU's update.
    flat = (*keys.shape[::2], keys.shape[1])
    by_key, by_value = jnp.zeros(flat, jnp.float32), jnp.zeros(flat, jnp.float32)
    for start, end, seen in _blocks(query, key):
        own, change = by_head[:, :, start:end], given[:, :, start:end]
        weights = jnp.exp(_scores(own, keys[:, :seen]) - total[:, :, start:end])
        by_weight = _product("gntd,gsd->gnts", change, values[:, :seen])
        by_score = weights * (by_weight - shift[:, :, start:end])
        weights, by_score = (x.astype(query.dtype) for x in (weights, by_score))
        by_query.append(_product("gnts,gsd->gntd", by_score, keys[:, :seen]))
        by_key = by_key.at[..., :seen].add(_product("gntd,gnts->gds", own, by_score))
        by_value = by_value.at[..., :seen].add(
            _product("gntd,gnts->gds", change, weights)
        )
    factor = query.shape[-1] ** -0.5
    return (
        (_join(jnp.concatenate(by_query, axis=2)) * factor).astype(query.dtype),
        (by_key.transpose(2, 0, 1) * factor).astype(key.dtype),
        by_value.transpose(2, 0, 1).astype(value.dtype),
    )


row_attention.defvjp(_forward, _backward)


def _blocks(query, key):
    """(first query, end of the queries, end of the keys that they see) of each."""
    length = query.shape[0]
    ahead = key.shape[0] - length
    for start in range(0, length, _BLOCK):
        end = min(length, start + _BLOCK)
        yield start, end, ahead + end


def _scores(query, key):
    """float32[G, n, t, s] of the last t tokens of s; those ahead are hidden."""
    length, seen = query.shape[2], key.shape[1]
    hidden = jnp.arange(seen)[None] > jnp.arange(seen - length, seen)[:, None]
    scores = _product("gntd,gsd->gnts", query, key) * query.shape[-1] ** -0.5
    return jnp.where(hidden[None, None], _HIDDEN, scores)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _split(query, key) -> jax.Array:
    """[G, n, T, d] of [T, H, d]."""
    length, _, dim = query.shape
    return query.reshape(length, key.shape[1], -1, dim).transpose(1, 2, 0, 3)


def _heads_first(x: jax.Array) -> jax.Array:
    """[G, S, d] of [S, G, d]."""
    return x.transpose(1, 0, 2)


def _join(by_head: jax.Array) -> jax.Array:
    """[T, H, d] of [G, n, T, d]."""
    moved = by_head.transpose(2, 0, 1, 3)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1])
