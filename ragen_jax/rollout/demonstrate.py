"""Demonstrated episodes: an environment's own replies, as rows to imitate.

For supervised training (`warm_start`, docs/examples/imitate.py); the rollout itself
does not use it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.base import TRAIN, Environment
from ragen_jax.rollout import prng
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.rollout.windows import Message
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


@struct.dataclass
class _DemonstratedTurn:
    env_episode: turn_lib.EnvEpisode  # after the turn
    reply: Message
    message: Message  # that follows it


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

    def one_turn(carry, turn):
        row, is_reply, length, env_episode = carry
        is_running = env_episode.end == UNFINISHED
        played = _play_turn(
            key, turn, env, dialogue, tokens, reply_table, end_of_turn, env_episode
        )
        reply, message, after = played.reply, played.message, played.env_episode
        # An episode that has ended adds nothing, and one that ends now no message.
        reply_length = jnp.where(is_running, reply.length, 0)
        message_length = jnp.where(
            is_running & (after.end == UNFINISHED), message.length, 0
        )
        position = jnp.arange(context)
        is_reply |= (position >= length) & (position < length + reply_length)
        row = _append(row, length, reply.tokens, reply_length)
        row = _append(row, length + reply_length, message.tokens, message_length)
        env_episode = jax.tree.map(
            lambda new, old: jnp.where(is_running, new, old), after, env_episode
        )
        length = length + reply_length + message_length
        return (row, is_reply, length, env_episode), None

    carry = (row, jnp.zeros(context, bool), length, turn_lib.start_env_episode(start))
    limit = dialogue.limits.turns
    turn_numbers = jnp.arange(min(turns or limit, limit))
    (row, is_reply, _, env_episode), _ = jax.lax.scan(one_turn, carry, turn_numbers)
    return row, is_reply, env_episode.success


def _play_turn(
    key: jax.Array,
    turn: jax.Array,
    env: Environment,
    dialogue: Dialogue,
    tokens: DialogueTokens,
    reply_table: PhraseTokens,
    end_of_turn: int,
    env_episode: turn_lib.EnvEpisode,
) -> _DemonstratedTurn:
    """One demonstrated turn.

    Args:
      key, env, dialogue, tokens, reply_table, end_of_turn: as for
        `demonstrate_episode`.
      turn: int32[], 0-based.
      env_episode: before the turn, not ended.
    """
    limits = dialogue.limits
    reply, reply_length = _demonstrated_reply(
        # Any key of the turn's own; another would change what the small models learned.
        prng.token_key(key, turn, turn, turn),
        env,
        env_episode.state,
        reply_table,
        end_of_turn,
        limits.reply_tokens,
    )
    reply_state = _read(tokens.replies, limits, reply, reply_length)
    parsed = turn_lib.read_reply(
        env,
        limits,
        tokens.replies,
        reply_state,
        env_episode.state,
        reply,
        reply_length,
    )
    env_key = prng.env_key(key, turn, turn)
    after, played = turn_lib.play_turn(
        env_key, env, limits, env_episode, parsed.actions
    )
    ids = turn_lib.feedback_message(
        env, dialogue, after, played, parsed.is_valid, jnp.ones((), bool)
    )
    return _DemonstratedTurn(
        env_episode=after,
        reply=Message(reply, reply_length),
        message=Message(*message_tokens(tokens, ids, is_first=False)),
    )


def _demonstrated_reply(
    key: jax.Array,
    env: Environment,
    state: Any,
    reply_table: PhraseTokens,
    end_of_turn: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """The environment's own reply: int32[capacity] tokens, and int32[] their number.

    Args:
      key: of the demonstration.
      env, reply_table, end_of_turn: as for `demonstrate_episode`.
      state: the environment's State to reply to.
      capacity: most tokens, `end_of_turn` included.
    """
    assert env.demonstrate is not None  # Such environments alone are demonstrated.
    ids = env.demonstrate(key, state)
    reply, length = join_phrases(reply_table, ids, capacity)
    length = jnp.minimum(length, capacity - 1)  # A longer reply is cut.
    return reply.at[length].set(end_of_turn), length + 1


def level_key(key: jax.Array) -> jax.Array:
    """The key of the level that `demonstrate_episode` plays with `key`."""
    return prng.level_key(key, jnp.zeros((), jnp.int32))


def _read(
    tables: ReplyTables, limits: TurnLimits, reply: jax.Array, length: jax.Array
) -> ReplyState:
    """What a reply says: the first `length` of int32[n] tokens."""

    def one_token(state, index):
        after = reply_parser.read_token(tables, state, reply[index])
        is_real = index < length
        select = lambda new, old: jnp.where(is_real, new, old)
        return jax.tree.map(select, after, state), None

    blank = reply_parser.start_reply(tables, limits.actions_per_turn)
    return jax.lax.scan(one_token, blank, jnp.arange(reply.shape[0]))[0]


def _append(
    row: jax.Array, at: jax.Array, tokens: jax.Array, count: jax.Array
) -> jax.Array:
    """`row` with the first `count` of `tokens` written from position `at`."""
    index = jnp.arange(tokens.shape[0])
    positions = jnp.where(index < count, at + index, row.shape[0])
    return row.at[positions].set(tokens, mode="drop")
