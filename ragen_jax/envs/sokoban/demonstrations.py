"""Imperfect demonstrations for Sokoban with one box, by a player that reads the room.

The thought names where the player, the box and the target are, then walks the plan:
each action with the cell that the player is in after it. Plans are sensible but not
good: some push the box whichever way it goes, some actions are random, and a share of
them never looks at the box and wanders.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import walks
from ragen_jax.envs.base import Environment
from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.generator import MOVES, TARGET, WALL
from ragen_jax.envs.sokoban.types import Sokoban, State

UNSOLVABLE = 100_000  # Stands for an infinite number of actions.
_LANDMARKS = (", box", ", target")


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How far from good the demonstrations are."""

    ignore_target: float = 0.3  # share of plans that push the box whichever way it goes
    random_plan: float = 0.0  # share of plans that do not look at the box: all random
    noise: float = 0.1  # share of actions drawn at random in the other plans
    longest: int = 5  # actions in a plan at most; lengths up to it are equally likely


def with_demonstrations(
    env: Environment, settings: Sokoban, player: Demonstrator, *, thinking: bool
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in.

    Raises:
      ValueError: if there are several boxes, for which the plan would cost too much.
    """
    if settings.boxes != 1:
        raise ValueError(
            f"sokoban.boxes = {settings.boxes} has no demonstrations, whose plans know"
            " a single box: choose 1"
        )
    return dataclasses.replace(
        env,
        reply_phrases=walks.walk_phrases(_LANDMARKS, settings.size, env.action_names),
        demonstrate=functools.partial(_demonstrate, player=player, thinking=thinking),
    )


def _demonstrate(
    key: jax.Array, state: State, player: Demonstrator, thinking: bool
) -> jax.Array:
    """int32[Md], one reply as phrase ids, without the end-of-turn token."""
    actions, cells, random_plan = plan(key, state, player)
    at, *landmarks = _places(state)
    return walks.walk_reply(
        actions,
        cells,
        at,
        landmarks,
        random_plan,
        side=state.tiles.shape[0],
        names=len(texts.ACTION_NAMES),
        thinking=thinking,
    )


def plan(
    key: jax.Array, state: State, player: Demonstrator
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A plan of at least one action.

    Args:
      key: consumed.
      state: with one box; not over.
      player: how imperfect the plan is.

    Returns:
      int32[longest] actions and int32[longest] the cells (row * S + column) in which
      the player is after them; -1 behind the end of the plan. bool[], whether the box
      was not looked at.
    """
    ignore_target_key, random_plan_key, length_key, key = jax.random.split(key, 4)
    random_plan = jax.random.bernoulli(random_plan_key, player.random_plan)
    noise = jnp.where(random_plan, 1.0, player.noise)
    ignore_target = jax.random.bernoulli(ignore_target_key, player.ignore_target)
    length = jax.random.randint(length_key, (), 1, player.longest + 1)
    size = state.tiles.shape[0]
    is_open = (state.tiles != WALL).reshape(-1)
    start, box, target = _places(state)
    left = actions_left(is_open, target)

    def one(carry, key):
        at, box, over, step = carry
        choice_key, noise_key, random_key = jax.random.split(key, 3)
        next_at, next_box = _after(at, box, is_open)
        # Plans without regard to the target go straight to the box and push on.
        ahead = at + jnp.asarray(_steps(size))
        rows, columns = ahead // size - box // size, ahead % size - box % size
        cost = jnp.where(
            ignore_target, jnp.abs(rows) + jnp.abs(columns), left[next_at, next_box]
        )
        cost = jnp.where(next_at == at, 2 * UNSOLVABLE, cost)
        # Among equally good actions each is equally likely.
        best = jnp.argmin(cost + jax.random.uniform(choice_key, cost.shape))
        random = jax.random.randint(random_key, (), 0, len(MOVES))
        is_random = jax.random.bernoulli(noise_key, noise)
        action = jnp.where(is_random, random, best)
        now_over = over | (step >= length)
        written = jnp.where(now_over, -1, jnp.stack([action, next_at[action]]))
        at = jnp.where(now_over, at, next_at[action])
        box = jnp.where(now_over, box, next_box[action])
        return (at, box, now_over | (box == target), step + 1), written

    carry = (start, box, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    _, written = jax.lax.scan(one, carry, jax.random.split(key, player.longest))
    return written[:, 0], written[:, 1], random_plan


def actions_left(is_open: jax.Array, target: jax.Array) -> jax.Array:
    """Fewest actions to the solution from every place of player and box.

    Breadth first from the solved places: each pass adds those one action farther.

    Args:
      is_open: bool[S * S], the cells, row by row, that are no wall; none is on the
        border.
      target: int32[], the cell where the box belongs.

    Returns:
      int32[S * S, S * S], player by box; 0 with the box on the target, `UNSOLVABLE`
      where no play leads there, or player and box cannot be.
    """
    cells = is_open.shape[0]
    size = int(np.sqrt(cells))
    index = np.arange(cells)
    is_place = is_open[:, None] & is_open[None] & (index[:, None] != index[None])
    # Shifts go around the border, where nothing is open: no state comes from beyond.
    is_ahead = [np.roll(np.eye(cells, dtype=bool), s, axis=1) for s in _steps(size)]

    def widen(carry):
        left, is_reached, _, count = carry
        found = is_reached
        for step, ahead in zip(_steps(size), is_ahead, strict=True):
            # A walk: from [p, b] to [p + step, b]. A push: from [p, p + step] to
            # [p + step, p + 2 step], which is `pushed` of p + step.
            pushed = (is_reached & ahead).any(axis=1)
            found |= jnp.roll(is_reached, -step, axis=0)
            found |= ahead & jnp.roll(pushed, -step)[:, None]
        found &= is_place
        is_new = found & ~is_reached
        left = jnp.where(is_new, count, left)
        return left, found, is_new.any(), count + 1

    is_solved = is_place & (index[None] == target)
    left = jnp.where(is_solved, 0, UNSOLVABLE).astype(jnp.int32)
    start = (left, is_solved, is_solved.any(), jnp.ones((), jnp.int32))
    # Ends: each pass but the last adds at least one of finitely many states.
    return jax.lax.while_loop(lambda carry: carry[2], widen, start)[0]


def _after(
    at: jax.Array, box: jax.Array, is_open: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[4] each, where player and box are after each action."""
    steps = jnp.asarray(_steps(int(np.sqrt(is_open.shape[0]))))
    ahead, beyond = at + steps, jnp.clip(at + 2 * steps, 0, is_open.shape[0] - 1)
    is_push = ahead == box
    can_move = is_open[ahead] & (~is_push | is_open[beyond])
    next_at = jnp.where(can_move, ahead, at)
    return next_at, jnp.where(can_move & is_push, beyond, box)


def _places(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[] each, row * S + column of the player, the box and the target."""
    size = state.tiles.shape[0]
    at = state.player[0] * size + state.player[1]
    box = jnp.argmax(state.boxes.reshape(-1))
    target = jnp.argmax(state.tiles.reshape(-1) == TARGET)
    return tuple(place.astype(jnp.int32) for place in (at, box, target))


def _steps(size: int) -> np.ndarray:
    """int32[4], what each action adds to row * S + column."""
    return (MOVES @ np.array([size, 1])).astype(np.int32)
