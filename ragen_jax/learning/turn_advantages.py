"""Advantages of turns: bi-level GAE, turn-wise GAE, and GRPO turn by turn.

Arrays of replies have the shape [B, K, M]: episodes, turns, tokens of a turn's reply,
as `advantages.Replies.gather` makes them. Turn ends are recorded, never inferred.
"""

import jax
import jax.numpy as jnp

from ragen_jax.learning.advantages import Estimate, gae, group_advantages
from ragen_jax.learning.groups import Grouping


def bi_level_gae(
    rewards: jax.Array,
    values: jax.Array,
    is_reply: jax.Array,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_value: str,
) -> Estimate:
    """GAE over turns with a discount of their own, then over the tokens of each turn.

    With V_k the value of turn k and r_k the reward at its last token, e_k:
      delta_k = r_k + turn_gamma * V_{k+1} - V_k
      A_k = delta_k + turn_gamma * lam * A_{k+1}
    The reward at e_k becomes A_k + V_k; `gae` then runs within each turn, whose end is
    terminal. With a single turn it is `gae`.

    Source: Wang et al., VAGEN, arXiv:2510.16907 (bi-level GAE); RAGEN's version takes
    every token with a reward for a turn's end, so that turns that earn 0 vanish.

    Args:
      rewards: float32[B, K, M], units of reward, of tokens. Those before e_k (a KL
        penalty) count within their turn alone.
      values: float32[B, K, M], units of reward, before each token is read.
      is_reply: bool[B, K, M], each turn's tokens from index 0.
      gamma, lam: as for `gae`, within a turn; lam over turns too.
      turn_gamma: discount from one turn to the next, in [0, 1].
      turn_value: "last", V_k is the value at e_k (the source's); or "first".

    Returns:
      An Estimate, of float32[B, K, M].
    """
    is_last = _last_tokens(is_reply)
    earned = jnp.where(is_last, rewards, 0.0).sum(axis=2)
    by_turn = _gae_of_turns(earned, values, is_reply, turn_gamma, lam, turn_value)
    rewards = jnp.where(is_last, by_turn.returns[..., None], rewards)
    shape = is_reply.shape
    flat = (x.reshape(-1, shape[2]) for x in (rewards, values, is_reply))
    return jax.tree.map(lambda x: x.reshape(shape), gae(*flat, gamma=gamma, lam=lam))


def turn_wise_gae(
    rewards: jax.Array,
    values: jax.Array,
    is_reply: jax.Array,
    *,
    lam: float,
    turn_gamma: float,
    turn_value: str,
) -> Estimate:
    """GAE over turns; every token of a turn has the turn's advantage.

    As `bi_level_gae`'s first level, with r_k all that the turn's tokens earned. The
    critic learns at one token a turn, and whitening counts each turn once.

    Source: VAGEN's turn_wise_gae (value at the last token) and its variant for rows of
    one turn (at the first). The first is the default here: a value read after the
    turn's tokens depends on them, which biases the gradient.

    Args: as for `bi_level_gae`.
    """
    earned = jnp.where(is_reply, rewards, 0.0).sum(axis=2)
    by_turn = _gae_of_turns(earned, values, is_reply, turn_gamma, lam, turn_value)
    is_target = _value_tokens(is_reply, turn_value)
    return Estimate(
        advantages=jnp.where(is_reply, by_turn.advantages[..., None], 0.0),
        returns=jnp.where(is_target, by_turn.returns[..., None], 0.0),
        is_target=is_target,
    )


def _gae_of_turns(earned, values, is_reply, turn_gamma, lam, turn_value) -> Estimate:
    """`gae` over turns, float32[B, K], with turns in the place of tokens.

    Args:
      earned: float32[B, K], units of reward.
      values, is_reply: [B, K, M], as for `bi_level_gae`.
    """
    is_value_token = _value_tokens(is_reply, turn_value)
    turn_values = jnp.where(is_value_token, values, 0.0).sum(axis=2)
    return gae(earned, turn_values, is_reply.any(axis=2), gamma=turn_gamma, lam=lam)


def _value_tokens(is_reply: jax.Array, turn_value: str) -> jax.Array:
    """bool[B, K, M], the token of each turn whose value stands for it."""
    if turn_value == "last":
        return _last_tokens(is_reply)
    return is_reply & (jnp.arange(is_reply.shape[2]) == 0)[None, None]


def _last_tokens(is_reply: jax.Array) -> jax.Array:
    """bool[B, K, M], the last token of each turn."""
    return is_reply & (jnp.cumsum(is_reply, 2) == is_reply.sum(2, keepdims=True))


def turn_group_advantages(
    turn_rewards: jax.Array,
    turns: jax.Array,
    grouping: Grouping,
    *,
    turn_gamma: float,
    divide_by_std: bool,
) -> jax.Array:
    """GRPO turn by turn: a turn's return-to-go against the same turn's in the group.

    G_k = r_k + turn_gamma * G_{k+1}; A_k = (G_k - mean) / std over the members of the
    group that played turn k; 0 if fewer than two did, or all are equal. With a single
    turn it is GRPO.

    Source: turn-level credit for GRPO as in Zeng et al. 2025, arXiv:2505.11821.

    Args:
      turn_rewards: float32[B, K], units of reward, 0 where no turn was played.
      turns: int32[B], turns played.
      grouping: the P groups of the episodes, and the episodes that are compared.
      turn_gamma: discount from one turn to the next, in [0, 1].
      divide_by_std: False leaves units of reward, as Dr. GRPO.

    Returns:
      float32[B, K]; 0 for turns never played.
    """
    count = turn_rewards.shape[1]

    def backwards(to_go, reward):
        to_go = reward + turn_gamma * to_go
        return to_go, to_go

    turn_rewards = turn_rewards.astype(jnp.float32)
    # Return-to-go of the rewards, and of their absolute values: `terms`, the scale of
    # rounding.
    each = jnp.stack([turn_rewards.T, jnp.abs(turn_rewards).T], axis=1)  # [K, 2, B]
    _, sums = jax.lax.scan(backwards, jnp.zeros_like(each[0]), each, reverse=True)
    to_go, terms = sums.transpose(1, 2, 0).reshape(2, -1)
    turn = jnp.arange(count)[None]
    played = turn < turns[:, None]
    if grouping.members is not None:
        played &= grouping.members[:, None]
    # A group for each turn of a group; those that did not play it are no members.
    turn_groups = Grouping(
        (grouping.group[:, None] * count + turn).reshape(-1),
        grouping.count * count,
        played.reshape(-1),
    )
    advantages = group_advantages(
        to_go, turn_groups, terms, divide_by_std=divide_by_std
    )
    return jnp.where(played, advantages.reshape(played.shape), 0.0)
