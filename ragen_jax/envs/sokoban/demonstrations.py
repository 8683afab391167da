"""Imperfect demonstrations for Sokoban, for the supervised start of small models.

The thought names where the player, the box and the target are, then each action of a
plan with the player's cell after it. Places are read correctly, but plans are only
sensible: some push the box without regard to the target, some actions are random, and a
share of plans is all random. With two boxes a plan names one of them and its target,
and treats the other as a wall.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import walks
from ragen_jax.envs.base import NO_ACTION, Environment
from ragen_jax.envs.sokoban import distances, texts
from ragen_jax.envs.sokoban.distances import UNSOLVABLE
from ragen_jax.envs.sokoban.types import MOVES, TARGET, WALL, Sokoban, State

_LANDMARKS = (", box", ", target")


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How imperfect the demonstrations are."""

    ignore_target: float = 0.3  # share of plans that push the box anywhere
    random_plan: float = 0.0  # share of plans that ignore the box: all actions random
    noise: float = 0.1  # share of actions drawn at random in the other plans
    longest: int = 5  # actions in a plan at most; lengths up to it are equally likely
    midway: int = 0  # most actions of a plan that are played before the room is shown
    # Share of plans that ignore walls and the other box, in the rooms where it is
    # largest. Each room has a share of its own, on average two thirds of this.
    misread: float = 0.0


