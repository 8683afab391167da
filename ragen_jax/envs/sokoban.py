"""Sokoban: push every box onto a target, and mind the walls: a box cannot be pulled.

Rules and rewards of gym-sokoban 0.0.6, whose four push actions are the actions here;
symbols as in RAGEN (arXiv:2504.20073, section 3). Every function is on one level:
`vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, pictures, sokoban_levels, sokoban_solver
from ragen_jax.envs.sokoban_levels import MOVES, TARGET, WALL

ACTION_NAMES = ("Up", "Down", "Left", "Right")  # Action a moves by MOVES[a].
OBSERVATIONS = ("grid", "coordinates", "both")
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
_MEANINGS = (
    "wall",
    "floor",
    "target",
    "box",
    "box on target",
    "you",
    "you on target",
)
_WALL, _FLOOR, _TARGET, _BOX, _BOX_ON, _PLAYER, _PLAYER_ON = range(7)
_END = len(_MEANINGS)  # From a cell's phrase to the one that also ends the row.
# RGB of each symbol's cell, and what a picture writes in it.
_COLOURS = np.array(
    [
        [90, 90, 90],
        [240, 235, 220],
        [250, 205, 205],
        [200, 150, 90],
        [130, 190, 110],
        [240, 235, 220],
        [250, 205, 205],
    ],
    np.uint8,
)
_TEXTS = np.array(["", "", "O", "X", "ok", "P", "S"])


@dataclasses.dataclass(frozen=True)
class Sokoban:
    """Settings of one kind of room."""

    size: int = 6  # S, rows and columns, the border of walls included
    boxes: int = 1  # and as many targets
    search_depth: int = 100  # moves of reverse play for each box: more, harder levels
    observation: str = "grid"  # one of OBSERVATIONS
    # Wall, floor, target, box, box on target, player, player on target.
    symbols: tuple[str, ...] = ("#", "_", "O", "X", "√", "P", "S")


@struct.dataclass
class State:
    """One room and where boxes and player are."""

    tiles: jax.Array  # int32[S, S], each FLOOR, WALL or TARGET; the border is wall
    boxes: jax.Array  # bool[S, S], as many as targets, none of them on a wall
    player: jax.Array  # int32[2], (row, column)
    done: jax.Array  # bool[], True once every box is on a target


def world(settings: Sokoban) -> base.World:
    """Binds the settings into a world. Raises ValueError if they make no rooms."""
    check(settings)
    return base.World(
        name="sokoban",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=_observation_phrases(settings),
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=step,
        observe=functools.partial(observe, settings=settings),
        example_actions=("Up", "Left"),
        longest_observation=functools.partial(_longest_observation, settings=settings),
        landmarks=functools.partial(landmarks, settings=settings),
        picture=picture,
        solve=solve,
    )


def check(settings: Sokoban) -> None:
    """Raises ValueError, in one sentence, unless rooms can be made and shown."""
    size, boxes = settings.size, settings.boxes
    if size not in range(5, 11):
        raise ValueError(
            f"sokoban.size = {size} is not possible: choose a whole number from 5 to 10"
        )
    # A room with more boxes is too rarely one in which each of them can be moved.
    most = min(4, size - 4)
    if boxes not in range(1, most + 1):
        raise ValueError(
            f"sokoban.boxes = {boxes} is not possible with sokoban.size = {size}:"
            f" choose a whole number from 1 to {most}"
        )
    # With several boxes a short play rarely moves each of them off its target.
    least = 1 if boxes == 1 else 30
    if settings.search_depth not in range(least, 10_001):
        raise ValueError(
            f"sokoban.search_depth = {settings.search_depth} is not possible with"
            f" sokoban.boxes = {boxes}: choose a whole number from {least} to 10000"
        )
    if settings.observation not in OBSERVATIONS:
        raise ValueError(
            f"sokoban.observation = {settings.observation!r} is unknown: choose one of"
            f" {', '.join(OBSERVATIONS)}"
        )
    symbols = settings.symbols
    is_usable = len(set(symbols)) == len(symbols) == len(_MEANINGS)
    if not is_usable or any(len(symbol.split()) != 1 for symbol in symbols):
        raise ValueError(
            f"sokoban.symbols = {symbols} must be {len(_MEANINGS)} different texts"
            f" without white space, for {', '.join(_MEANINGS)}"
        )


def reset(key: jax.Array, split: jax.Array, settings: Sokoban) -> State:
    """Draws a level that can be solved, is not solved, and belongs to the split.

    Args:
      key: decides the level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size, boxes and how hard levels are.
    """
    level = sokoban_levels.draw(
        key,
        split,
        size=settings.size,
        boxes=settings.boxes,
        search_depth=settings.search_depth,
    )
    return State(
        tiles=level.tiles,
        boxes=level.boxes,
        player=level.player,
        done=jnp.zeros((), bool),
    )


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, base.Outcome]:
    """Moves the player, and the box ahead if the cell behind it is free.

    gym-sokoban's `_push` and `_calc_reward`: every action costs 0.1, a box that comes
    onto a target earns 1, one that leaves a target loses 1 (from one target onto
    another: 0), the last box in place earns 10 more. A move that cannot be made leaves
    all as it is, and costs 0.1 too.

    Args:
      key: not used, for nothing here is chance.
      state: one game; a finished one does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
    """
    del key
    size = state.tiles.shape[0]
    change = jnp.asarray(MOVES)[action]
    # Behind the border is only more border: what is clipped is never free.
    ahead = jnp.clip(state.player + change, 0, size - 1)
    beyond = jnp.clip(ahead + change, 0, size - 1)
    place, further = ahead[0] * size + ahead[1], beyond[0] * size + beyond[1]
    tiles, boxes = state.tiles.reshape(-1), state.boxes.reshape(-1)
    is_box = boxes[place]
    can_push = is_box & (tiles[further] != WALL) & ~boxes[further]
    is_idle = state.done | (action == base.NO_ACTION)
    can_move = (tiles[place] != WALL) & (~is_box | can_push) & ~is_idle
    is_pushed = can_push & can_move

    cell = jnp.arange(size * size)
    pushed = jnp.where(cell == place, False, boxes | (cell == further))
    boxes = jnp.where(is_pushed, pushed, boxes)
    is_solved = ~(boxes & (tiles != TARGET)).any() & ~is_idle
    gained = (tiles[further] == TARGET).astype(jnp.float32) - (tiles[place] == TARGET)
    reward = STEP_REWARD + BOX_REWARD * jnp.where(is_pushed, gained, 0.0)
    reward += SOLVED_REWARD * is_solved
    done = state.done | is_solved
    outcome = base.Outcome(
        reward=jnp.where(is_idle, 0.0, reward), success=is_solved, done=done
    )
    state = state.replace(
        boxes=boxes.reshape(size, size),
        player=jnp.where(can_move, ahead, state.player),
        done=done,
    )
    return state, outcome


def observe(state: State, settings: Sokoban) -> jax.Array:
    """int32[M], the room as indices into `phrases(settings)`; NO_PHRASE fills up."""
    parts = []
    if settings.observation != "coordinates":
        parts.append(_observe_grid(state))
    if settings.observation != "grid":
        # Coordinates come after the grid's phrases, where both are shown.
        first = len(_grid_phrases(settings)) if settings.observation == "both" else 0
        parts.append(_observe_coordinates(state, first, settings.boxes))
    return jnp.concatenate(parts).astype(jnp.int32)


def phrases(settings: Sokoban) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    grid, coordinates = _grid_phrases(settings), _coordinate_phrases(settings)
    return {"grid": grid, "coordinates": coordinates, "both": grid + coordinates}[
        settings.observation
    ]


def instruction(settings: Sokoban) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    size, symbols = settings.size, ""
    if settings.observation != "coordinates":
        pairs = zip(settings.symbols, _MEANINGS, strict=True)
        symbols = f" Symbols: {', '.join(f'{s} {meaning}' for s, meaning in pairs)}."
    if settings.observation != "grid":
        symbols += " The border is wall; Walls lists the others."
    goal = "the box onto the target"
    if settings.boxes > 1:
        goal = f"each of the {settings.boxes} boxes onto a target"
    return (
        f"You are in a room of {size} x {size} cells.{symbols} Places are (row,"
        " column): rows count from 0 at the top, columns from 0 at the left. Push"
        f" {goal}. An action moves you one cell; a box ahead is pushed on if the cell"
        " behind it is free. You cannot pull a box or push two at once. A box against a"
        f" wall may be stuck for good. Actions: {', '.join(ACTION_NAMES)}."
    )


def landmarks(state: State, settings: Sokoban) -> jax.Array:
    """int32[1 + 2 * boxes, 2], (row, column) of the player, the boxes, the targets."""
    parts = [state.player[None]]
    for is_there in (state.boxes, state.tiles == TARGET):
        parts.append(jnp.argwhere(is_there, size=settings.boxes))
    return jnp.concatenate(parts).astype(jnp.int32)


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the room from above, with ASCII letters for the symbols."""
    symbols = np.asarray(_symbols_of(state))
    return pictures.board(_COLOURS[symbols], _TEXTS[symbols])


