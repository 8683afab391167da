"""Sokoban in words: the rules for the prompt, and the room as phrases."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import grid_text
from ragen_jax.envs.sokoban.types import MEANINGS, TARGET, WALL, Sokoban, State

ACTION_NAMES = ("Up", "Down", "Left", "Right")  # Action a moves by MOVES[a].
_WALL, _FLOOR, _TARGET, _BOX, _BOX_ON, _PLAYER, _PLAYER_ON = range(len(MEANINGS))
_LABELS = ("Player:", "Boxes:", "Targets:", "Walls:", " none\n")
_PLAYER_AT, _BOXES_AT, _TARGETS_AT, _WALLS_AT, _NONE = range(len(_LABELS))


def observe(state: State, settings: Sokoban) -> jax.Array:
    """int32[M], the room as indices into `phrases(settings)`, padded with NO_PHRASE."""
    parts = []
    if settings.observation != "coordinates":
        parts.append(grid_text.grid_ids(symbols_of(state), len(MEANINGS)))
    if settings.observation != "grid":
        # Coordinates come after the grid's phrases, where both are shown.
        first = len(_grid(settings)) if settings.observation == "both" else 0
        parts.append(_observe_coordinates(state, first, settings.boxes))
    return jnp.concatenate(parts).astype(jnp.int32)


def phrases(settings: Sokoban) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    return grid_text.board_phrases(settings, _LABELS)


def observation_phrases(settings: Sokoban) -> int:
    """M. Coordinates: 4 labels, the player, boxes, targets, and all possible walls."""
    cells = settings.size**2
    grid = 1 + cells
    coordinates = 5 + 2 * settings.boxes + _most_walls(settings.size, settings.boxes)
    return grid_text.of_shown(settings.observation, grid, coordinates)


def longest_observation(lengths: np.ndarray, settings: Sokoban) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    size, boxes, total = settings.size, settings.boxes, 0
    if settings.observation != "coordinates":
        grid = len(_grid(settings))
        inner, ending = lengths[1:grid].reshape(2, -1).max(axis=1)
        # The border is wall: only inner cells can be anything else.
        wall, wall_ending = lengths[1 + _WALL], lengths[1 + len(MEANINGS) + _WALL]
        border = (2 * (size - 1) + size - 2) * wall + size * wall_ending
        total += lengths[0] + border + (size - 2) ** 2 * inner
        lengths = lengths[grid:]
    if settings.observation != "grid":
        labels, none = lengths[:_NONE].sum(), lengths[_NONE]
        listed, ending = lengths[len(_LABELS) :].reshape(2, -1).max(axis=1)
        walls = max(none, (_most_walls(size, boxes) - 1) * listed + ending)
        total += labels + (2 * boxes - 2) * listed + 3 * ending + walls
    return int(total)


def instruction(settings: Sokoban) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    size, symbols = settings.size, ""
    if settings.observation != "coordinates":
        symbols = f" {legend(settings)}"
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


def legend(settings: Sokoban) -> str:
    """What each symbol of a drawn room means: a sentence of `instruction`."""
    pairs = zip(settings.symbols, MEANINGS, strict=True)
    return f"Symbols: {', '.join(f'{symbol} {meaning}' for symbol, meaning in pairs)}."


def landmarks(state: State, settings: Sokoban) -> jax.Array:
    """int32[1 + 2 * boxes, 2], (row, column) of the player, the boxes, the targets."""
    parts = [state.player[None]]
    for is_there in (state.boxes, state.tiles == TARGET):
        parts.append(jnp.argwhere(is_there, size=settings.boxes))
    return jnp.concatenate(parts).astype(jnp.int32)


def symbols_of(state: State) -> jax.Array:
    """int32[S, S], the index of each cell's symbol in the settings' order."""
    is_player = grid_text.is_at(state.player, state.tiles.shape[0])
    is_target = state.tiles == TARGET
    bare = jnp.where(state.tiles == WALL, _WALL, jnp.where(is_target, _TARGET, _FLOOR))
    box = jnp.where(is_target, _BOX_ON, _BOX)
    player = jnp.where(is_target, _PLAYER_ON, _PLAYER)
    return jnp.where(is_player, player, jnp.where(state.boxes, box, bare))


def _grid(settings: Sokoban) -> tuple[str, ...]:
    return grid_text.grid_phrases(settings.symbols)


def _most_walls(size: int, boxes: int) -> int:
    """The most inner walls: boxes and targets are in different cells at the start."""
    return (size - 2) ** 2 - 2 * boxes


def _observe_coordinates(state: State, first: int, boxes: int) -> jax.Array:
    """int32[M'], indices into labels and places, counted from `first`."""
    size = state.tiles.shape[0]
    listed = first + len(_LABELS)
    index = jnp.arange(size)
    is_inner = (index > 0) & (index < size - 1)
    is_wall = (state.tiles == WALL) & is_inner[:, None] & is_inner[None]
    walls = grid_text.place_line(is_wall, _most_walls(size, boxes), listed)
    walls = walls.at[0].set(jnp.where(is_wall.any(), walls[0], first + _NONE))
    player = listed + size * size + state.player[0] * size + state.player[1]
    parts = [
        jnp.stack([jnp.int32(first + _PLAYER_AT), player]),
        jnp.array([first + _BOXES_AT]),
        grid_text.place_line(state.boxes, boxes, listed),
        jnp.array([first + _TARGETS_AT]),
        grid_text.place_line(state.tiles == TARGET, boxes, listed),
        jnp.array([first + _WALLS_AT]),
        walls,
    ]
    return jnp.concatenate(parts)
