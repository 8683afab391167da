"""FrozenLake: cross the ice to the goal, keep out of the holes, and do not trust it.

Rules of Gymnasium's FrozenLake-v1; random start, goal and holes, and the symbols, as
in RAGEN (arXiv:2504.20073, section 3). Every function is on one lake: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, pictures
from ragen_jax.envs.planning import GOAL, HOLE, ICE, MOVES, UNREACHABLE, distances

ACTION_NAMES = ("Left", "Down", "Right", "Up")  # Action a is direction a.
OBSERVATIONS = ("grid", "coordinates", "both")
_MEANINGS = ("you", "ice", "hole", "goal", "you in a hole", "you on the goal")
_END = len(_MEANINGS)  # From a cell's phrase to the one that also ends the row.
# RGB of ice, hole and goal.
_COLOURS = np.array([[222, 240, 250], [40, 80, 130], [240, 190, 190]], np.uint8)


@dataclasses.dataclass(frozen=True)
class FrozenLake:
    """Settings of one kind of lake."""

    size: int = 4  # S, rows and columns
    frozen_probability: float = 0.9  # of each tile but start and goal; else a hole
    success_probability: float = 0.8  # of moving as intended; else at a right angle
    observation: str = "grid"  # one of OBSERVATIONS
    # Player, ice, hole, goal, player in a hole, player on the goal.
    symbols: tuple[str, ...] = ("P", "_", "O", "G", "X", "√")


@struct.dataclass
class State:
    """One lake and where the player is."""

    tiles: jax.Array  # int32[S, S], each ICE, HOLE or GOAL
    player: jax.Array  # int32[2], (row, column)
    done: jax.Array  # bool[], True once the player stands on a hole or the goal


def world(settings: FrozenLake) -> base.World:
    """Binds the settings into a world. Raises ValueError if they make no lake."""
    check(settings)
    return base.World(
        name="frozen_lake",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=_observation_phrases(settings),
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(observe, settings=settings),
        example_actions=("Down", "Right"),
        longest_observation=functools.partial(_longest_observation, settings=settings),
        landmarks=landmarks,
        picture=picture,
        solve=solve,
    )


def check(settings: FrozenLake) -> None:
    """Raises ValueError, in one sentence, unless lakes can be made and shown."""
    if settings.size not in range(2, 11):
        raise ValueError(
            f"frozen_lake.size = {settings.size} is not possible: choose a whole number"
            " from 2 to 10"
        )
    for name in ("frozen_probability", "success_probability"):
        if not 0 <= (value := getattr(settings, name)) <= 1:
            raise ValueError(
                f"frozen_lake.{name} = {value} is no probability: choose 0 to 1"
            )
    # On other settings at least 1 draw in 350 is solvable and of a given split, even
    # without ice (a goal beside the start); on 2 x 2 all test lakes have a hole.
    if settings.size == 2 and settings.frozen_probability > 0.95:
        raise ValueError(
            f"frozen_lake.frozen_probability = {settings.frozen_probability} with"
            " frozen_lake.size = 2 leaves the test split too few lakes to draw: choose"
            " at most 0.95 or a larger size"
        )
    if settings.observation not in OBSERVATIONS:
        raise ValueError(
            f"frozen_lake.observation = {settings.observation!r} is unknown: choose"
            f" one of {', '.join(OBSERVATIONS)}"
        )
    symbols = settings.symbols
    is_usable = len(set(symbols)) == len(symbols) == len(_MEANINGS)
    if not is_usable or any(len(symbol.split()) != 1 for symbol in symbols):
        raise ValueError(
            f"frozen_lake.symbols = {symbols} must be {len(_MEANINGS)} different"
            f" texts without white space, for {', '.join(_MEANINGS)}"
        )


def reset(key: jax.Array, split: jax.Array, settings: FrozenLake) -> State:
    """Draws a solvable lake that belongs to the split.

    Args:
      key: decides the lake.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size and probability of ice.
    """

    def redraw(carry):
        key, _, _ = carry
        key, draw_key = jax.random.split(key)
        state = draw(draw_key, settings)
        content = base.content_hash(state.tiles, state.player)
        is_fit = (base.split_of(content) == split) & is_solvable(state)
        return key, state, is_fit

    nothing = State(
        tiles=jnp.zeros((settings.size, settings.size), jnp.int32),
        player=jnp.zeros((2,), jnp.int32),
        done=jnp.zeros((), bool),
    )
    # Ends: `check` lets pass only settings with a fair share of lakes in every split.
    start = (key, nothing, jnp.zeros((), bool))
    return jax.lax.while_loop(lambda carry: ~carry[2], redraw, start)[1]


def draw(key: jax.Array, settings: FrozenLake) -> State:
    """One random lake, solvable or not: start and goal are any two different tiles."""
    size = settings.size
    ice_key, start_key, goal_key = jax.random.split(key, 3)
    is_ice = jax.random.bernoulli(ice_key, settings.frozen_probability, (size * size,))
    start = jax.random.randint(start_key, (), 0, size * size)
    goal = (start + jax.random.randint(goal_key, (), 1, size * size)) % (size * size)
    tile = jnp.arange(size * size)
    tiles = jnp.where(is_ice | (tile == start), ICE, HOLE)
    tiles = jnp.where(tile == goal, GOAL, tiles).astype(jnp.int32)
    return State(
        tiles=tiles.reshape(size, size),
        player=jnp.stack(jnp.divmod(start, size)).astype(jnp.int32),
        done=jnp.zeros((), bool),
    )


def is_solvable(state: State) -> jax.Array:
    """bool[], whether a path over ice leads from the player to the goal."""
    steps = distances(state.tiles != HOLE, state.player)
    return jnp.where(state.tiles == GOAL, steps, UNREACHABLE).min() < UNREACHABLE


def step(
    key: jax.Array, state: State, action: jax.Array, settings: FrozenLake
) -> tuple[State, base.Outcome]:
    """Tries an action; the ice decides where the player goes.

    Gymnasium's FrozenLake-v1: the intended direction with `success_probability`, each
    direction at a right angle with half of the rest.

    Args:
      key: decides whether, and to which side, the player slips.
      state: one lake; a finished one does not change.
      action: int32[], a direction (index in ACTION_NAMES) or base.NO_ACTION.
      settings: the probability of success.
    """
    success = settings.success_probability
    chance = jax.random.uniform(key)
    turn = jnp.where(chance < success, 0, jnp.where(chance < (1 + success) / 2, 1, 3))
    direction = jnp.where(action == base.NO_ACTION, action, (action + turn) % 4)
    return move(state, direction)


def move(state: State, direction: jax.Array) -> tuple[State, base.Outcome]:
    """Moves the player one tile; a border, base.NO_ACTION or the end leaves it there.

    Args:
      state: one lake.
      direction: int32[], where the player really goes, or base.NO_ACTION.

    Returns:
      The next state and what happened: reward 1 on reaching the goal, else 0. Holes
      and the goal end the game.
    """
    size = state.tiles.shape[0]
    target = jnp.clip(state.player + jnp.asarray(MOVES)[direction], 0, size - 1)
    stays = state.done | (direction == base.NO_ACTION)
    player = jnp.where(stays, state.player, target)
    tile = state.tiles[player[0], player[1]]
    done = state.done | (tile != ICE)
    success = (tile == GOAL) & ~state.done
    outcome = base.Outcome(
        reward=success.astype(jnp.float32), success=success, done=done
    )
    return state.replace(player=player, done=done), outcome


def observe(state: State, settings: FrozenLake) -> jax.Array:
    """int32[M], the lake as indices into `phrases(settings)`; NO_PHRASE fills up."""
    parts = []
    if settings.observation != "coordinates":
        parts.append(_observe_grid(state))
    if settings.observation != "grid":
        # Coordinates come after the grid's phrases, where both are shown.
        first = len(_grid_phrases(settings)) if settings.observation == "both" else 0
        parts.append(_observe_coordinates(state, first))
    return jnp.concatenate(parts).astype(jnp.int32)


def phrases(settings: FrozenLake) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    grid, coordinates = _grid_phrases(settings), _coordinate_phrases(settings)
    return {"grid": grid, "coordinates": coordinates, "both": grid + coordinates}[
        settings.observation
    ]


def instruction(settings: FrozenLake) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    size, success = settings.size, settings.success_probability
    has_grid = settings.observation != "coordinates"
    goal, holes = ("the goal", "the holes")
    symbols = ""
    if has_grid:
        goal, holes = settings.symbols[3], settings.symbols[2]
        pairs = zip(settings.symbols, _MEANINGS, strict=True)
        symbols = f" Symbols: {', '.join(f'{s} {meaning}' for s, meaning in pairs)}."
    ice = "not slippery: every action succeeds."
    if success < 1:
        ice = (
            f"slippery: an action succeeds with probability {100 * success:.4g}%,"
            " otherwise you slip to a side at a right angle."
        )
    return (
        f"You move on a frozen lake of {size} x {size} tiles.{symbols} Places are"
        " (row, column): rows count from 0 at the top, columns from 0 at the left."
        f" Reach {goal}, avoid {holes}. An action moves you one tile; at the border you"
        f" stay. The ice is {ice} Actions: {', '.join(ACTION_NAMES)}."
    )


def landmarks(state: State) -> jax.Array:
    """int32[2, 2], the (row, column) of the player and of the goal."""
    goal = jnp.argmax(state.tiles.reshape(-1) == GOAL)
    goal = jnp.stack(jnp.divmod(goal, state.tiles.shape[0]))
    return jnp.stack([state.player, goal]).astype(jnp.int32)


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the lake from above: P you, X you in a hole, G the goal."""
    texts = np.array(["", "", "G"])[state.tiles]
    row, column = state.player
    texts[row, column] = "X" if state.tiles[row, column] == HOLE else "P"
    return pictures.board(_COLOURS[state.tiles], texts)


