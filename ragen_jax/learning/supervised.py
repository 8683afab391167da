"""Supervised start: the loss of imitating demonstrated episodes."""

import jax
import jax.numpy as jnp

from ragen_jax.learning import aggregation, token_scores
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.transformer import (
    ForwardOptions,
    KeysAndValues,
    prefix_keys_and_values,
)


def imitation_loss(
    parameters: Parameters,
    tokens: jax.Array,
    is_reply: jax.Array,
    config: ModelConfig,
    prefix: jax.Array | None = None,
    *,
    weight: jax.Array | None = None,
) -> jax.Array:
    """float32[], mean negative log-likelihood per reply token, nats.

    Args:
      parameters: of the model.
      tokens: int32[R, T], demonstrated rows.
      is_reply: bool[R, T], the tokens to imitate.
      config: the model's shape.
      prefix: int32[S], what all rows begin with, if they do; it is computed once.
      weight: float[R, T], how much each of them counts; None: all alike.
    """
    options = ForwardOptions(dtype=jnp.float32)
    before: KeysAndValues = ()
    if prefix is not None:
        before = prefix_keys_and_values(parameters, prefix, config, options)
    logprobs = token_scores.score_tokens(
        parameters,
        tokens,
        config,
        temperature=1.0,
        options=options,
        is_reply=is_reply,
        prefix=before,
        with_entropy=False,
    ).logprobs
    return mean_over_replies(logprobs, is_reply, weight)


def mean_over_replies(
    logprobs: jax.Array, is_reply: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """float32[], mean negative log-likelihood per reply token, nats.

    Args:
      logprobs: float32[R, T], of rows' tokens.
      is_reply: bool[R, T], the tokens to imitate.
      weight: float[R, T], how much each of them counts; None: all alike.
    """
    if weight is None:
        return -aggregation.token_mean(logprobs, is_reply).value()
    weight = jnp.where(is_reply, weight, 0.0)
    return -(weight * jnp.where(is_reply, logprobs, 0.0)).sum() / weight.sum()