def solve(state: State) -> tuple[int, ...]:
    """A shortest solution; empty where there is none, or nothing left to do."""
    found = sokoban_solver.shortest_solution(state.tiles, state.boxes, state.player)
    return found or ()


def _longest_observation(lengths, settings: Sokoban) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    size, boxes, total = settings.size, settings.boxes, 0
    if settings.observation != "coordinates":
        grid = len(_grid_phrases(settings))
        inner, ending = lengths[1:grid].reshape(2, _END).max(axis=1)
        # The border is wall: only inner cells can be anything else.
        wall, wall_ending = lengths[1 + _WALL], lengths[1 + _END + _WALL]
        border = (2 * (size - 1) + size - 2) * wall + size * wall_ending
        total += lengths[0] + border + (size - 2) ** 2 * inner
        lengths = lengths[grid:]
    if settings.observation != "grid":
        labels, none = lengths[:4].sum(), lengths[4]
        listed, ending = lengths[5:].reshape(2, -1).max(axis=1)
        walls = max(none, (_most_walls(settings) - 1) * listed + ending)
        total += labels + (2 * boxes - 2) * listed + 3 * ending + walls
    return int(total)


def _observation_phrases(settings: Sokoban) -> int:
    """M."""
    cells = settings.size**2
    grid = 1 + cells
    coordinates = 5 + 2 * settings.boxes + _most_walls(settings)
    return {"grid": grid, "coordinates": coordinates, "both": grid + coordinates}[
        settings.observation
    ]


