"""Scores of a record's tokens by the models: log-probabilities, entropy, values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragen_jax.learning.vocabulary_scores import TokenScores, score_vocabulary
from ragen_jax.models import transformer
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.transformer import KeysAndValues


def score_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    temperature: float,
    *,
    is_reply: jax.Array | None = None,
    prefix: KeysAndValues = (),
    dtype=jnp.float32,
    remat: bool = False,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = causal_attention,
    look_up: Callable[..., jax.Array] = transformer.embed,
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
      is_reply: bool[R, T], the tokens to score, the others get 0; None: all.
      prefix: of the first S tokens of every row where all begin alike, by
        `transformer.prefix_keys_and_values`; neither they nor the one after them are
        scored. (): rows begin apart.
      dtype: of the transformer's computation.
      remat: recompute layers in the backward pass.
      constrain, attention, look_up: as for `transformer.hidden_states`.
      score: `score_vocabulary`, or that on each device's own rows.
      with_entropy: False leaves the entropy 0 and saves its cost.
    """
    shared = prefix[0].shape[2] if prefix else 0
    tokens = tokens[:, shared:]
    hidden = transformer.hidden_states(
        parameters,
        tokens,
        config,
        prefix=prefix,
        dtype=dtype,
        remat=remat,
        constrain=constrain,
        attention=attention,
        look_up=look_up,
    )
    following = tokens[:, 1:]
    wanted = jnp.ones(following.shape, bool)
    if is_reply is not None:
        wanted = is_reply[:, shared + 1 :]
    name = "head" if "head" in parameters else "embedding"
    scores = score(
        parameters[name],
        hidden[:, :-1],
        following,
        wanted,
        temperature=temperature,
        is_tied=name == "embedding",
        with_entropy=with_entropy,
    )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (shared + 1, 0))), scores)


def value_tokens(
    parameters: Parameters,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    prefix: KeysAndValues = (),
    dtype=jnp.float32,
    remat: bool = False,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    attention: Callable[..., jax.Array] = causal_attention,
    look_up: Callable[..., jax.Array] = transformer.embed,
) -> jax.Array:
    """float32[R, T], the critic's value before each token. See `score_tokens`."""
    shared = prefix[0].shape[2] if prefix else 0
    hidden = transformer.hidden_states(
        parameters,
        tokens[:, shared:],
        config,
        prefix=prefix,
        dtype=dtype,
        remat=remat,
        constrain=constrain,
        attention=attention,
        look_up=look_up,
    )
    values = transformer.token_values(parameters, hidden)
    return jnp.pad(values, ((0, 0), (shared, 0)))
