"""What a reply does to the world: one turn of one game. `vmap` over slots."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.base import NO_ACTION, World
from ragen_jax.rollout.scenes import Scene
from ragen_jax.text import answers, replies
from ragen_jax.text.dialogue import Dialogue, TurnLimits, next_message
from ragen_jax.text.replies import ReplyState, ReplyTables
from ragen_jax.trajectory import OUT_OF_ACTIONS, OUT_OF_TURNS, UNFINISHED, WORLD_DONE


@struct.dataclass
class Game:
    """One episode as the world sees it."""

    state: Any  # the world's own State
    turn: jax.Array  # int32[], turns finished
    actions: jax.Array  # int32[], actions that reached the world so far
    success: jax.Array  # bool[]
    end: jax.Array  # int32[], UNFINISHED, or why the episode ended


@struct.dataclass
class Turn:
    """What happened in one turn."""

    reward: jax.Array  # float32[], sum of the world's rewards
    taken: jax.Array  # int32[], actions that reached the world


def new_game(state: Any) -> Game:
    """A game that starts from a world's State."""
    zero = jnp.zeros((), jnp.int32)
    return Game(state, zero, zero, success=jnp.zeros((), bool), end=zero)


@struct.dataclass
class Read:
    """What a reply asks for."""

    actions: jax.Array  # int32[A], NO_ACTION fills up
    is_valid: jax.Array  # bool[], well formed and nothing in it unknown


def read_reply(
    scene: Scene,
    tables: ReplyTables,
    reply: ReplyState,
    state: Any,
    *sampled: jax.Array,
) -> Read:
    """The actions of a reply that has ended.

    Args:
      scene: the world, and how many actions of a turn count.
      tables: of the world.
      reply: after its last token.
      state: the world's State that the reply answers to.
      sampled: int32[n] the reply's tokens and int32[] how many they are; read only of
        worlds with free-form answers.
    """
    world, most = scene.world, scene.dialogue.limits.actions_per_turn
    if world.read_action is not None:
        actions, is_valid = answers.read_answer(
            tables,
            reply,
            *sampled,
            lambda text, length: world.read_action(text, length, state),
            world.answer_bytes,
            most,
        )
        return Read(actions, is_valid)
    return Read(
        replies.final_actions(tables, reply)[:most], replies.is_valid(tables, reply)
    )


def play_turn(
    key: jax.Array, world: World, limits: TurnLimits, game: Game, actions: jax.Array
) -> tuple[Game, Turn]:
    """Gives a turn's actions to the world and says whether the episode goes on.

    Args:
      key: decides the world's chance in this turn.
      world: the rules.
      limits: of turns and actions.
      game: not ended.
      actions: int32[A], NO_ACTION fills up.
    """

    def act(carry, index_and_action):
        state, taken, done, success = carry
        index, action = index_and_action
        counts = (action != NO_ACTION) & ~done & (game.actions + taken < limits.actions)
        state, outcome = world.step(
            jax.random.fold_in(key, index), state, jnp.where(counts, action, NO_ACTION)
        )
        done |= outcome.done
        success |= outcome.success
        return (state, taken + counts, done, success), outcome.reward

    no = jnp.zeros((), bool)
    start = (game.state, jnp.zeros((), jnp.int32), no, no)
    steps = (jnp.arange(actions.shape[0]), actions)
    (state, taken, done, success), rewards = jax.lax.scan(act, start, steps)
    used, turn = game.actions + taken, game.turn + 1
    end = jnp.where(
        done,
        WORLD_DONE,
        jnp.where(
            used >= limits.actions,
            OUT_OF_ACTIONS,
            jnp.where(turn >= limits.turns, OUT_OF_TURNS, UNFINISHED),
        ),
    )
    played = Game(state, turn, used, game.success | success, end.astype(jnp.int32))
    return played, Turn(reward=rewards.sum(), taken=taken)


def answer_to_turn(
    world: World,
    dialogue: Dialogue,
    game: Game,
    turn: Turn,
    is_valid: jax.Array,
    stopped_itself: jax.Array,
) -> jax.Array:
    """int32[message_phrases], the message that follows a turn. See `dialogue`."""
    return next_message(
        dialogue,
        world.observe(game.state),
        turn=game.turn,
        actions_left=dialogue.limits.actions - game.actions,
        reward=turn.reward,
        is_valid=is_valid,
        stopped_itself=stopped_itself,
    )
