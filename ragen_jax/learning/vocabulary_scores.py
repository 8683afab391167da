"""Log-probability and entropy of chosen tokens, without the logits of whole rows.

A row's logits, float32[T, V], are too large to keep. Forward and backward pass loop
over chunks of the tokens to score, with a traced trip count; of each chunk only log Z
and the entropy are kept, and the logits are computed again for the gradient. The
derivative is written by hand, so that the weight's gradient has one float32
accumulator: on a mesh each device accumulates its own rows', summed across devices
once, after the loop. A sharded weight is gathered in the products' dtype, and its
gradient is reduce-scattered.

Letters: R rows of n tokens, m = R * n of them in all, c tokens of a chunk, D width,
V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.parallel import backend
from ragen_jax.utils.scatter import put_where

# Most float32 logits in memory at a time: 64 MiB on CPUs and 1 GiB on accelerators,
# which have the room, and read the whole weight from memory for each chunk.
_MOST_LOGITS, _MOST_LOGITS_ON_ACCELERATORS = 2**24, 2**28
# Most tokens of a chunk: on average half of the last chunk is wasted. On a CPU more
# bring nothing.
_MOST_TOKENS, _MOST_TOKENS_ON_ACCELERATORS = 128, 2048


@struct.dataclass
class TokenScores:
    """Of each token given all before it in its row; 0 for tokens not asked for."""

    logprobs: jax.Array  # float32[R, T], nats
    entropy: jax.Array  # float32[R, T], nats, of the distribution it was drawn from


def chunk_tokens(vocabulary: int, tokens: int, *, on_cpu: bool) -> int:
    """How many tokens are scored at a time, at least 1."""
    if on_cpu:
        most = min(_MOST_TOKENS, _MOST_LOGITS // vocabulary)
    else:
        most = min(
            _MOST_TOKENS_ON_ACCELERATORS, _MOST_LOGITS_ON_ACCELERATORS // vocabulary
        )
    return max(1, min(most, tokens))


def score_vocabulary(
    weight: jax.Array,
    hidden: jax.Array,
    token: jax.Array,
    is_scored: jax.Array,
    *,
    temperature: float | jax.Array,
    is_tied: bool,
    with_entropy: bool = True,
    chunk: int | None = None,
    sharding_axes: tuple[str | None, ...] = (None, None),
) -> TokenScores:
    """Scores under p = softmax(hidden . weight / temperature), where `is_scored`.

      logprob = x[token] - log Z,  entropy = -sum_v p_v log p_v

    with x = logits / temperature; and, with g and h the cotangents of the two,

      d x_v = g (1[v = token] - p_v) - h p_v (log p_v + entropy).

    Args:
      weight: float[V, D] if tied (the embedding), else float[D, V]; cast to hidden's
        dtype for the products, whose results are float32. Its gradient is float32.
      hidden: float[R, n, D], what predicts each token.
      token: int32[R, n].
      is_scored: bool[R, n], the tokens to score.
      temperature: above 0.
      is_tied: whether `weight` is the embedding, [V, D], and not a head, [D, V].
      with_entropy: False leaves the entropy 0 and saves its cost.
      chunk: tokens scored at a time; None: `chunk_tokens`.
      sharding_axes: for each dimension of `weight` the mesh axis that shards it, inside
        `shard_map`; the shape above is that of the weight gathered.
    """
    # Constants may come as NumPy arrays, which a traced index cannot index.
    weight, hidden, token, is_scored = map(
        jnp.asarray, (weight, hidden, token, is_scored)
    )
    rows, length, width = hidden.shape
    if chunk is None:
        vocabulary = _vocabulary(weight, is_tied, sharding_axes)
        on_cpu = backend.name() == "cpu"
        chunk = chunk_tokens(vocabulary, rows * length, on_cpu=on_cpu)
    is_scored = is_scored.reshape(-1)
    # Tokens to score first, in their order; the fill index is out of range, so dropped.
    order = jnp.argsort(~is_scored, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -order.size % chunk), constant_values=order.size)
    logprobs, entropy = _scores(
        _Options(is_tied, with_entropy, chunk, sharding_axes),
        weight,
        hidden.reshape(-1, width),
        token.reshape(-1),
        order,
        is_scored.sum(),
        jnp.asarray(temperature, jnp.float32),
    )
    return TokenScores(logprobs.reshape(rows, length), entropy.reshape(rows, length))


def _vocabulary(weight: jax.Array, is_tied: bool, sharding_axes) -> int:
    """V, of which `weight` may hold this device's part."""
    dimension = 0 if is_tied else 1
    axis = sharding_axes[dimension]
    return weight.shape[dimension] * (jax.lax.axis_size(axis) if axis else 1)


@dataclasses.dataclass(frozen=True)
class _Options:
    """How tokens are scored. Static. See `score_vocabulary`."""

    is_tied: bool
    with_entropy: bool
    chunk: int  # c, tokens scored at a time
    sharding_axes: tuple[str | None, ...]  # of the weight, one for each dimension


def _all_gather(weight: jax.Array, sharding_axes: tuple[str | None, ...]) -> jax.Array:
    """The weight, gathered from the devices that shard it."""
    for dimension, axis in enumerate(sharding_axes):
        if axis is not None:
            weight = jax.lax.all_gather(weight, axis, axis=dimension, tiled=True)
    return weight


