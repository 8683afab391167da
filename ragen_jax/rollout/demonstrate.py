"""Demonstrated episodes: an environment's own replies, as rows to imitate.

For supervised training (`warm_start`); the rollout itself does not use it.
"""

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import TRAIN, Environment
from ragen_jax.rollout import prng
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.text import reply_parser
from ragen_jax.text.phrases import PhraseTokens, join_phrases
from ragen_jax.text.prompts import (
    Dialogue,
    DialogueTokens,
    TurnLimits,
    first_message,
    message_tokens,
)
from ragen_jax.text.reply_parser import ReplyState, ReplyTables
from ragen_jax.trajectory import UNFINISHED


def demonstrate_episode(
    key: jax.Array,
    env: Environment,
    dialogue: Dialogue,
    tokens: DialogueTokens,
    reply_table: PhraseTokens,
    end_of_turn: int,
    context: int,
    turns: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plays a training level as the environment demonstrates it. `vmap` over keys.

    Args:
      key: of the level, the demonstrations and the environment's randomness.
      env: with `demonstrate`.
      dialogue, tokens: the texts and their tokens.
      reply_table: tokens of `env.reply_phrases`.
      end_of_turn: id of the token that closes every reply.
      context: T.
      turns: played at most; 0: all that the limits allow.

    Returns:
      int32[T] tokens, bool[T] is_reply, and bool[] whether the episode succeeded.
      Every reply is closed by `end_of_turn`; one that is longer than the limit is cut
      before it. What does not fit T is cut off.
    """
    start = env.reset(level_key(key), jnp.int32(TRAIN))
    ids = first_message(dialogue, env.observe(start))
    message, length = message_tokens(tokens, ids, is_first=True)
    row = _append(
        jnp.zeros(context, jnp.int32), jnp.zeros((), jnp.int32), message, length
    )
    limits = dialogue.limits
    capacity = limits.reply_tokens

    def one_turn(carry, turn):
        row, is_reply, length, env_episode = carry
        going = env_episode.end == UNFINISHED
        demo_key = prng.token_key(key, turn, turn, turn)
        reply_ids = env.demonstrate(demo_key, env_episode.state)
        reply, size = join_phrases(reply_table, reply_ids, capacity)
        size = jnp.minimum(size, capacity - 1)  # A longer reply is cut.
        reply, size = reply.at[size].set(end_of_turn), size + 1

        parsed = _read(tokens.replies, limits, reply, size)
        read = turn_lib.read_reply(
            env, limits, tokens.replies, parsed, env_episode.state, reply, size
        )
        env_key = prng.env_key(key, turn, turn)
        after, played = turn_lib.play_turn(
            env_key, env, limits, env_episode, read.actions
        )
        ids = turn_lib.feedback_message(
            env,
            dialogue,
            after,
            played,
            read.is_valid,
            jnp.ones((), bool),
        )
        message, added = message_tokens(tokens, ids, is_first=False)
        size = jnp.where(going, size, 0)
        added = jnp.where(going & (after.end == UNFINISHED), added, 0)
        position = jnp.arange(context)
        is_reply |= (position >= length) & (position < length + size)
        row = _append(row, length, reply, size)
        row = _append(row, length + size, message, added)
        env_episode = jax.tree.map(
            lambda a, b: jnp.where(going, a, b), after, env_episode
        )
        return (row, is_reply, length + size + added, env_episode), None

    carry = (row, jnp.zeros(context, bool), length, turn_lib.start_env_episode(start))
    rounds = jnp.arange(min(turns or limits.turns, limits.turns))
    (row, is_reply, _, env_episode), _ = jax.lax.scan(one_turn, carry, rounds)
    return row, is_reply, env_episode.success


def level_key(key: jax.Array) -> jax.Array:
    """The key of the level that `demonstrate_episode` plays with `key`."""
    return prng.level_key(key, jnp.zeros((), jnp.int32))


def _read(
    tables: ReplyTables, limits: TurnLimits, reply: jax.Array, size: jax.Array
) -> ReplyState:
    """What a reply says: the first `size` of int32[n] tokens."""

    def one(state, index):
        after = reply_parser.read_token(tables, state, reply[index])
        keep = index < size
        return jax.tree.map(lambda a, b: jnp.where(keep, a, b), after, state), None

    blank = reply_parser.start_reply(tables, limits.actions_per_turn)
    return jax.lax.scan(one, blank, jnp.arange(reply.shape[0]))[0]


def _append(
    row: jax.Array, at: jax.Array, tokens: jax.Array, count: jax.Array
) -> jax.Array:
    """`row` with the first `count` of `tokens` written from position `at`."""
    index = jnp.arange(tokens.shape[0])
    positions = jnp.where(index < count, at + index, row.shape[0])
    return row.at[positions].set(tokens, mode="drop")
