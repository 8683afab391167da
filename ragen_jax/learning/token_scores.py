"""Scores of a record's tokens by the models: log-probabilities, entropy, values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragen_jax.learning.vocabulary_scores import TokenScores, score_vocabulary
from ragen_jax.models import transformer
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.transformer import DEFAULT_OPTIONS, ForwardOptions, KeysAndValues


def score_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    temperature: float,
    options: ForwardOptions = DEFAULT_OPTIONS,
    *,
    is_reply: jax.Array | None = None,
    prefix: KeysAndValues = (),
    score: Callable[..., TokenScores] = score_vocabulary,
    with_entropy: bool = True,
) -> TokenScores:
    """Scores tokens of every row under softmax(logits / temperature).

    float32[R, T, V] never exists, and with `is_reply` no more than the reply tokens is
    scored, see vocabulary_scores.py: most of a row is what the environment said.

    Args:
      parameters: of the policy.
      tokens: int32[R, T], rows filled from position 0.
      config: the model's shape.
      temperature: above 0; the one that the rows were sampled at.
      options: how to compute the hidden states.
      is_reply: bool[R, T], the tokens to score, the others get 0; None: all.
      prefix: of the first S tokens of every row where all begin alike, by
        `transformer.prefix_keys_and_values`; neither they nor the one after them are
        scored. (): rows begin apart.
      score: `score_vocabulary`, or that on each device's rows.
      with_entropy: False leaves the entropy 0 and saves its cost.
    """
    skipped = prefix[0].shape[2] if prefix else 0
    tokens = tokens[:, skipped:]
    hidden = transformer.hidden_states(
        parameters, tokens, config, options, prefix=prefix
    )
    following = tokens[:, 1:]
    is_scored = jnp.ones(following.shape, bool)
    if is_reply is not None:
        is_scored = is_reply[:, skipped + 1 :]
    name = "head" if "head" in parameters else "embedding"
    scores = score(
        parameters[name],
        hidden[:, :-1],
        following,
        is_scored,
        temperature=temperature,
        is_tied=name == "embedding",
        with_entropy=with_entropy,
    )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (skipped + 1, 0))), scores)


def value_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    options: ForwardOptions = DEFAULT_OPTIONS,
    *,
    prefix: KeysAndValues = (),
) -> jax.Array:
    """float32[R, T], units of reward: the critic's value before each token.

    Args: as for `score_tokens`.
    """
    skipped = prefix[0].shape[2] if prefix else 0
    hidden = transformer.hidden_states(
        parameters, tokens[:, skipped:], config, options, prefix=prefix
    )
    values = transformer.token_values(parameters, hidden)
    return jnp.pad(values, ((0, 0), (skipped, 0)))
