"""What the models say of a record's tokens: log-probabilities, entropy, values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models import transformer
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters

# Logits that exist at a time, in numbers: 2**24 float32 are 64 MiB.
_MOST_LOGITS = 2**24


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
    dtype=jnp.float32,
    remat: bool = False,
    place: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = transformer.causal_attention,
    with_entropy: bool = True,
) -> TokenScores:
    """Scores every token of every row under softmax(logits / temperature).

    The vocabulary is scored in chunks of positions, recomputed in the backward pass, so
    that float32[R, T, V] never exists.

    Args:
      parameters: of the policy.
      tokens: int32[R, T], rows filled from position 0.
      config: the model's shape.
      temperature: above 0; the one that the rows were sampled at.
      dtype: of the transformer's computation.
      remat: recompute layers in the backward pass.
      place, attention: as for `transformer.hidden_states`.
      with_entropy: False leaves the entropy 0 and saves its cost.
    """
    hidden = transformer.hidden_states(
        parameters,
        tokens,
        config,
        dtype=dtype,
        remat=remat,
        place=place,
        attention=attention,
    )
    rows, length = tokens.shape
    chunk = max(1, min(length - 1, _MOST_LOGITS // (rows * config.vocabulary)))
    chunks = -(-(length - 1) // chunk)
    padding = chunks * chunk - (length - 1)

    def split(x: jax.Array) -> jax.Array:
        """[R, T - 1, ...] -> [chunks, R, chunk, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def score(piece):
        before, token = piece
        logits = transformer.vocabulary_logits(parameters, before) / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        if not with_entropy:
            return TokenScores(chosen - total, jnp.zeros_like(total))
        # Not log Z - sum_v p_v x_v, whose two terms cancel where the policy is sure.
        log_policy = logits - total[..., None]
        entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1)
        return TokenScores(chosen - total, entropy)

    scores = jax.lax.map(score, (split(hidden[:, :-1]), split(tokens[:, 1:])))

    def join(x: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : length - 1]
        return jnp.pad(whole, ((0, 0), (1, 0)))

    return jax.tree.map(join, scores)


def value_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    dtype=jnp.float32,
    remat: bool = False,
    place: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = transformer.causal_attention,
) -> jax.Array:
    """float32[R, T], the critic's value before each token. See `score_tokens`."""
    hidden = transformer.hidden_states(
        parameters,
        tokens,
        config,
        dtype=dtype,
        remat=remat,
        place=place,
        attention=attention,
    )
    return transformer.token_values(parameters, hidden)
