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
        by_head.transpose(0, 2, 1, 3, 4).reshape(rows * groups, length, -1, dim),
        *(
            x.transpose(0, 2, 1, 3).reshape(rows * groups, -1, dim)
            for x in (key, value)
        ),
    )
    mixed = mixed.reshape(rows, groups, length, -1, dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(query.shape)


# float[R * G, T, n, d], float[R * G, S, d] twice -> float[R * G, T, n, d]. The loop is
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
    """What float[T, n, d] queries mix, and float32[T * n, 1], their log of the sum."""
    (length, heads, dim), queries = query.shape, _flat(query)
    mixed, total = [], []
    for rows, seen in _blocks(length, key.shape[0], heads):
        scores = _scores(queries[rows], key[:seen], heads)
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        each = weights.sum(axis=-1, keepdims=True)
        product = weights.astype(value.dtype) @ value[:seen]
        mixed.append((product / each).astype(query.dtype))
        total.append(highest + jnp.log(each))
    out = jnp.concatenate(mixed).reshape(length, heads, dim)
    return out, jnp.concatenate(total)


def _differentiate(query, key, value, out, total, given):
    """With P the weights and O what they mix: dS = P (dP - sum over d of dO O)."""
    length, heads, dim = query.shape
    queries, change = _flat(query), _flat(given)
    shift = (change * _flat(out)).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    by_query: list[jax.Array] = []
    # [d, S]: with the scores on the right of their products they are read as they lie;
    # on the left each would be transposed first, a fifth of a CPU's update.
    by_key = by_value = jnp.zeros((dim, key.shape[0]), jnp.float32)
    for rows, seen in _blocks(length, key.shape[0], heads):
        own, by_own = queries[rows], change[rows]
        weights = jnp.exp(_scores(own, key[:seen], heads) - total[rows])
        by_weight = _product("td,sd->ts", by_own, value[:seen])
        by_score = weights * (by_weight - shift[rows])
        weights, by_score = (x.astype(query.dtype) for x in (weights, by_score))
        by_query.append(_product("ts,sd->td", by_score, key[:seen]))
        by_key = by_key.at[:, :seen].add(_product("td,ts->ds", own, by_score))
        by_value = by_value.at[:, :seen].add(_product("td,ts->ds", by_own, weights))
    factor = dim**-0.5
    return (
        (jnp.concatenate(by_query) * factor).astype(query.dtype).reshape(query.shape),
        (by_key.T * factor).astype(key.dtype),
        by_value.T.astype(value.dtype),
    )


def _blocks(length: int, keys: int, heads: int):
    """(the queries of some tokens among [T * n], end of the keys that they see)."""
    for start in range(0, length, _BLOCK):
        end = min(length, start + _BLOCK)
        yield slice(start * heads, end * heads), keys - length + end


def _scores(query, key, heads: int):
    """float32[t * n, s] of the last t tokens of s; those ahead are hidden."""
    count, seen = query.shape[0], key.shape[0]
    token = seen - count // heads + jnp.arange(count) // heads
    scores = _product("td,sd->ts", query, key) * query.shape[-1] ** -0.5
    return jnp.where(jnp.arange(seen)[None] > token[:, None], _HIDDEN, scores)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _flat(x: jax.Array) -> jax.Array:
    """[T * n, d] of [T, n, d]."""
    return x.reshape(-1, x.shape[-1])