def with_demonstrations(
    env: Environment, settings: Sokoban, player: Demonstrator, *, thinking: bool
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in.

    Raises:
      ValueError: for more than two boxes, as their order is not planned.
    """
    if settings.boxes > 2:
        raise ValueError(
            f"sokoban.boxes = {settings.boxes} has no demonstrations, whose plans know"
            " two boxes at most: choose 1 or 2"
        )
    if player.midway:
        reset = functools.partial(
            _reset_midway, env=env, player=player, boxes=settings.boxes
        )
        env = dataclasses.replace(env, reset=reset)
    return dataclasses.replace(
        env,
        reply_phrases=walks.walk_phrases(_LANDMARKS, settings.size, env.action_names),
        demonstrate=functools.partial(
            _demonstrate, player=player, boxes=settings.boxes, thinking=thinking
        ),
    )


def _demonstrate(
    key: jax.Array, state: State, player: Demonstrator, boxes: int, thinking: bool
) -> jax.Array:
    """int32[Md], one reply as phrase ids, without the end-of-turn token."""
    task = next_task(state, boxes)
    if player.misread:
        misread_key, key = jax.random.split(key)
        task = _misread(misread_key, state, task, player.misread)
    actions, cells, random_plan = plan(key, state, task, player)
    at, landmarks = _player_at(state), (task.box, task.target)
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


def _reset_midway(
    key: jax.Array,
    split: jax.Array,
    *,
    env: Environment,
    player: Demonstrator,
    boxes: int,
) -> State:
    """A room in which a plan has been carried out, unless that solves it."""
    start = env.reset(key, split)  # The level is the same as without `midway`.
    key = jax.random.fold_in(key, 5)  # `reset` splits it into at most 5.
    player = dataclasses.replace(player, longest=player.midway)
    actions, _, _ = plan(key, start, next_task(start, boxes), player)

    def act(state, action):
        return env.step(key, state, jnp.where(action < 0, NO_ACTION, action))[0], None

    state, _ = jax.lax.scan(act, start, actions)
    return jax.tree.map(lambda a, b: jnp.where(state.done, a, b), start, state)


class Task(NamedTuple):
    """A box to push, and where to."""

    box: jax.Array  # int32[], row * S + column
    target: jax.Array  # int32[], the same
    is_open: jax.Array  # bool[S * S], no wall and no other box
    left: distances.Distances  # to the target, with the other box as a wall


class Pairs(NamedTuple):
    """The four ways to go on with two boxes: the one to push first, and its target."""

    box: jax.Array  # int32[4], row * S + column: box 0, 0, 1, 1
    target: jax.Array  # int32[4], row * S + column: target 0, 1, 0, 1
    cost: jax.Array  # int32[4], about how many actions are left; >= UNSOLVABLE: no way
    is_open: jax.Array  # bool[4, S * S], no wall and no other box
    left: distances.Distances  # to the target, with the other box as a wall


def next_task(state: State, boxes: int) -> Task:
    """The box to push next: the only one, or the first on the shortest way to solve.

    If no order of the two boxes solves the room, the plan is like those in rooms that
    cannot be solved.

    Args:
      state: with 1 or 2 boxes, of an episode that is not over.
      boxes: how many there are.
    """
    is_open = state.tiles != WALL
    places = jnp.argwhere(state.boxes, size=boxes).astype(jnp.int32)
    targets = jnp.argwhere(state.tiles == TARGET, size=boxes).astype(jnp.int32)
    size = state.tiles.shape[0]
    places, targets = places @ jnp.array([size, 1]), targets @ jnp.array([size, 1])
    if boxes == 1:
        left = distances.measure(is_open, targets[0])
        return Task(places[0], targets[0], is_open.reshape(-1), left)
    pairings = pairs(is_open, _player_at(state), places, targets)
    best = jnp.argmin(pairings.cost)
    left = jax.tree.map(lambda leaf: leaf[best], pairings.left)
    return Task(pairings.box[best], pairings.target[best], pairings.is_open[best], left)


def pairs(
    is_open: jax.Array, player: jax.Array, boxes: jax.Array, targets: jax.Array
) -> Pairs:
    """The cost of pushing either of two boxes to either target, and then the other box.

    While one box is pushed, the other is a wall, before and after it. A few rooms can
    be solved only in another way.

    Args:
      is_open: bool[S, S], no wall.
      player: int32[], row * S + column.
      boxes, targets: int32[2], row * S + column.
    """
    size = is_open.shape[0]
    first, goal = jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 0, 1])
    box, other, target, rest = (
        boxes[first],
        boxes[1 - first],
        targets[goal],
        targets[1 - goal],
    )
    without = jax.vmap(lambda cell: is_open.reshape(-1).at[cell].set(False))
    square = lambda cells: cells.reshape(-1, size, size)
    opens = without(other)
    before = jax.vmap(distances.measure)(square(opens), target)
    # Then the other box goes to the other target, with the first target as a wall.
    after = jax.vmap(distances.measure)(square(without(targets)), targets[::-1])
    after = jax.tree.map(lambda leaf: leaf[goal], after)
    count = jax.vmap(distances.actions_left)
    cost_of_first = count(before, jnp.broadcast_to(player, (4,)), box)
    # The last push of the first box leaves the player beside its target.
    beside = target[:, None] + jnp.asarray(_steps(size))[None]
    cost_of_second = jax.vmap(lambda a, p, b: distances.actions_left(a, p, b).min())(
        after, beside, jnp.broadcast_to(other[:, None], (4, 4))
    )
    cost = cost_of_first + jnp.where(other == rest, 0, cost_of_second)
    cost = jnp.where(box == target, 4 * UNSOLVABLE, cost)  # Nothing to push.
    return Pairs(box, target, cost, opens, before)


def _misread(key: jax.Array, state: State, task: Task, most: float) -> Task:
    """`task`, or what it would be if nothing but the border were in the way.

    How often a room is misread is a fixed property of it: after a plan that runs into a
    wall, the next one in the same room is likely to do so too.

    Args:
      key: consumed.
      state: of the room.
      task: read correctly.
      most: share of plans, 0 to 1, that misread the room which is misread most; the
        mean over rooms is two thirds of it.
    """
    size = state.tiles.shape[0]
    # A hash of the walls and targets, which decides the room's share.
    factors = np.random.default_rng(0).integers(
        2**32, size=size * size, dtype=np.uint32
    )
    room = (state.tiles.reshape(-1).astype(jnp.uint32) * factors).sum(dtype=jnp.uint32)
    # The square root of a uniform number has the mean 2 / 3.
    share_key = jax.random.fold_in(jax.random.key(0), room)
    share = most * jnp.sqrt(jax.random.uniform(share_key))
    is_misread = jax.random.bernoulli(key, share)
    is_inside = jnp.zeros((size, size), bool).at[1:-1, 1:-1].set(True)
    left = distances.measure(is_inside, task.target)
    misread_task = task._replace(is_open=is_inside.reshape(-1), left=left)
    return jax.tree.map(lambda a, b: jnp.where(is_misread, a, b), misread_task, task)


def plan(
    key: jax.Array, state: State, task: Task, player: Demonstrator
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A plan of at least one action.

    Args:
      key: consumed.
      state: of an episode that is not over.
      task: the box to push.
      player: how imperfect the plan is.

    Returns:
      int32[longest], the actions; int32[longest], the player's cell (row * S + column)
      after each; both padded with -1. bool[], whether the plan is one of random
      actions.
    """
    ignore_target_key, random_plan_key, length_key, key = jax.random.split(key, 4)
    random_plan = jax.random.bernoulli(random_plan_key, player.random_plan)
    noise = jnp.where(random_plan, 1.0, player.noise)
    ignore_target = jax.random.bernoulli(ignore_target_key, player.ignore_target)
    length = jax.random.randint(length_key, (), 1, player.longest + 1)
    size = state.tiles.shape[0]
    is_wall = (state.tiles == WALL).reshape(-1)

    def choose_action(carry, key):
        at, box, over, step = carry
        choice_key, noise_key, random_key = jax.random.split(key, 3)
        next_at, next_box = after(at, box, task.is_open)
        # Plans that ignore the target approach the box and push on.
        ahead = at + jnp.asarray(_steps(size))
        rows, columns = ahead // size - box // size, ahead % size - box % size
        cost = jnp.where(
            ignore_target,
            jnp.abs(rows) + jnp.abs(columns),
            distances.actions_left(task.left, next_at, next_box),
        )
        cost = jnp.where(next_at == at, 2 * UNSOLVABLE, cost)
        # Among equally good actions each is equally likely.
        best = jnp.argmin(cost + jax.random.uniform(choice_key, cost.shape))
        random = jax.random.randint(random_key, (), 0, len(MOVES))
        is_random = jax.random.bernoulli(noise_key, noise)
        # No random push of the other box, whose place the plan does not track.
        is_random &= task.is_open[ahead[random]] | is_wall[ahead[random]]
        action = jnp.where(is_random, random, best)
        now_over = over | (step >= length)
        entry = jnp.where(now_over, -1, jnp.stack([action, next_at[action]]))
        at = jnp.where(now_over, at, next_at[action])
        box = jnp.where(now_over, box, next_box[action])
        return (at, box, now_over | (box == task.target), step + 1), entry

    carry = (
        _player_at(state),
        task.box,
        jnp.zeros((), bool),
        jnp.zeros((), jnp.int32),
    )
    _, entry = jax.lax.scan(choose_action, carry, jax.random.split(key, player.longest))
    return entry[:, 0], entry[:, 1], random_plan


def after(
    at: jax.Array, box: jax.Array, is_open: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[4] each, the cells of player and box after each of the four actions.

    Args:
      at, box: int32[], row * S + column.
      is_open: bool[S * S], where both may go.
    """
    steps = jnp.asarray(_steps(int(np.sqrt(is_open.shape[0]))))
    ahead, beyond = at + steps, jnp.clip(at + 2 * steps, 0, is_open.shape[0] - 1)
    is_push = ahead == box
    can_move = is_open[ahead] & (~is_push | is_open[beyond])
    next_at = jnp.where(can_move, ahead, at)
    return next_at, jnp.where(can_move & is_push, beyond, box)


def _player_at(state: State) -> jax.Array:
    """int32[], row * S + column of the player."""
    return state.player @ jnp.array([state.tiles.shape[0], 1])


def _steps(size: int) -> np.ndarray:
    """int32[4], what each action adds to row * S + column."""
    return (MOVES @ np.array([size, 1])).astype(np.int32)
