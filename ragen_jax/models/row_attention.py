"""Causal attention of one row and key head after the other, with its derivative.

What a CPU needs: the scores of a block of queries stay in its cache, and each is
exponentiated once forward and once backward (FlashAttention-2, arXiv:2307.08691,
sections 2.3 and 3.1). Left to JAX, the backward pass would do the whole softmax again
and then differentiate it: twice the time.

Shapes: R rows of T queries and S >= T keys, of which the last T are the queries' own
tokens, G key/value heads with n query heads each, d features a head.
"""

import jax
import jax.numpy as jnp

_BLOCK = 128  # tokens whose n queries are scored at a time
_HIDDEN = -1e30  # finite, so that a backward pass through padding rows holds no NaN


def row_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of every query to the keys of its row up to its own.

    Args:
      query: float[R, T, G * n, d]. key, value: float[R, S, G, d].

    Returns:
      float[R, T, G * n, d].
    """
    rows, length, heads, dim = query.shape
    groups = key.shape[2]
    by_head = query.reshape(rows, length, groups, heads // groups, dim)
    mixed = _attention(
        by_head.transpose(0, 2, 3, 1, 4).reshape(rows * groups, -1, length, dim),
        *(
            x.transpose(0, 2, 1, 3).reshape(rows * groups, -1, dim)
            for x in (key, value)
        ),
    )
    mixed = mixed.reshape(rows, groups, -1, length, dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


# float[R * G, n, T, d], float[R * G, S, d] twice -> float[R * G, n, T, d]. The loop is
# within the derivative's two halves: around it, each step would copy what it keeps.
@jax.custom_vjp
def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _forward(query, key, value)[0]


def _forward(query, key, value):
    out, total = jax.lax.map(lambda one: _mix(*one), (query, key, value))
    return out, (query, key, value, out, total)


def _backward(kept, given):
    return jax.lax.map(lambda one: _differentiate(*one), (*kept, given))


_attention.defvjp(_forward, _backward)


def _mix(query, key, value):
    """What float[n, T, d] queries mix, and float32[n, T, 1], their log of the sum."""
    mixed, total = [], []
    for tokens, seen in _blocks(query, key):
        scores = _scores(query[:, tokens], key[:seen])
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        each = weights.sum(axis=-1, keepdims=True)
        product = jnp.einsum("nts,sd->ntd", weights.astype(value.dtype), value[:seen])
        mixed.append((product / each).astype(query.dtype))
        total.append(highest + jnp.log(each))
    return jnp.concatenate(mixed, axis=1), jnp.concatenate(total, axis=1)


def _differentiate(query, key, value, out, total, given):
    """With P the weights and O what they mix: dS = P (dP - sum over d of dO O)."""
    dim = query.shape[-1]
    shift = (given * out).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    by_query: list[jax.Array] = []
    # [d, S]: with the scores on the right of their products they are read as they lie;
    # on the left each would be transposed first, a fifth of a CPU's update.
    by_key = by_value = jnp.zeros((dim, key.shape[0]), jnp.float32)
    for tokens, seen in _blocks(query, key):
        own, change = query[:, tokens], given[:, tokens]
        weights = jnp.exp(_scores(own, key[:seen]) - total[:, tokens])
        by_weight = _product("ntd,sd->nts", change, value[:seen])
        by_score = weights * (by_weight - shift[:, tokens])
        weights, by_score = (x.astype(query.dtype) for x in (weights, by_score))
        by_query.append(_product("nts,sd->ntd", by_score, key[:seen]))
        by_key = by_key.at[:, :seen].add(_over_heads(own, by_score))
        by_value = by_value.at[:, :seen].add(_over_heads(change, weights))
    factor = dim**-0.5
    return (
        (jnp.concatenate(by_query, axis=1) * factor).astype(query.dtype),
        (by_key.T * factor).astype(key.dtype),
        by_value.T.astype(value.dtype),
    )


def _blocks(query, key):
    """(some of the T tokens, end of the keys that they see)."""
    length, keys = query.shape[1], key.shape[0]
    for start in range(0, length, _BLOCK):
        end = min(length, start + _BLOCK)
        yield slice(start, end), keys - length + end


def _scores(query, key):
    """float32[n, t, s] of the last t tokens of s; those ahead are hidden."""
    length, seen = query.shape[1], key.shape[0]
    hidden = jnp.arange(seen)[None] > jnp.arange(seen - length, seen)[:, None]
    scores = _product("ntd,sd->nts", query, key) * query.shape[-1] ** -0.5
    return jnp.where(hidden, _HIDDEN, scores)


def _over_heads(x, weights):
    """float32[d, s] of [n, t, d] and [n, t, s], with a sum of its own for each head.

    One sum over n * t would round by a seventh more.
    """
    return _product("ntd,nts->nds", x, weights).sum(axis=0)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
