"""Admits episodes to slots: the first at the start, then each queue's next one.

Every environment of a shard has a queue of its episodes, and slots of its own that take
from it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.rollout.arrays import concatenate
from ragen_jax.rollout.types import EngineInputs, EnvShard, RolloutPlan
from ragen_jax.text import reply_parser


@struct.dataclass
class Admission:
    """The episodes that W slots take from the queues.

    Where `is_new` is False the other fields of a slot mean nothing.
    """

    is_new: jax.Array  # bool[W], whether the slot was free and its queue had an episode
    episode: jax.Array  # int32[W], on this shard
    group: jax.Array  # int32[W], index of its prompt among those here
    prompt: jax.Array  # int32[W, Tp], right-padded
    prompt_length: jax.Array  # int32[W]
    # int32[environments], the queues' heads afterwards; they may lie beyond the ends.
    next_episode: jax.Array


def first_episodes(plan: RolloutPlan) -> tuple[np.ndarray, list[int]]:
    """int[S], the episodes that the slots begin with, and the queues' heads behind."""
    shards = plan.env_shards
    first = np.concatenate(
        [shard.first_episode + np.arange(shard.slots) for shard in shards]
    )
    return first, [shard.first_episode + shard.slots for shard in shards]


def admit(
    plan: RolloutPlan,
    inputs: EngineInputs,
    next_episode: jax.Array,
    is_free: jax.Array,
) -> Admission:
    """Gives the queues' next episodes to the slots that became free.

    Args:
      plan, inputs: as for `engine.give_feedback`.
      next_episode: int32[environments], the queues' heads.
      is_free: bool[W].
    """
    episode, is_new, heads = take_from_queues(plan, next_episode, is_free)
    group = inputs.prompts.group[jnp.where(is_new, episode, 0)]
    return Admission(
        is_new=is_new,
        episode=episode,
        group=group,
        prompt=inputs.prompts.tokens[group],
        prompt_length=inputs.prompts.lengths[group],
        next_episode=heads,
    )


def take_from_queues(
    plan: RolloutPlan, heads: jax.Array, is_free: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One episode for each free slot, in their order, as far as its queue has any.

    Args:
      plan: of the rollout.
      heads: int32[environments], the next episode of each queue.
      is_free: bool[W].

    Returns:
      int32[W] episodes on this shard, bool[W] whether the queue had one, and the new
      heads, which may lie beyond the queues' ends.
    """

    def take(index: int, shard: EnvShard):
        is_free_slot = is_free[shard.feedback_range]
        episode = heads[index] + jnp.cumsum(is_free_slot) - 1
        is_new = is_free_slot & (episode < shard.first_episode + shard.episodes)
        return episode, is_new, heads[index][None] + is_free_slot.sum()

    return concatenate(
        take(index, shard) for index, shard in enumerate(plan.env_shards)
    )


def blank_replies(
    plan: RolloutPlan, inputs: EngineInputs, counts: list[int]
) -> reply_parser.ReplyState:
    """Replies of no token yet, `counts` of them for each environment."""

    def blank_replies_of(tables: reply_parser.ReplyTables, count: int):
        blank = reply_parser.start_reply(tables, plan.actions_per_turn)
        return jax.tree.map(lambda x: jnp.stack([x] * count), blank)

    return concatenate(map(blank_replies_of, inputs.tables, counts))
