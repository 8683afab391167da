"""One step of the environments whose slots wait; its feedback extends the contexts.

Called in the rollout's loop whenever `engine.env_step_due`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.rollout import engine, prng
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.rollout.arrays import concatenate, take, where_first
from ragen_jax.rollout.tasks import Task, TaskTokens
from ragen_jax.rollout.types import EngineInputs, EnvFeedback, RolloutPlan, RolloutState
from ragen_jax.text import free_form
from ragen_jax.text.prompts import DialogueTokens, message_tokens
from ragen_jax.text.reply_parser import ReplyState
from ragen_jax.trajectory import END_OF_TURN, UNFINISHED
from ragen_jax.utils.scatter import put_where


@dataclasses.dataclass(frozen=True)
class EnvInputs:
    """What stepping needs and never changes, within one trace."""

    tasks: tuple[Task, ...]
    plan: RolloutPlan
    model: kv.ShardedModel
    inputs: EngineInputs
    tokens: TaskTokens
    levels: tuple[Any, ...]  # for each environment: initial States of its groups
    with_grounding: bool  # whether thoughts are searched for the landmarks they name


def step_environments(
    env_inputs: EnvInputs,
    state: RolloutState,
    env_episodes: tuple[turn_lib.EnvEpisode, ...],
) -> tuple[RolloutState, tuple[turn_lib.EnvEpisode, ...]]:
    """Steps the environments of slots that wait, and extends the slots' contexts.

    Args:
      env_inputs: the rules, texts and levels.
      state: in which slots wait.
      env_episodes: for each environment, the episodes in its slots.

    Returns:
      Both, after the step.
    """
    plan, inputs = env_inputs.plan, env_inputs.inputs
    slot, is_used = engine.choose_waiting(plan, state)
    played = [
        _play_turns(env_inputs, index, state, slot, is_used, env_episodes[index])
        for index in range(len(plan.env_shards))
    ]
    feedback = concatenate(env_feedback for _, env_feedback in played)
    state, admitted = engine.give_feedback(
        plan, env_inputs.model, inputs, state, feedback
    )
    too_long = [
        _count_too_long(env_feedback, texts)
        for (_, env_feedback), texts in zip(played, env_inputs.tokens, strict=True)
    ]
    state = state.replace(too_long=state.too_long + jnp.stack(too_long))
    after = tuple(
        _start_env_episodes(
            env_inputs, index, slot, is_used, admitted, played[index][0], before
        )
        for index, before in enumerate(env_episodes)
    )
    return state, after


def _count_too_long(feedback: EnvFeedback, texts: DialogueTokens) -> jax.Array:
    """int32[], messages that exceed the capacity and so were cut.

    `tasks.refuse_cut_messages` refuses a record with any.
    """
    is_read = feedback.is_used & (feedback.end == UNFINISHED)
    return (is_read & (feedback.length > texts.next_capacity)).sum(dtype=jnp.int32)


def _play_turns(
    env_inputs: EnvInputs,
    index: int,
    state: RolloutState,
    slot: jax.Array,
    is_used: jax.Array,
    env_episodes: turn_lib.EnvEpisode,
) -> tuple[turn_lib.EnvEpisode, EnvFeedback]:
    """One environment's turn for those of its slots that wait.

    Args:
      env_inputs, state: as for `step_environments`.
      index: of the environment.
      slot, is_used: int32[W] and bool[W], from `engine.choose_waiting`.
      env_episodes: the episodes in all of its slots.

    Returns:
      Its part of the W episodes after their turns, and their feedback.
    """
    shard, inputs = env_inputs.plan.env_shards[index], env_inputs.inputs
    slot, is_used = slot[shard.feedback_range], is_used[shard.feedback_range]
    slots = take(state.slots, slot)
    waiting_episodes = jax.tree.map(lambda x: x[slot - shard.first_slot], env_episodes)
    episode = jnp.minimum(slots.episode, env_inputs.plan.episodes - 1)
    keys = jax.vmap(prng.env_key, (None, 0, 0))(
        inputs.key, inputs.prompts.episode_in_batch[episode], slots.turn
    )
    sampled: tuple[jax.Array, ...] = ()
    if env_inputs.tokens[index].replies.text is not None:
        sampled = engine.reply_tokens(env_inputs.plan, state, slot)
    play = functools.partial(_play_turn, env_inputs, index)
    after, results = jax.vmap(play)(
        keys, waiting_episodes, slots.reply, slots.reply_end, *sampled
    )
    return after, EnvFeedback(slot=slot, is_used=is_used, **results)


def _play_turn(
    env_inputs: EnvInputs,
    index: int,
    key: jax.Array,
    env_episode: turn_lib.EnvEpisode,
    reply: ReplyState,
    reply_end: jax.Array,
    *sampled: jax.Array,
) -> tuple[turn_lib.EnvEpisode, dict[str, jax.Array]]:
    """One turn of one episode of an environment, with its message. `vmap` over slots.

    Args:
      env_inputs: as for `step_environments`.
      index: of the environment.
      key: of the environment's randomness in this turn.
      env_episode: before the turn.
      reply: after its last token.
      reply_end: int32[], why it ended.
      *sampled: as for `turn.read_reply`.

    Returns:
      The episode after the turn, and the fields of its `EnvFeedback` by name, without
      slot and is_used.
    """
    task, tokens = env_inputs.tasks[index], env_inputs.tokens[index]
    limits = task.dialogue.limits
    parsed = turn_lib.read_reply(
        task.env, limits, tokens.replies, reply, env_episode.state, *sampled
    )
    after, played = turn_lib.play_turn(
        key, task.env, limits, env_episode, parsed.actions
    )
    grounded = jnp.zeros((), jnp.float32)
    if env_inputs.with_grounding and task.env.landmarks is not None:
        landmarks = task.env.landmarks(env_episode.state)
        ids, count = sampled
        grounded = free_form.grounded(tokens.replies, reply, ids, count, landmarks)
    stopped = reply_end == END_OF_TURN
    phrases = turn_lib.feedback_message(
        task.env, task.dialogue, after, played, parsed.is_valid, stopped
    )
    message, length = message_tokens(tokens, phrases, is_first=False)
    width = max(texts.next_capacity for texts in env_inputs.tokens)
    message = jnp.pad(message, (0, width - message.shape[0]))
    return after, dict(
        tokens=message,
        length=length,
        reward=played.reward,
        is_valid=parsed.is_valid,
        grounded=grounded,
        actions=played.actions,
        success=after.success,
        end=after.end,
    )


def _start_env_episodes(
    env_inputs: EnvInputs,
    index: int,
    slot: jax.Array,
    is_used: jax.Array,
    admitted: jax.Array,
    after: turn_lib.EnvEpisode,
    env_episodes: turn_lib.EnvEpisode,
) -> turn_lib.EnvEpisode:
    """One environment's episodes after a step: continued, or new ones in free slots.

    Args:
      env_inputs: as for `step_environments`.
      index: of the environment.
      slot, is_used: int32[W] and bool[W], from `engine.choose_waiting`.
      admitted: int32[W], from `engine.give_feedback`.
      after: the environment's part of the W episodes, after their turns.
      env_episodes: the episodes in all of its slots, before.
    """
    shard, prompts = env_inputs.plan.env_shards[index], env_inputs.inputs.prompts
    entries = shard.feedback_range
    slot, is_used, admitted = slot[entries], is_used[entries], admitted[entries]
    # Clipped to a valid index: where nothing was admitted it is not used.
    group = jnp.clip(prompts.group[jnp.maximum(admitted, 0)] - shard.first_group, 0)
    fresh = jax.vmap(turn_lib.start_env_episode)(take(env_inputs.levels[index], group))
    after = jax.tree.map(
        lambda new, old: where_first(admitted >= 0, new, old), fresh, after
    )
    put = lambda old, new: put_where(old, slot - shard.first_slot, new, is_used)
    return jax.tree.map(put, env_episodes, after)
