"""Other libraries' versions of our environments, to compare speeds. All are optional.

  pip install gymnasium gymnax jumanji
  pip install --no-deps gym-sokoban gym==0.26.2 gym-notices

Resets are not measured where a library makes no new levels without a download:
Jumanji's Sokoban comes with two rooms, gymnax's FrozenLake has one fixed lake.
"""

import contextlib
import io
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.benchmarks.environments import (
    STEPS,
    EnvFunctions,
    Speed,
    reset_rate,
    step_rate,
)

_SECONDS = 2.0  # for which a peer written in Python is timed


def others(name: str, options: dict[str, Any], batch: int) -> Iterator[Speed]:
    """The speeds of those peers of an environment that are installed.

    Args:
      name: of one of our environments.
      options: its settings, as in `environments.KINDS`.
      batch: games in parallel, for peers in JAX; those in Python play one.
    """
    for only, measure in _OTHERS.get(name, ()):
        if all(options.get(key) == value for key, value in only.items()):
            with contextlib.suppress(ImportError):
                yield measure(options, batch)


# In Python ---------------------------------------------------------------------------


def _gymnasium_lake(options: dict[str, Any], batch: int) -> Speed:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

    lake = FrozenLakeEnv(is_slippery=True)
    lake.reset(seed=0)
    rng = random.Random(0)

    def step() -> None:
        if lake.step(rng.randrange(4))[2]:
            lake.reset()

    def draw() -> None:
        FrozenLakeEnv(desc=generate_random_map(size=4, p=0.9)).reset()

    return Speed("gymnasium FrozenLake", _rate(step), _rate(draw))


def _gym_sokoban(options: dict[str, Any], batch: int) -> Speed:
    with _quietly():
        import numpy as np
        from gym_sokoban.envs.room_utils import generate_room
        from gym_sokoban.envs.sokoban_env import SokobanEnv

    size, boxes = options.get("size", 6), options.get("boxes", 1)
    symbols = np.array(list("#_O√XP"))

    class TextSokoban(SokobanEnv):
        """Shows the room as text, as RAGEN does, instead of drawing pixels."""

        def render(self, mode: str = "text", **_: Any) -> str:
            return "\n".join(map(" ".join, symbols[self.room_state.astype(int)]))

    def draw():
        while True:  # It raises this warning if it fails to make a room.
            with contextlib.suppress(RuntimeWarning):
                dim = (size, size)
                return generate_room(
                    dim, num_steps=int(1.7 * 2 * size), num_boxes=boxes
                )

    class Room(TextSokoban):
        def reset(self, **_: Any) -> str:
            self.room_fixed, self.room_state, self.box_mapping = draw()
            self.player_position = np.argwhere(self.room_state == 5)[0]
            self.num_env_steps = self.reward_last = self.boxes_on_target = 0
            return self.render()

    with _quietly():
        room = Room(dim_room=(size, size), max_steps=10**9, num_boxes=boxes)
        rng = random.Random(0)
        start = room.room_state.copy(), room.player_position.copy()

        def step() -> None:
            if room.step(rng.randint(1, 4))[2]:
                room.room_state, room.player_position = (part.copy() for part in start)
                room.boxes_on_target = 0

        return Speed("gym-sokoban, as text", _rate(step), _rate(draw))


def _rate(call: Callable[[], Any]) -> float:
    """Calls a second, after one that is not counted."""
    call()
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < _SECONDS:
        call()
        count += 1
    return count / passed


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses gym's output, which advises to use Gymnasium instead."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.getLogger("gym").setLevel(logging.ERROR)
        yield


# In JAX ------------------------------------------------------------------------------


def _gymnax(label: str, name: str, has_levels: bool):
    """A function that measures an environment of gymnax, for `_OTHERS`.

    `has_levels`: whether resets make new levels, and are measured.
    """

    def measure(options: dict[str, Any], batch: int) -> Speed:
        import gymnax

        env, parameters = gymnax.make(name)

        def step(key, state, action):
            _, state, reward, done, _ = env.step_env(key, state, action, parameters)
            return state, reward, done

        functions = EnvFunctions(
            reset=lambda key: env.reset_env(key, parameters)[1],
            step=step,
            sample=lambda key: jax.random.randint(key, (), 0, env.num_actions),
        )
        return _in_jax(label, functions, batch, has_levels)

    return measure


def _jumanji(label: str, make: Callable[[], Any], has_levels: bool):
    """A function that measures an environment of Jumanji; see `_gymnax`."""

    def measure(options: dict[str, Any], batch: int) -> Speed:
        env = make()
        limits = jnp.asarray(getattr(env.action_spec, "num_values", 0), jnp.int32)

        def step(key, state, action):
            state, timestep = env.step(state, action)
            return state, timestep.reward, timestep.last()

        functions = EnvFunctions(
            reset=lambda key: env.reset(key)[0],
            step=step,
            sample=lambda key: jax.random.randint(key, limits.shape, 0, limits),
        )
        return _in_jax(label, functions, batch, has_levels)

    return measure


def _in_jax(label: str, functions: EnvFunctions, batch: int, has_levels: bool) -> Speed:
    resets = reset_rate(functions, batch=batch) if has_levels else None
    return Speed(label, step_rate(functions, batch=batch, steps=STEPS), resets)


def _jumanji_2048():
    from jumanji.environments import Game2048

    return Game2048()


def _jumanji_cube():
    from jumanji.environments import RubiksCube
    from jumanji.environments.logic.rubiks_cube.generator import ScramblingGenerator

    return RubiksCube(ScramblingGenerator(cube_size=2, num_scrambles_on_reset=2))


def _jumanji_sokoban():
    from jumanji.environments import Sokoban
    from jumanji.environments.routing.sokoban.generator import ToyGenerator

    return Sokoban(ToyGenerator())


def _jumanji_sudoku():
    from jumanji.environments import Sudoku

    return Sudoku()


# By name of our environment, its peers: the settings that one needs, and the function
# (options, batch) -> Speed that measures it.
_OTHERS: dict[str, tuple[tuple[dict[str, Any], Callable], ...]] = {
    "frozen_lake": (
        ({}, _gymnasium_lake),
        ({}, _gymnax("gymnax FrozenLake", "FrozenLake-misc", False)),
    ),
    "bandit": (({}, _gymnax("gymnax BernoulliBandit", "BernoulliBandit-misc", True)),),
    "sokoban": (
        ({}, _gym_sokoban),
        (
            {"size": 10, "boxes": 4},
            _jumanji("jumanji Sokoban", _jumanji_sokoban, False),
        ),
    ),
    "sudoku": (({"size": 9}, _jumanji("jumanji Sudoku", _jumanji_sudoku, False)),),
    "2048": (({}, _jumanji("jumanji Game2048", _jumanji_2048, True)),),
    "rubik": (({}, _jumanji("jumanji RubiksCube 2", _jumanji_cube, True)),),
}
