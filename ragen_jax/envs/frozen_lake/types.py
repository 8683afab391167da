"""The settings and the state of FrozenLake."""

import dataclasses

import jax
import numpy as np
from flax import struct

from ragen_jax.envs import grid_text

ICE, HOLE, GOAL = 0, 1, 2  # Tiles.
LEFT, DOWN, RIGHT, UP = 0, 1, 2, 3  # Directions, in Gymnasium's order.
# (row, column) change of each direction. Neighbours in this table are at right angles.
MOVES = np.array([[0, -1], [1, 0], [0, 1], [-1, 0]], np.int32)
MEANINGS = ("you", "ice", "hole", "goal", "you in a hole", "you on the goal")


@dataclasses.dataclass(frozen=True)
class FrozenLake:
    """Settings of one kind of lake."""

    size: int = 4  # S, rows and columns
    # That a tile is ice, not a hole; start and goal are never holes.
    frozen_probability: float = 0.9
    success_probability: float = 0.8  # of moving as intended; else at a right angle
    observation: str = "grid"  # "grid", "coordinates" or "both"
    # Player, ice, hole, goal, player in a hole, player on the goal.
    symbols: tuple[str, ...] = ("P", "_", "O", "G", "X", "√")


@struct.dataclass
class State:
    """One lake and where the player is."""

    tiles: jax.Array  # int32[S, S], each ICE, HOLE or GOAL
    player: jax.Array  # int32[2], (row, column)
    done: jax.Array  # bool[], True once the player stands on a hole or the goal


def check(settings: FrozenLake) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    if settings.size not in range(2, 11):
        raise ValueError(
            f"frozen_lake.size = {settings.size} is not possible: choose a whole number"
            " from 2 to 10"
        )
    for name in ("frozen_probability", "success_probability"):
        if not 0 <= (value := getattr(settings, name)) <= 1:
            raise ValueError(
                f"frozen_lake.{name} = {value} is not a probability: choose 0 to 1"
            )
    # With all other settings at least 1 draw in 350 is solvable and of a given split,
    # even without ice (the goal lies beside the start). But every 2 x 2 lake of the
    # test split has a hole, and without ice it has one lake, as has validation.
    if settings.size == 2 and not 0.05 <= settings.frozen_probability <= 0.95:
        raise ValueError(
            f"frozen_lake.frozen_probability = {settings.frozen_probability} with"
            " frozen_lake.size = 2 leaves the test split too few lakes to draw: choose"
            " 0.05 to 0.95 or a larger size"
        )
    grid_text.check_shown("frozen_lake", settings, MEANINGS)
