"""Rewards of turns and tokens: the environment's and the format penalty."""

import chex
import jax
import jax.numpy as jnp

from ragen_jax.learning import losses
from ragen_jax.trajectory import Episodes, Rows, is_played, look_up_turns


def at_turn_ends(rows: Rows, earned: jax.Array) -> jax.Array:
    """Puts each turn's reward on the last token of the turn's reply.

    Args:
      rows: R rows of T tokens. Turn ends are read from `turn_end`, never from rewards,
        so a turn that earns 0 keeps its end.
      earned: float32[B, K], units of reward, by episode and turn.

    Returns:
      float32[R, T], units of reward; 0 at all other tokens.
    """
    looked_up = look_up_turns(earned, rows)
    return jnp.where(rows.turn_end & rows.is_real, looked_up, 0.0)


def returns(episodes: Episodes, format_penalty: float = 0.0) -> jax.Array:
    """R(tau), the undiscounted sum of an episode's rewards over the turns played.

    Source: StarPO, arXiv:2504.20073: the objective is J(theta) = E[R(tau)].

    Args:
      episodes: B episodes of at most K turns.
      format_penalty: units of reward, <= 0, for each played turn whose reply is not
        valid; 0 gives the environment's own return.

    Returns:
      float32[B], units of reward.
    """
    return played_rewards(episodes, format_penalty).sum(axis=1)


def penalize_kl(
    token_rewards: jax.Array,
    logprobs: jax.Array,
    ref_logprobs: jax.Array,
    is_reply: jax.Array,
    coefficient: float | jax.Array,
    kind: str,
) -> jax.Array:
    """Takes coefficient * KL(policy || reference) from the reward of each reply token.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2, token by token. Vanilla
    StarPO (arXiv:2504.20073): coefficient 0.001, k1.

    Args:
      token_rewards: float[R, T], units of reward.
      logprobs: float[R, T], nats, under the policy before it learns from them.
      ref_logprobs: float[R, T], nats, under the frozen reference.
      is_reply: bool[R, T]; elsewhere the rewards stay as they are, whatever the
        log-probs hold.
      coefficient: units of reward per nat, >= 0.
      kind: one of `losses.KL_KINDS`, without a plus.

    Returns:
      float32[R, T], units of reward.
    """
    chex.assert_equal_shape([token_rewards, logprobs, ref_logprobs, is_reply])
    chex.assert_type(is_reply, bool)
    divergence = losses.kl(logprobs, ref_logprobs, kind)
    penalty = coefficient * losses.bounded_kl(divergence, kind)
    return token_rewards - jnp.where(is_reply, penalty, 0.0)


def played_rewards(episodes: Episodes, format_penalty: float) -> jax.Array:
    """float32[B, K], units of reward, of each played turn; 0 for turns never played.

    A turn whose reply is not valid earns `format_penalty` on top of the environment's
    reward (-0.1 in arXiv:2504.20073).
    """
    _check_penalty(format_penalty)
    chex.assert_equal_shape([episodes.reward, episodes.is_valid])
    played = is_played(episodes)
    penalty = jnp.where(episodes.is_valid, 0.0, format_penalty)
    return jnp.where(played, episodes.reward.astype(jnp.float32) + penalty, 0.0)


def _check_penalty(format_penalty: float) -> None:
    if format_penalty > 0:
        raise ValueError(
            f"format_penalty is added to the reward of an invalid reply; need a number"
            f" <= 0, got {format_penalty}"
        )
