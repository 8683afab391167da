"""Pictures of rooms for reports."""

import numpy as np

from ragen_jax.envs import rendering
from ragen_jax.envs.sokoban.texts import symbols_of
from ragen_jax.envs.sokoban.types import State

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


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the room from above, with ASCII letters for the symbols."""
    symbols = np.asarray(symbols_of(state))
    return rendering.board(_COLOURS[symbols], _TEXTS[symbols])