def solve(state: State) -> tuple[int, ...]:
    """A shortest way to the goal over ice that never slips; empty where none is."""
    tiles, at = np.asarray(state.tiles), tuple(map(int, state.player))
    if state.done:
        return ()
    ways = {at: ()}
    for place, way in (queue := list(ways.items())):  # Grows while it is read.
        if tiles[place] == GOAL:
            return way
        for direction, (down, right) in enumerate(MOVES.tolist()):
            further = place[0] + down, place[1] + right
            is_inside = min(further) >= 0 and max(further) < len(tiles)
            if is_inside and further not in ways and tiles[further] != HOLE:
                ways[further] = (*way, direction)
                queue.append((further, ways[further]))
    return ()


def _longest_observation(lengths, settings: FrozenLake) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    size, total = settings.size, 0
    if settings.observation != "coordinates":
        grid = len(_grid_phrases(settings))
        inner, ending = lengths[1:grid].reshape(2, _END).max(axis=1)
        total += lengths[0] + size * (size - 1) * inner + size * ending
        lengths = lengths[grid:]
    if settings.observation != "grid":
        labels, none = lengths[:3].sum(), lengths[3]
        listed, ending = lengths[4:].reshape(2, -1).max(axis=1)
        # The player, the goal and the last of at most S * S - 2 holes end a line.
        holes = max(none, (size * size - 3) * listed + ending)
        total += labels + 2 * ending + holes
    return int(total)


