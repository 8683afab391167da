"""Pictures of lakes for reports."""

import numpy as np

from ragen_jax.envs import rendering
from ragen_jax.envs.frozen_lake.types import HOLE, State

# RGB of ice, hole and goal.
_COLOURS = np.array([[222, 240, 250], [40, 80, 130], [240, 190, 190]], np.uint8)


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the lake from above: P you, X you in a hole, G the goal."""
    texts = np.array(["", "", "G"])[state.tiles]
    row, column = state.player
    texts[row, column] = "X" if state.tiles[row, column] == HOLE else "P"
    return rendering.board(_COLOURS[state.tiles], texts)
