"""The episodes' side of the record, as a rollout writes it."""

import jax.numpy as jnp
import numpy as np

from ragen_jax import trajectory
from ragen_jax.rollout.slots import Answer, Plan, Prompts, Slots
from ragen_jax.trajectory import Episodes


def blank_episodes(plan: Plan, prompts: Prompts) -> Episodes:
    """A shard's episodes before anything was played."""
    environment = np.repeat(
        np.arange(len(plan.parts)), [part.episodes for part in plan.parts]
    )
    return trajectory.blank_episodes(plan.episodes, plan.turns).replace(
        group=prompts.group_name, environment=jnp.asarray(environment, jnp.int32)
    )


def record_turn(
    plan: Plan, episodes: Episodes, slots: Slots, answer: Answer
) -> Episodes:
    """Notes what came of the turns of W slots that the worlds have answered."""
    row = jnp.where(answer.is_used, slots.episode, plan.episodes)
    put = lambda x, new: x.at[row].set(new, mode="drop")  # noqa: E731
    at_turn = lambda x, new: x.at[row, slots.turn].set(new, mode="drop")  # noqa: E731
    return episodes.replace(
        success=put(episodes.success, answer.success),
        end=put(episodes.end, answer.end),
        turns=put(episodes.turns, slots.turn + 1),
        reward=at_turn(episodes.reward, answer.reward),
        is_valid=at_turn(episodes.is_valid, answer.is_valid),
        actions=at_turn(episodes.actions, answer.taken),
        reply_tokens=at_turn(episodes.reply_tokens, slots.sampled),
        reply_end=at_turn(episodes.reply_end, slots.reply_end),
        thought_tokens=at_turn(episodes.thought_tokens, slots.reply.thought),
        grounded=at_turn(episodes.grounded, answer.grounded),
    )
