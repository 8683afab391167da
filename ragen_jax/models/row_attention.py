"""Causal attention for CPUs: a loop over rows and key heads, with its own derivative.

The scores of a block of queries stay in the processor's cache, and each is
exponentiated once forward and once backward (FlashAttention-2, arXiv:2307.08691,
sections 2.3 and 3.1). Left to JAX, the backward pass would compute the whole softmax
again and then differentiate it: twice the time.

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


# float[R * G, n, T, d], float[R * G, S, d] twice -> float[R * G, n, T, d]. The loops
# are inside the custom_vjp: around it, each step would copy its residuals.
@jax.custom_vjp
def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _forward(query, key, value)[0]


def _forward(query, key, value):
    out, log_sum = jax.lax.map(lambda one: _attend(*one), (query, key, value))
    return out, (query, key, value, out, log_sum)


def _backward(residuals, d_out):
    return jax.lax.map(lambda one: _differentiate(*one), (*residuals, d_out))


_attention.defvjp(_forward, _backward)


def _attend(query, key, value):
    """One row and key head: float[n, T, d], and float32[n, T, 1], log sum e^scores."""
    mixed, log_sums = [], []
    for tokens, key_count in _blocks(query, key):
        scores = _scores(query[:, tokens], key[:key_count])
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        product = jnp.einsum(
            "nts,sd->ntd", weights.astype(value.dtype), value[:key_count]
        )
        mixed.append((product / total).astype(query.dtype))
        log_sums.append(highest + jnp.log(total))
    return jnp.concatenate(mixed, axis=1), jnp.concatenate(log_sums, axis=1)


def _differentiate(query, key, value, out, log_sum, d_out):
    """(d_query, d_key, d_value) of one row and key head.

    With P the weights (softmax of the scores S) and O = P V:
    dS = P (dP - sum over d of dO O), as in algorithm 2 of FlashAttention-2.
    """
    dim = query.shape[-1]
    shift = (d_out * out).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    d_query: list[jax.Array] = []
    # Transposed, [d, S]: as the right operand the scores are read in their own layout;
    # as the left one each would be transposed first, a fifth of the update's time on a
    # CPU.
    d_key = d_value = jnp.zeros((dim, key.shape[0]), jnp.float32)
    for tokens, key_count in _blocks(query, key):
        block, d_block = query[:, tokens], d_out[:, tokens]
        weights = jnp.exp(_scores(block, key[:key_count]) - log_sum[:, tokens])
        d_weights = _product("ntd,sd->nts", d_block, value[:key_count])
        d_scores = weights * (d_weights - shift[:, tokens])
        weights, d_scores = (x.astype(query.dtype) for x in (weights, d_scores))
        d_query.append(_product("nts,sd->ntd", d_scores, key[:key_count]))
        d_key = d_key.at[:, :key_count].add(_over_heads(block, d_scores))
        d_value = d_value.at[:, :key_count].add(_over_heads(d_block, weights))
    factor = dim**-0.5
    return (
        (jnp.concatenate(d_query, axis=1) * factor).astype(query.dtype),
        (d_key.T * factor).astype(key.dtype),
        d_value.T.astype(value.dtype),
    )


def _blocks(query, key):
    """Yields (slice of the T queries, number of the S keys that they see)."""
    length, keys = query.shape[1], key.shape[0]
    for start in range(0, length, _BLOCK):
        end = min(length, start + _BLOCK)
        yield slice(start, end), keys - length + end


def _scores(query, key):
    """float32[n, t, s], scaled scores of the last t of s tokens, causally masked."""
    length, key_count = query.shape[1], key.shape[0]
    hidden = (
        jnp.arange(key_count)[None] > jnp.arange(key_count - length, key_count)[:, None]
    )
    scores = _product("ntd,sd->nts", query, key) * query.shape[-1] ** -0.5
    return jnp.where(hidden, _HIDDEN, scores)


def _over_heads(x, weights):
    """float32[d, s], x^T weights summed over n heads; x [n, t, d], weights [n, t, s].

    Summed head by head: one sum over n * t would have a seventh more rounding error.
    """
    return _product("ntd,nts->nds", x, weights).sum(axis=0)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
