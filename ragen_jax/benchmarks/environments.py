"""Measures environments by themselves: random play, jitted and vmapped."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import TRAIN, Environment, random_action

STEPS = 1000  # of each episode of a batch, in one timed call
_REPEATS = 3  # timed calls

# Rows of the table of `launch/benchmark.py --env=all`: an environment and its settings.
KINDS = (
    ("frozen_lake", {}),
    ("bandit", {}),
    ("countdown", {}),
    ("sokoban", {}),
    ("sokoban", {"size": 8, "boxes": 2}),
    ("sokoban", {"size": 10, "boxes": 4}),
    ("sudoku", {}),
    ("sudoku", {"size": 9, "clues": 40}),
    ("2048", {}),
    ("rubik", {}),
    ("webshop", {}),
    ("search_qa", {}),
    ("math", {}),
    ("household", {}),
)


@dataclasses.dataclass(frozen=True)
class EnvFunctions:
    """The timed functions of one environment, ours or a peer's; `vmap`-able."""

    reset: Callable[[jax.Array], Any]  # key -> State
    # (key, State, action) -> State, reward float[], done bool[]
    step: Callable[[jax.Array, Any, Any], tuple[Any, jax.Array, jax.Array]]
    sample: Callable[[jax.Array], Any]  # key -> a random action


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of an environment; None: not measured."""

    name: str
    steps: float | None  # a second, over all games of the batch
    resets: float | None  # a second, each to a new level


def kinds(name: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The rows of KINDS with this name, or "all"; if there is none, its defaults."""
    if name == "all":
        return KINDS
    return tuple(kind for kind in KINDS if kind[0] == name) or ((name, {}),)


def measure(env: Environment, batch: int = 1024, label: str = "") -> Speed:
    """Measures an environment; the result is named `label`, or else `env.name`."""
    return measure_functions(label or env.name, env_functions(env), batch)


def measure_functions(label: str, functions: EnvFunctions, batch: int) -> Speed:
    """Measures any environment that is written in JAX."""
    return Speed(
        name=label,
        steps=step_rate(functions, batch=batch, steps=STEPS),
        resets=reset_rate(functions, batch=batch),
    )


def env_functions(env: Environment) -> EnvFunctions:
    """The bare rules of an environment, on training levels."""

    def step(key, state, action):
        state, outcome = env.step(key, state, action)
        return state, outcome.reward, outcome.done

    return EnvFunctions(
        reset=lambda key: env.reset(key, jnp.int32(TRAIN)),
        step=step,
        sample=lambda key: random_action(key, env),
    )


def step_rate(
    functions: EnvFunctions, *, batch: int, steps: int, repeats: int = _REPEATS
) -> float:
    """Steps/s of random play; a finished episode starts again from its first state.

    Keys and actions are drawn before the clock starts.

    Args:
      functions: of the environment.
      batch: games played in parallel.
      steps: of each episode in one timed call.
      repeats: timed calls, of which the fastest counts: the others only add noise.
    """

    def play(start: Any, key_and_action: Any) -> tuple[Any, jax.Array]:
        def one(state: Any, inputs: Any) -> tuple[Any, jax.Array]:
            state, reward, done = functions.step(inputs[0], state, inputs[1])
            again = lambda new, old: jnp.where(done, new, old)
            return jax.tree.map(again, start, state), reward

        state, rewards = jax.lax.scan(one, start, key_and_action)
        return state, rewards.sum()

    @jax.jit
    def draw(key: jax.Array) -> Any:
        reset_key, step_key, action_key = jax.random.split(key, 3)
        shape = (batch, steps)
        return (
            jax.vmap(functions.reset)(jax.random.split(reset_key, batch)),
            (
                jax.random.split(step_key, shape),
                jax.vmap(jax.vmap(functions.sample))(
                    jax.random.split(action_key, shape)
                ),
            ),
        )

    run = jax.jit(jax.vmap(play))
    seconds = _fastest(lambda inputs: run(*inputs), draw, repeats)
    return batch * steps / seconds


def reset_rate(functions: EnvFunctions, *, batch: int) -> float:
    """Resets/s, `batch` of them in one call."""
    draw = jax.jit(jax.vmap(functions.reset))
    seconds = _fastest(draw, lambda key: jax.random.split(key, batch), _REPEATS)
    return batch / seconds


def _fastest(
    run: Callable[[Any], Any], prepare: Callable[[jax.Array], Any], repeats: int
) -> float:
    """The fewest seconds of `run(prepare(key))`, without preparing and compiling."""
    seconds = []
    for index in range(repeats + 1):
        inputs = jax.block_until_ready(prepare(jax.random.key(index)))
        started = time.perf_counter()
        jax.block_until_ready(run(inputs))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def table(rows: list[tuple[Speed, list[Speed]]]) -> str:
    """A table of our environments, each with its peers below and our speed over theirs.

    Args:
      rows: pairs of (ours, its peers').
    """
    lines = [f"{'env':40s} {'steps/s':>14s} {'resets/s':>14s}  times the peer's"]
    for ours, others in rows:
        lines.append(f"{ours.name:40s} {_shown(ours.steps)} {_shown(ours.resets)}")
        for other in others:
            times = [
                f"{mine / theirs:,.1f} {what}"
                for what in ("steps", "resets")
                if (mine := getattr(ours, what)) and (theirs := getattr(other, what))
            ]
            lines.append(
                f"  {other.name:38s} {_shown(other.steps)} {_shown(other.resets)}"
                f"  {', '.join(times)}"
            )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return f"{'-':>14s}" if value is None else f"{value:14,.0f}"
