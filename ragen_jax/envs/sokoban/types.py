"""The settings and the state of Sokoban."""

import dataclasses

import jax
import numpy as np
from flax import struct

from ragen_jax.envs import grid_text

FLOOR, WALL, TARGET = 0, 1, 2  # Tiles.
# (row, column) change of each action: up, down, left, right.
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)
MEANINGS = (
    "wall",
    "floor",
    "target",
    "box",
    "box on target",
    "you",
    "you on target",
)


@dataclasses.dataclass(frozen=True)
class Sokoban:
    """Settings of one kind of room."""

    size: int = 6  # S, rows and columns, the border of walls included
    boxes: int = 1  # boxes, and as many targets
    search_depth: int = 100  # moves of reverse play for each box; more is harder
    observation: str = "grid"  # "grid", "coordinates" or "both"
    # Wall, floor, target, box, box on target, player, player on target.
    symbols: tuple[str, ...] = ("#", "_", "O", "X", "√", "P", "S")


@struct.dataclass
class State:
    """A room with the places of boxes and player."""

    tiles: jax.Array  # int32[S, S], each FLOOR, WALL or TARGET; the border is wall
    boxes: jax.Array  # bool[S, S], as many as targets, none of them on a wall
    player: jax.Array  # int32[2], (row, column)
    done: jax.Array  # bool[], True once every box is on a target


def check(settings: Sokoban) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    size, boxes = settings.size, settings.boxes
    if size not in range(5, 11):
        raise ValueError(
            f"sokoban.size = {size} is not possible: choose a whole number from 5 to 10"
        )
    # With more boxes, rooms in which each box can be moved are too rare.
    most = min(4, size - 4)
    if boxes not in range(1, most + 1):
        raise ValueError(
            f"sokoban.boxes = {boxes} is not possible with sokoban.size = {size}:"
            f" choose a whole number from 1 to {most}"
        )
    # With several boxes, short reverse play rarely moves each of them off its target.
    least = 1 if boxes == 1 else 30
    if settings.search_depth not in range(least, 10_001):
        raise ValueError(
            f"sokoban.search_depth = {settings.search_depth} is not possible with"
            f" sokoban.boxes = {boxes}: choose a whole number from {least} to 10000"
        )
    grid_text.check_shown("sokoban", settings, MEANINGS)