def _observation_phrases(settings: FrozenLake) -> int:
    """M. A lake has at most S * S - 2 holes: start and goal are none."""
    tiles = settings.size**2
    grid, coordinates = 1 + tiles, 5 + tiles - 2
    return {"grid": grid, "coordinates": coordinates, "both": grid + coordinates}[
        settings.observation
    ]


def _grid_phrases(settings: FrozenLake) -> tuple[str, ...]:
    """Title, cells, and cells that end a row."""
    inner = tuple(f" {symbol}" for symbol in settings.symbols)
    return ("State:\n", *inner, *(f"{cell}\n" for cell in inner))


def _coordinate_phrases(settings: FrozenLake) -> tuple[str, ...]:
    """Labels, places followed by another, and places that end a line; in row order."""
    size = range(settings.size)
    places = tuple(f" ({row}, {column})" for row in size for column in size)
    return (
        *("Player:", "Goal:", "Holes:", " none\n"),
        *(f"{place}," for place in places),
        *(f"{place}\n" for place in places),
    )


def _observe_grid(state: State) -> jax.Array:
    """int32[1 + S * S], indices into `_grid_phrases`."""
    size = state.tiles.shape[0]
    index = jnp.arange(size)
    is_row, is_column = index == state.player[0], index == state.player[1]
    is_player = is_row[:, None] & is_column[None, :]
    # Symbols in the settings' order: tiles are 1, 2, 3, the player on them 0, 4, 5.
    on_tile = jnp.where(state.tiles == ICE, 0, state.tiles + 3)
    symbol = jnp.where(is_player, on_tile, state.tiles + 1)
    ends_row = jnp.where(index == size - 1, _END, 0)
    cells = 1 + symbol + ends_row[None, :]
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), cells.reshape(-1)])


def _observe_coordinates(state: State, first: int) -> jax.Array:
    """int32[3 + S * S], indices into `_coordinate_phrases`, counted from `first`."""
    size = state.tiles.shape[0]
    tiles = state.tiles.reshape(-1)
    player_label, goal_label, holes_label, none, listed = range(first, first + 5)
    ending = listed + size * size
    player = ending + state.player[0] * size + state.player[1]
    goal = ending + jnp.argmax(tiles == GOAL)
    (holes,) = jnp.nonzero(tiles == HOLE, size=size * size - 2, fill_value=0)
    count = (tiles == HOLE).sum()
    place = jnp.arange(size * size - 2)
    line = jnp.where(place == count - 1, ending, listed) + holes
    line = jnp.where(place < count, line, base.NO_PHRASE)
    line = jnp.where((place == 0) & (count == 0), none, line)
    labelled = [player_label, player, goal_label, goal, holes_label]
    return jnp.concatenate([jnp.stack([jnp.asarray(p) for p in labelled]), line])
