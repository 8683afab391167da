"""Writes the record of a rollout: episodes turn by turn, rows once at the end."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax import trajectory
from ragen_jax.rollout.types import (
    EnvFeedback,
    Prompts,
    RolloutPlan,
    RowBuffers,
    Slots,
)
from ragen_jax.trajectory import PADDING, Episodes, Rows
from ragen_jax.utils.scatter import put_where


def blank_episodes(plan: RolloutPlan, prompts: Prompts) -> Episodes:
    """A shard's episodes before anything was played."""
    counts = [env_shard.episodes for env_shard in plan.env_shards]
    environment = np.repeat(np.arange(len(counts)), counts)
    return trajectory.blank_episodes(plan.episodes, plan.turns).replace(
        group=prompts.group_in_batch, environment=jnp.asarray(environment, jnp.int32)
    )


def record_turn(
    plan: RolloutPlan, episodes: Episodes, slots: Slots, feedback: EnvFeedback
) -> Episodes:
    """Records the turns that W slots have just played."""
    row, is_used = slots.episode, feedback.is_used
    put = lambda x, new: put_where(x, row, new, is_used)
    at_turn = lambda x, new: put_where(x, (row, slots.turn), new, is_used)
    return episodes.replace(
        success=put(episodes.success, feedback.success),
        end=put(episodes.end, feedback.end),
        turns=put(episodes.turns, slots.turn + 1),
        reward=at_turn(episodes.reward, feedback.reward),
        is_valid=at_turn(episodes.is_valid, feedback.is_valid),
        actions=at_turn(episodes.actions, feedback.actions),
        reply_tokens=at_turn(episodes.reply_tokens, slots.sampled),
        reply_end=at_turn(episodes.reply_end, slots.reply_end),
        thought_tokens=at_turn(episodes.thought_tokens, slots.reply.thought),
        grounded=at_turn(episodes.grounded, feedback.grounded),
    )


def finish_rows(
    plan: RolloutPlan,
    prompts: Prompts,
    buffers: RowBuffers,
    policy_version: jax.Array,
) -> Rows:
    """The rows of a finished rollout, from what was written into the buffers."""
    turn, is_reply = buffers.turn, buffers.is_reply
    one_behind = ((0, 0), (0, 1))
    next_turn = jnp.pad(turn[:, 1:], one_behind, constant_values=PADDING)
    next_is_reply = jnp.pad(is_reply[:, 1:], one_behind)
    episode = prompts.first_index + jnp.arange(plan.episodes)
    if plan.window:
        episode = jnp.repeat(episode, plan.rows_each)
    episode = jnp.where(turn >= 0, episode[:, None], PADDING).astype(jnp.int32)
    rows = Rows(
        tokens=buffers.tokens,
        is_reply=is_reply,
        logprobs=buffers.logprobs,
        entropy=buffers.entropy,
        episode=episode,
        turn=turn,
        turn_end=is_reply & ~(next_is_reply & (next_turn == turn)),
        policy_version=jnp.full(plan.rows, policy_version, jnp.int32),
    )
    trajectory.check_rows(rows)
    return rows
