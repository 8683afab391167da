"""Countdown: make the target from the given numbers with one arithmetic expression.

Rules and rewards are those of RAGEN and TinyZero, except that numbers may be left over
(unless `use_all`), divisions must leave no remainder, and an episode may continue after
a wrong answer. Every function handles one puzzle: `vmap` to batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base, rendering
from ragen_jax.envs.countdown import generator, solver, texts
from ragen_jax.envs.countdown.expression import (
    ANSWER_BYTES,
    OTHER,
    TARGET,
    read_bytes,
    read_text,
)
from ragen_jax.envs.countdown.types import ACTION_NAMES, Countdown, State, check

_NUMBER_COLOUR, _TARGET_COLOUR = (214, 226, 240), (252, 214, 120)


def make(settings: Countdown) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="countdown",
        action_names=ACTION_NAMES,
        phrases=texts.phrases(settings),
        observation_phrases=settings.max_numbers + 4,
        instruction=texts.instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(texts.observe, settings=settings),
        example_actions=("(1 + 2) * 3",),
        longest_observation=functools.partial(
            texts.longest_observation, settings=settings
        ),
        answer_bytes=ANSWER_BYTES,
        most_actions=1,
        read_action=functools.partial(read_action, settings=settings),
        read_action_text=functools.partial(read_action_text, settings=settings),
        sample_action=sample_action,
        action_text=functools.partial(action_text, settings=settings),
        picture=picture,
        solve=functools.partial(solve, settings=settings),
    )


def reset(key: jax.Array, split: jax.Array, settings: Countdown) -> State:
    """Draws a solvable puzzle that belongs to the split.

    Args:
      key: decides the puzzle.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: how many numbers, and how high.
    """
    return generator.draw(key, split, settings)


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Countdown
) -> tuple[State, base.Outcome]:
    """Records the verdict on an answer; the target ends the episode.

    The first legal answer earns `partial_reward`, and the target the rest of 1. So an
    episode that makes the target earns 1 in all, however many answers came before.

    Args:
      key: not used; nothing is random.
      state: one puzzle; once `done`, it does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
      settings: the partial reward.
    """
    del key
    answers = ~state.done & (action != base.NO_ACTION)
    success = answers & (action == TARGET)
    is_legal = answers & ((action == OTHER) | success)
    partial = jnp.where(is_legal & ~state.is_paid, settings.partial_reward, 0.0)
    reward = partial + jnp.where(success, 1 - settings.partial_reward, 0.0)
    done = state.done | success
    outcome = base.Outcome(
        reward=reward.astype(jnp.float32), success=success, done=done
    )
    verdict = jnp.where(answers, action, state.verdict)
    is_paid = state.is_paid | is_legal
    return state.replace(verdict=verdict, is_paid=is_paid, done=done), outcome


def read_action(
    text: jax.Array, length: jax.Array, state: State, settings: Countdown
) -> jax.Array:
    """int32[], the verdict on an answer, or base.NO_ACTION if it cannot be read.

    Args:
      text: uint8[ANSWER_BYTES]; see expression.py for what can be read.
      length: int32[], its bytes.
      state: the puzzle.
      settings: whether all numbers must be used.
    """
    return read_bytes(text, length, state.numbers, state.target, settings.use_all)


def read_action_text(text: bytes, state: State, settings: Countdown) -> int:
    """The definition of `read_action`, from bytes and a host State."""
    numbers = [int(number) for number in state.numbers]
    return read_text(text, numbers, int(state.target), settings.use_all)


def sample_action(key: jax.Array) -> jax.Array:
    """int32[], REFUSED or OTHER: the verdicts that a random answer would have."""
    return jax.random.randint(key, (), 0, TARGET)


def action_text(action: int, state: State, settings: Countdown) -> str:
    """A solution for TARGET, where there is one; else the verdict's name."""
    solution = None
    if action == TARGET:
        solution = solver.solution_text(state, settings)
    return solution or ACTION_NAMES[action]


def picture(state: State) -> np.ndarray:
    """uint8[48, 48 * (N + 1), 3], RGB: the numbers, then the target."""
    colours = [*[_NUMBER_COLOUR] * len(state.numbers), _TARGET_COLOUR]
    texts = [str(n) if n else "" for n in (*state.numbers, state.target)]
    return rendering.board(np.array([colours], np.uint8), [texts], cell=48)


def solve(state: State, settings: Countdown) -> tuple[int, ...]:
    """(TARGET,) if an expression makes it, else nothing; see `solver.solution_text`."""
    if state.done or solver.solution_text(state, settings) is None:
        return ()
    return (TARGET,)