def _reduce_scatter(gradient: jax.Array, sharding_axes: tuple[str | None, ...]):
    """This device's shard of the gradient, summed over the devices that shard it."""
    for dimension, axis in enumerate(sharding_axes):
        if axis is not None:
            gradient = jax.lax.psum_scatter(
                gradient, axis, scatter_dimension=dimension, tiled=True
            )
    return gradient


def _logits(is_tied: bool, cast: jax.Array, hidden: jax.Array, temperature):
    """float32[c, V] of float[c, D], divided by the temperature."""
    spec = "td,vd->tv" if is_tied else "td,dv->tv"
    product = jnp.einsum(spec, hidden, cast, preferred_element_type=jnp.float32)
    return product / temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(options: _Options, weight, hidden, token, order, count, temperature):
    """(logprobs, entropy), float32[m] each; 0 for tokens that are not scored.

    Args:
      options: what is static.
      weight: as for `score_vocabulary`.
      hidden: float[m, D], of the tokens of all rows.
      token: int32[m].
      order: int32[whole chunks], indices into `token`, those to score in front; m, out
        of range, fills up the last chunk.
      count: int32[], how many those are.
      temperature: float32[].
    """
    return _forward(options, weight, hidden, token, order, count, temperature)[0]


def _forward(options: _Options, weight, hidden, token, order, count, temperature):
    """`_scores`, and what `_backward` needs: the inputs, entropy and log Z."""
    is_tied, chunk = options.is_tied, options.chunk
    cast = _all_gather(weight.astype(hidden.dtype), options.sharding_axes)

    def score_chunk(index, scores):
        at = jax.lax.dynamic_slice_in_dim(order, index * chunk, chunk)
        logits = _logits(is_tied, cast, hidden.at[at].get(mode="clip"), temperature)
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
        token_of_chunk = token.at[at].get(mode="clip")[:, None]
        token_logit = jnp.take_along_axis(logits, token_of_chunk, axis=-1)[:, 0]
        entropy = jnp.zeros_like(log_normalizer)
        if options.with_entropy:
            # Not log Z - sum_v p_v x_v, which cancels where the policy is sure.
            log_policy = logits - log_normalizer[:, None]
            entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1)
        # The last chunk has tokens that are not to be scored.
        is_real = index * chunk + jnp.arange(chunk) < count
        new = (token_logit - log_normalizer, entropy, log_normalizer)
        return tuple(
            put_where(x, at, part, is_real) for x, part in zip(scores, new, strict=True)
        )

    blank = (jnp.zeros(token.shape, jnp.float32),) * 3
    logprobs, entropy, log_normalizer = jax.lax.fori_loop(
        0, -(-count // chunk), score_chunk, blank
    )
    inputs = (weight, hidden, token, order, count, temperature)
    return (logprobs, entropy), (*inputs, entropy, log_normalizer)


def _backward(options: _Options, residuals, cotangents):
    """The formula of `score_vocabulary`, a chunk at a time."""
    is_tied, chunk = options.is_tied, options.chunk
    weight, hidden, token, order, count, temperature, *scores = residuals
    entropy, log_normalizer = scores
    cast = _all_gather(weight.astype(hidden.dtype), options.sharding_axes)
    to_hidden, to_weight = (
        ("tv,vd->td", "tv,td->vd") if is_tied else ("tv,dv->td", "tv,td->dv")
    )

    def differentiate_chunk(index, carry):
        d_weight, d_hidden = carry
        at = jax.lax.dynamic_slice_in_dim(order, index * chunk, chunk)
        is_real = index * chunk + jnp.arange(chunk) < count
        piece = hidden.at[at].get(mode="clip")

        def of_chunk(x):
            return jnp.where(is_real, x.at[at].get(mode="clip"), 0)[:, None]

        log_policy = _logits(is_tied, cast, piece, temperature)
        log_policy -= log_normalizer.at[at].get(mode="clip")[:, None]
        policy = jnp.exp(log_policy)
        vocabulary_index = jax.lax.broadcasted_iota(jnp.int32, policy.shape, 1)
        is_token = vocabulary_index == token.at[at].get(mode="clip")[:, None]
        d_logits = of_chunk(cotangents[0]) * (is_token - policy)
        if options.with_entropy:
            of_entropy = of_chunk(cotangents[1]) * policy
            d_logits -= of_entropy * (log_policy + of_chunk(entropy))
        d_logits = (d_logits / temperature).astype(hidden.dtype)
        d_piece = jnp.einsum(to_hidden, d_logits, cast)
        d_weight += jnp.einsum(
            to_weight, d_logits, piece, preferred_element_type=jnp.float32
        )
        return d_weight, put_where(d_hidden, at, d_piece, is_real)

    blank = (jnp.zeros(cast.shape, jnp.float32), jnp.zeros_like(hidden))
    d_weight, d_hidden = jax.lax.fori_loop(
        0, -(-count // chunk), differentiate_chunk, blank
    )
    d_weight = _reduce_scatter(d_weight, options.sharding_axes)
    return d_weight.astype(weight.dtype), d_hidden, None, None, None, None


_scores.defvjp(_forward, _backward)
