"""One turn of one episode: a reply's actions in its environment. `vmap` over slots."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.base import NO_ACTION, Environment, action_kind
from ragen_jax.text import free_form, reply_parser
from ragen_jax.text.prompts import Dialogue, TurnLimits, next_message
from ragen_jax.text.reply_parser import ReplyState, ReplyTables
from ragen_jax.trajectory import ENV_DONE, OUT_OF_ACTIONS, OUT_OF_TURNS, UNFINISHED


@struct.dataclass
class EnvEpisode:
    """One episode as the environment sees it."""

    state: Any  # the environment's own State
    turn: jax.Array  # int32[], turns finished
    actions: jax.Array  # int32[], actions that reached the environment so far
    success: jax.Array  # bool[]
    end: jax.Array  # int32[], UNFINISHED, or why the episode ended


@struct.dataclass
class Turn:
    """What happened in one turn."""

    reward: jax.Array  # float32[], sum of the environment's rewards
    actions: jax.Array  # int32[], actions that reached the environment


def start_env_episode(state: Any) -> EnvEpisode:
    """The episode that starts from an environment's State."""
    zero = jnp.zeros((), jnp.int32)
    return EnvEpisode(state, zero, zero, success=jnp.zeros((), bool), end=zero)


@struct.dataclass
class ParsedActions:
    """The actions of a reply."""

    actions: jax.Array  # int32[A] or [A, env.action_size], NO_ACTION fills up
    is_valid: jax.Array  # bool[], well formed and nothing in it unknown


def read_reply(
    env: Environment,
    limits: TurnLimits,
    tables: ReplyTables,
    reply: ReplyState,
    state: Any,
    *sampled: jax.Array,
) -> ParsedActions:
    """The actions of a reply that has ended.

    Args:
      env: the rules.
      limits: how many actions of a turn count.
      tables: of the environment.
      reply: after its last token.
      state: the environment's State that the reply answers to.
      sampled: int32[n] the reply's tokens and int32[] how many they are; read only of
        environments with free-form answers.
    """
    most = limits.actions_per_turn
    if env.read_action is not None:
        read, (tokens, count) = env.read_action, sampled
        actions, is_valid = free_form.read_answer(
            tables,
            reply,
            tokens,
            count,
            lambda text, length: read(text, length, state),
            env.answer_bytes,
            most,
        )
        return ParsedActions(actions, is_valid)
    return ParsedActions(
        reply_parser.final_actions(tables, reply)[:most],
        reply_parser.is_valid(tables, reply),
    )


def play_turn(
    key: jax.Array,
    env: Environment,
    limits: TurnLimits,
    env_episode: EnvEpisode,
    actions: jax.Array,
) -> tuple[EnvEpisode, Turn]:
    """Gives a turn's actions to the environment and says whether the episode continues.

    Args:
      key: of the environment's randomness in this turn.
      env: the rules.
      limits: of turns and actions.
      env_episode: not ended.
      actions: int32[A] or [A, env.action_size], NO_ACTION fills up.
    """

    def act(carry, index_and_action):
        state, count, is_over, success = carry
        index, action = index_and_action
        is_action = (
            (action_kind(action, env) != NO_ACTION)
            & ~is_over
            & (env_episode.actions + count < limits.actions)
        )
        state, outcome = env.step(
            jax.random.fold_in(key, index),
            state,
            jnp.where(is_action, action, NO_ACTION),
        )
        is_over |= outcome.done
        success |= outcome.success
        return (state, count + is_action, is_over, success), outcome.reward

    false = jnp.zeros((), bool)
    start = (env_episode.state, jnp.zeros((), jnp.int32), false, false)
    steps = (jnp.arange(actions.shape[0]), actions)
    (state, count, is_over, success), rewards = jax.lax.scan(act, start, steps)
    total_actions, turn = env_episode.actions + count, env_episode.turn + 1
    end = jnp.where(
        is_over,
        ENV_DONE,
        jnp.where(
            total_actions >= limits.actions,
            OUT_OF_ACTIONS,
            jnp.where(turn >= limits.turns, OUT_OF_TURNS, UNFINISHED),
        ),
    )
    played = EnvEpisode(
        state, turn, total_actions, env_episode.success | success, end.astype(jnp.int32)
    )
    return played, Turn(reward=rewards.sum(), actions=count)


def feedback_message(
    env: Environment,
    dialogue: Dialogue,
    env_episode: EnvEpisode,
    turn: Turn,
    is_valid: jax.Array,
    stopped_itself: jax.Array,
) -> jax.Array:
    """int32[M + 6], what follows a turn. See `prompts.next_message`."""
    return next_message(
        dialogue,
        env.observe(env_episode.state),
        turn=env_episode.turn,
        actions_left=dialogue.limits.actions - env_episode.actions,
        reward=turn.reward,
        is_valid=is_valid,
        stopped_itself=stopped_itself,
    )
