"""Sokoban rooms for tests: drawn by hand, taken from batches, played."""

import jax
import numpy as np

from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban.env import State
from ragen_jax.envs.sokoban.types import FLOOR, TARGET, WALL


def one_by_one(states):
    """Each state of a batch by itself."""
    for index in range(len(states.done)):
        yield jax.tree.map(lambda leaf, index=index: leaf[index], states)


def room(*rows):
    """The State of a drawing in the default symbols."""
    drawn = np.array([list(row) for row in rows])
    targets = np.isin(drawn, ["O", "√", "S"])
    tiles = np.where(targets, TARGET, np.where(drawn == "#", WALL, FLOOR))
    (player,) = np.argwhere(np.isin(drawn, ["P", "S"]))
    return State(
        tiles=tiles.astype(np.int32),
        boxes=np.isin(drawn, ["X", "√"]),
        player=player.astype(np.int32),
        done=np.zeros((), bool),
    )


@jax.jit
def play(state, actions):
    """(states, outcomes) after each of the actions, leaves [T, ...]."""

    def one(state, action):
        state, outcome = sokoban.step(jax.random.key(0), state, action)
        return state, (state, outcome)

    return jax.lax.scan(one, state, actions)[1]