def _most_walls(settings: Sokoban) -> int:
    """Inner walls at most: boxes and targets lie apart when a level begins."""
    return (settings.size - 2) ** 2 - 2 * settings.boxes


def _grid_phrases(settings: Sokoban) -> tuple[str, ...]:
    """Title, cells, and cells that end a row."""
    inner = tuple(f" {symbol}" for symbol in settings.symbols)
    return ("State:\n", *inner, *(f"{cell}\n" for cell in inner))


def _coordinate_phrases(settings: Sokoban) -> tuple[str, ...]:
    """Labels, places followed by another, and places that end a line; in row order."""
    size = range(settings.size)
    places = tuple(f" ({row}, {column})" for row in size for column in size)
    return (
        *("Player:", "Boxes:", "Targets:", "Walls:", " none\n"),
        *(f"{place}," for place in places),
        *(f"{place}\n" for place in places),
    )


def _symbols_of(state: State) -> jax.Array:
    """int32[S, S], the index of each cell's symbol in the settings' order."""
    index = jnp.arange(state.tiles.shape[0])
    is_row, is_column = index == state.player[0], index == state.player[1]
    is_player = is_row[:, None] & is_column[None]
    is_target = state.tiles == TARGET
    bare = jnp.where(state.tiles == WALL, _WALL, jnp.where(is_target, _TARGET, _FLOOR))
    box = jnp.where(is_target, _BOX_ON, _BOX)
    player = jnp.where(is_target, _PLAYER_ON, _PLAYER)
    return jnp.where(is_player, player, jnp.where(state.boxes, box, bare))


def _observe_grid(state: State) -> jax.Array:
    """int32[1 + S * S], indices into `_grid_phrases`."""
    size = state.tiles.shape[0]
    ends_row = jnp.where(jnp.arange(size) == size - 1, _END, 0)
    cells = 1 + _symbols_of(state) + ends_row[None]
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), cells.reshape(-1)])


def _observe_coordinates(state: State, first: int, boxes: int) -> jax.Array:
    """int32[M'], indices into `_coordinate_phrases`, counted from `first`."""
    size = state.tiles.shape[0]
    player_label, box_label, target_label, wall_label, none, listed = range(
        first, first + 6
    )
    ending = listed + size * size

    def line(is_there: jax.Array, most: int) -> jax.Array:
        """int32[most], the places; the last of them ends the line."""
        cells, count = is_there.reshape(-1), is_there.sum()
        (places,) = jnp.nonzero(cells, size=most, fill_value=0)
        place = jnp.arange(most)
        ids = jnp.where(place == count - 1, ending, listed) + places
        return jnp.where(place < count, ids, base.NO_PHRASE)

    index = jnp.arange(size)
    is_inner = (index > 0) & (index < size - 1)
    is_wall = (state.tiles == WALL) & is_inner[:, None] & is_inner[None]
    walls = line(is_wall, (size - 2) ** 2 - 2 * boxes)
    walls = walls.at[0].set(jnp.where(is_wall.any(), walls[0], none))
    player = ending + state.player[0] * size + state.player[1]
    targets = line(state.tiles == TARGET, boxes)
    head = [jnp.stack([jnp.int32(player_label), player, jnp.int32(box_label)])]
    labels = [jnp.array([label]) for label in (target_label, wall_label)]
    parts = [*head, line(state.boxes, boxes), labels[0], targets, labels[1], walls]
    return jnp.concatenate(parts)
