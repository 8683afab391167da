"""FrozenLake in words: the rules for the prompt, and the lake as phrases."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import grid_text
from ragen_jax.envs.frozen_lake.types import (
    GOAL,
    HOLE,
    ICE,
    MEANINGS,
    FrozenLake,
    State,
)

ACTION_NAMES = ("Left", "Down", "Right", "Up")  # Action a is direction a.
_LABELS = ("Player:", "Goal:", "Holes:", " none\n")
_PLAYER, _GOAL, _HOLES, _NONE = range(len(_LABELS))


def observe(state: State, settings: FrozenLake) -> jax.Array:
    """int32[M], the lake as indices into `phrases(settings)`, padded with NO_PHRASE."""
    parts = []
    if settings.observation != "coordinates":
        parts.append(grid_text.grid_ids(_symbols_of(state), len(MEANINGS)))
    if settings.observation != "grid":
        # Coordinates come after the grid's phrases, where both are shown.
        first = len(_grid(settings)) if settings.observation == "both" else 0
        parts.append(_observe_coordinates(state, first))
    return jnp.concatenate(parts).astype(jnp.int32)


def phrases(settings: FrozenLake) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    return grid_text.board_phrases(settings, _LABELS)


def observation_phrases(settings: FrozenLake) -> int:
    """M. A lake has at most S * S - 2 holes, as start and goal are not holes."""
    tiles = settings.size**2
    grid, coordinates = 1 + tiles, 5 + tiles - 2
    return grid_text.of_shown(settings.observation, grid, coordinates)


def longest_observation(lengths: np.ndarray, settings: FrozenLake) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    size, total = settings.size, 0
    if settings.observation != "coordinates":
        grid = len(_grid(settings))
        total += grid_text.longest_grid(lengths[:grid], size)
        lengths = lengths[grid:]
    if settings.observation != "grid":
        labels, none = lengths[:_NONE].sum(), lengths[_NONE]
        listed, ending = lengths[len(_LABELS) :].reshape(2, -1).max(axis=1)
        # The player, the goal and the last of at most S * S - 2 holes end a line.
        holes = max(none, (size * size - 3) * listed + ending)
        total += labels + 2 * ending + holes
    return int(total)


def instruction(settings: FrozenLake) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    size, success = settings.size, settings.success_probability
    has_grid = settings.observation != "coordinates"
    goal, holes = ("the goal", "the holes")
    symbols = ""
    if has_grid:
        goal, holes = settings.symbols[3], settings.symbols[2]
        pairs = zip(settings.symbols, MEANINGS, strict=True)
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


def _grid(settings: FrozenLake) -> tuple[str, ...]:
    return grid_text.grid_phrases(settings.symbols)


def _symbols_of(state: State) -> jax.Array:
    """int32[S, S], the index of each cell's symbol in the settings' order."""
    is_player = grid_text.is_at(state.player, state.tiles.shape[0])
    # Symbols in the settings' order: tiles are 1, 2, 3, the player on them 0, 4, 5.
    on_tile = jnp.where(state.tiles == ICE, 0, state.tiles + 3)
    return jnp.where(is_player, on_tile, state.tiles + 1)


def _observe_coordinates(state: State, first: int) -> jax.Array:
    """int32[3 + S * S], indices into labels and places, counted from `first`."""
    size = state.tiles.shape[0]
    listed = first + len(_LABELS)
    ending = listed + size * size
    player = ending + state.player[0] * size + state.player[1]
    goal = ending + jnp.argmax(state.tiles.reshape(-1) == GOAL)
    is_hole = state.tiles == HOLE
    holes = grid_text.place_line(is_hole, size * size - 2, listed)
    holes = holes.at[0].set(jnp.where(is_hole.any(), holes[0], first + _NONE))
    labelled = [first + _PLAYER, player, first + _GOAL, goal, first + _HOLES]
    head = jnp.stack([jnp.asarray(phrase, jnp.int32) for phrase in labelled])
    return jnp.concatenate([head, holes])
