"""Supervised start: demonstrated episodes as rows, and the loss of imitating them."""

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import TRAIN, World
from ragen_jax.learning import policy, reduce
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import keys, turns
from ragen_jax.rollout.scenes import Scene
from ragen_jax.text import replies
from ragen_jax.text.dialogue import (
    Dialogue,
    DialogueTokens,
    first_message,
    message_tokens,
)
from ragen_jax.text.phrases import PhraseTokens, join_phrases
from ragen_jax.text.replies import ReplyState, ReplyTables
from ragen_jax.trajectory import UNFINISHED


def demonstrate_episode(
    key: jax.Array,
    world: World,
    dialogue: Dialogue,
    tokens: DialogueTokens,
    reply_table: PhraseTokens,
    end_of_turn: int,
    context: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plays one training level with the world's own demonstrator. `vmap` over keys.

    Args:
      key: decides the level, the demonstrations and the world's chance.
      world: with `demonstrate`.
      dialogue, tokens: the texts and their tokens.
      reply_table: tokens of `world.reply_phrases`.
      end_of_turn: id of the token that closes every reply.
      context: T.

    Returns:
      int32[T] tokens, bool[T] is_reply, and bool[] whether the episode succeeded.
      Every reply is closed by `end_of_turn`; one that is longer than the limit is cut
      before it. What does not fit T is cut off.
    """
    start = world.reset(keys.level_key(key, jnp.zeros((), jnp.int32)), TRAIN)
    ids = first_message(dialogue, world.observe(start))
    message, length = message_tokens(tokens, ids, is_first=True)
    row = _append(
        jnp.zeros(context, jnp.int32), jnp.zeros((), jnp.int32), message, length
    )
    capacity = dialogue.limits.reply_tokens

    def one_turn(carry, turn):
        row, is_reply, length, game = carry
        going = game.end == UNFINISHED
        demo_key = keys.token_key(key, turn, turn, turn)
        reply_ids = world.demonstrate(demo_key, game.state)
        reply, size = join_phrases(reply_table, reply_ids, capacity)
        size = jnp.minimum(size, capacity - 1)  # A longer reply is cut.
        reply, size = reply.at[size].set(end_of_turn), size + 1

        scene = Scene(world.name, world, dialogue, prompts=0)
        parsed = _read(tokens.replies, dialogue, reply, size)
        said = turns.read_reply(scene, tokens.replies, parsed, game.state, reply, size)
        chance = keys.world_key(key, turn, turn)
        after, played = turns.play_turn(
            chance, world, dialogue.limits, game, said.actions
        )
        ids = turns.answer_to_turn(
            world,
            dialogue,
            after,
            played,
            said.is_valid,
            jnp.ones((), bool),
        )
        message, fed = message_tokens(tokens, ids, is_first=False)
        size = jnp.where(going, size, 0)
        fed = jnp.where(going & (after.end == UNFINISHED), fed, 0)
        place = jnp.arange(context)
        is_reply |= (place >= length) & (place < length + size)
        row = _append(row, length, reply, size)
        row = _append(row, length + size, message, fed)
        game = jax.tree.map(lambda a, b: jnp.where(going, a, b), after, game)
        return (row, is_reply, length + size + fed, game), None

    carry = (row, jnp.zeros(context, bool), length, turns.new_game(start))
    rounds = jnp.arange(dialogue.limits.turns)
    (row, is_reply, _, game), _ = jax.lax.scan(one_turn, carry, rounds)
    return row, is_reply, game.success


def _read(
    tables: ReplyTables, dialogue: Dialogue, reply: jax.Array, size: jax.Array
) -> ReplyState:
    """What a reply says: the first `size` of int32[n] tokens."""

    def one(state, index):
        after = replies.read_token(tables, state, reply[index])
        keep = index < size
        return jax.tree.map(lambda a, b: jnp.where(keep, a, b), after, state), None

    blank = replies.start_reply(tables, dialogue.limits.actions_per_turn)
    return jax.lax.scan(one, blank, jnp.arange(reply.shape[0]))[0]


def _append(
    row: jax.Array, at: jax.Array, tokens: jax.Array, count: jax.Array
) -> jax.Array:
    """`row` with the first `count` of `tokens` written from position `at`."""
    index = jnp.arange(tokens.shape[0])
    places = jnp.where(index < count, at + index, row.shape[0])
    return row.at[places].set(tokens, mode="drop")


def imitation_loss(
    parameters: Parameters,
    tokens: jax.Array,
    is_reply: jax.Array,
    config: ModelConfig,
    prefix: jax.Array | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """float32[], mean negative log-likelihood per reply token, nats.

    Args:
      parameters: of the model.
      tokens: int32[R, T], demonstrated rows.
      is_reply: bool[R, T], the tokens to imitate.
      config: the model's shape.
      prefix: int32[S], what all rows begin with, if they do. See `score_tokens`.
      dtype: of the computation.
    """
    logprobs = policy.score_tokens(
        parameters,
        tokens,
        config,
        temperature=1.0,
        is_reply=is_reply,
        prefix=prefix,
        dtype=dtype,
        with_entropy=False,
    ).logprobs
    return -reduce.token_mean(logprobs, is_reply).value()
