"""What the models say of a record's tokens: log-probabilities, entropy, values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models import transformer
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters

# Logits that exist at a time, in numbers: 2**24 float32 are 64 MiB.
_MOST_LOGITS = 2**24
_MOST_POSITIONS = 64  # of a row in one chunk: fine steps, so that few score nothing


@struct.dataclass
class TokenScores:
    """Of each token given all before it in its row; position 0 holds 0."""

    logprobs: jax.Array  # float32[R, T], nats
    entropy: jax.Array  # float32[R, T], nats, of the distribution it was drawn from


def score_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    temperature: float,
    *,
    is_reply: jax.Array | None = None,
    prefix: jax.Array | None = None,
    dtype=jnp.float32,
    remat: bool = False,
    place: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = causal_attention,
    with_entropy: bool = True,
) -> TokenScores:
    """Scores tokens of every row under softmax(logits / temperature).

    The vocabulary is scored in chunks of positions, recomputed in the backward pass, so
    that float32[R, T, V] never exists. With `is_reply` the reply tokens of each row are
    moved together first, and chunks that hold none are left out: most of a row is what
    the world said.

    Args:
      parameters: of the policy.
      tokens: int32[R, T], rows filled from position 0.
      config: the model's shape.
      temperature: above 0; the one that the rows were sampled at.
      is_reply: bool[R, T], the tokens to score, the others get 0; None: all.
      prefix: int32[S], the first tokens of every row where all begin alike; they are
        computed once, and neither they nor the one after them are scored.
      dtype: of the transformer's computation.
      remat: recompute layers in the backward pass.
      place, attention: as for `transformer.hidden_states`.
      with_entropy: False leaves the entropy 0 and saves its cost.
    """
    shared = 0 if prefix is None else prefix.shape[0]
    tokens = tokens[:, shared:]
    hidden = transformer.hidden_states(
        parameters,
        tokens,
        config,
        prefix=prefix,
        dtype=dtype,
        remat=remat,
        place=place,
        attention=attention,
    )
    before, following = hidden[:, :-1], tokens[:, 1:]
    wanted = jnp.ones(following.shape, bool)
    if is_reply is not None:
        wanted = is_reply[:, shared + 1 :]
    order = jnp.argsort(~wanted, axis=1, stable=True)  # wanted first, in their order
    if is_reply is not None:
        before = jnp.take_along_axis(before, order[..., None], axis=1)
        following = jnp.take_along_axis(following, order, axis=1)
    scores = _score_chunks(
        parameters, before, following, wanted.sum(axis=1), temperature, with_entropy
    )
    if is_reply is not None:
        back = jnp.argsort(order, axis=1)
        scores = jax.tree.map(
            lambda x: jnp.where(wanted, jnp.take_along_axis(x, back, axis=1), 0.0),
            scores,
        )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (shared + 1, 0))), scores)


def _score_chunks(
    parameters: Parameters,
    before: jax.Array,
    token: jax.Array,
    count: jax.Array,
    temperature: float,
    with_entropy: bool,
) -> TokenScores:
    """[R, n] scores of the first `count` tokens of each row; 0 behind the last chunk.

    before: float[R, n, D], what predicts `token`: int32[R, n]. count: int32[R].
    """
    (rows, length), vocabulary = token.shape, parameters["embedding"].shape[0]
    chunk = min(length, _MOST_POSITIONS, _MOST_LOGITS // (rows * vocabulary))
    chunk = max(1, chunk)
    chunks = -(-length // chunk)
    padding = chunks * chunk - length

    def split(x: jax.Array) -> jax.Array:
        """[R, n, ...] -> [chunks, R, chunk, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def score(before, token):
        logits = transformer.vocabulary_logits(parameters, before) / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        if not with_entropy:
            return TokenScores(chosen - total, jnp.zeros_like(total))
        # Not log Z - sum_v p_v x_v, whose two terms cancel where the policy is sure.
        log_policy = logits - total[..., None]
        entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1)
        return TokenScores(chosen - total, entropy)

    def nothing(before, token):
        zero = jnp.zeros(token.shape, jnp.float32)
        return TokenScores(zero, zero)

    def one(piece):
        start, before, token = piece
        return jax.lax.cond(start < count.max(), score, nothing, before, token)

    starts = jnp.arange(chunks) * chunk
    scores = jax.lax.map(one, (starts, split(before), split(token)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length], scores
    )


def value_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    prefix: jax.Array | None = None,
    dtype=jnp.float32,
    remat: bool = False,
    place: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = causal_attention,
) -> jax.Array:
    """float32[R, T], the critic's value before each token. See `score_tokens`."""
    shared = 0 if prefix is None else prefix.shape[0]
    hidden = transformer.hidden_states(
        parameters,
        tokens[:, shared:],
        config,
        prefix=prefix,
        dtype=dtype,
        remat=remat,
        place=place,
        attention=attention,
    )
    values = transformer.token_values(parameters, hidden)
    return jnp.pad(values, ((0, 0), (shared, 0)))
