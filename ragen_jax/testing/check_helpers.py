"""The checks of `check_env` on what an environment may have besides its dynamics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base
from ragen_jax.testing.check_dynamics import MEMBERS, Functions, Plays, require

_SOLVED = 3  # levels of each split that `solve` is tried on
_DRAWN = 1024  # actions of `sample_action`
_REPLAYS = 3  # of each solution, to see whether its result is random
_AFTER = 64  # actions after the end: so many of all in turn, and as many random ones


def may_act(plays: Plays) -> np.ndarray:
    """bool[B, T + 1], the states whose episode has not ended: others are not asked."""
    return ~np.pad(plays.outcome.done, [(0, 0), (1, 0)])


def check_landmarks(env: base.Environment, plays: Plays) -> None:
    """Requires landmarks to be (row, column), each from 0 to 9, or (-1, -1).

    In every state from which an agent may act: ended ones are not asked for any.
    """
    marks = np.asarray(jax.jit(jax.vmap(jax.vmap(env.landmarks)))(plays.states))
    require(
        marks.dtype == np.int32 and marks.ndim == 4 and marks.shape[3] == 2,
        f"landmarks gives {marks.dtype}{list(marks.shape[2:])}: make it int32[n, 2]",
    )
    marks = marks[may_act(plays)]  # int32[states, n, 2]
    is_none = (marks == -1).all(axis=2)
    require(
        ((marks >= 0).all(axis=2) | is_none).all(),
        "landmarks gives a negative place: (-1, -1) alone means none",
    )
    require(
        (marks < 10).all(),
        f"landmarks gives the row or column {marks.max()}, which is looked for in no"
        " thought: give those from 0 to 9, or leave landmarks out",
    )


def check_picture(env: base.Environment, plays: Plays) -> None:
    """Requires pictures uint8[h, w, 3] of one size, of first and last states."""
    shapes = set()
    for play in range(0, len(plays.level), 8):
        for time in (0, -1):
            image = env.picture(_state(plays, play, time))
            require(
                isinstance(image, np.ndarray) and image.dtype == np.uint8,
                f"picture gives {type(image).__name__}: make it a NumPy array of uint8",
            )
            shapes.add(image.shape)
    (shape,) = shapes if len(shapes) == 1 else [()]
    require(
        len(shape) == 3 and shape[2] == 3,
        f"picture gives shapes {sorted(shapes)}: make all one [height, width, 3]",
    )


def check_choices(env: base.Environment, plays: Plays) -> None:
    """Requires `sample_action` and `rule` to give actions or NO_ACTION.

    A rule in every state from which an agent may act: ended ones are not asked.
    """
    actions_of = {}
    if env.sample_action is not None:
        keys = jax.random.split(jax.random.key(7), _DRAWN)
        actions_of["sample_action"] = jax.jit(jax.vmap(env.sample_action))(keys)
    if env.rule is not None:
        chosen = jax.jit(jax.vmap(jax.vmap(env.rule)))(plays.states)
        actions_of["rule"] = np.asarray(chosen)[may_act(plays)]
    most = len(env.action_names) - 1
    for part, actions in actions_of.items():
        kinds = np.asarray(base.action_kind(actions, env))
        unknown = kinds[(kinds < base.NO_ACTION) | (kinds > most)]
        require(
            not unknown.size,
            f"{part} gives action {unknown[:1]}: there are actions 0 to {most}, and"
            " base.NO_ACTION",
        )


class Solved(NamedTuple):
    """What playing solutions has shown."""

    has_ended: bool  # a play has ended, and stayed as it was after a further action
    has_succeeded: bool


def check_solve(env: base.Environment, functions: Functions, plays: Plays) -> Solved:
    """Requires solutions of valid actions that succeed, unless results are random."""
    last = _SOLVED * len(base.SPLITS) * MEMBERS
    step_all = jax.jit(jax.vmap(functions.step, (0, None, 0)))
    plans_found, ended, succeeded = 0, False, False
    for play in range(0, min(last, len(plays.level)), MEMBERS):
        start = _state(plays, play, 0)
        plan = env.solve(start)
        require(
            isinstance(plan, tuple | list | np.ndarray),
            f"solve gives {plan!r:.60}: let it give a tuple of actions, empty where"
            " there is no solution",
        )
        plan = tuple(plan)
        plans_found += bool(plan)
        kinds = [np.ravel(a)[0] for a in plan]
        require(
            all(isinstance(kind, int | np.integer) for kind in kinds)
            and all(0 <= kind < len(env.action_names) for kind in kinds),
            f"solve gives {plan}: choose actions from 0 to {len(env.action_names) - 1}",
        )
        ends = [_replay(functions, start, plan, seed) for seed in range(_REPLAYS)]
        leaves = [jax.tree.leaves(state) for state, *_ in ends]
        is_sure = all(
            np.array_equal(a, b)
            for other in leaves[1:]
            for a, b in zip(leaves[0], other, strict=True)
        )
        state, success, done = ends[0]
        succeeded |= any(success for _, success, _ in ends)
        require(
            success or not is_sure or not plan,
            f"solve gives {plan} for a level, which does not lead to success",
        )
        require(
            done or not success,
            "a solution leads to success without the end: let done be True from the"
            " action that succeeds",
        )
        if done:
            _check_absorbs(env, step_all, state)
            ended = True
    require(plans_found, "solve finds nothing for any level: leave it out, or fix it")
    return Solved(ended, succeeded)


def _replay(functions: Functions, state, plan, seed: int) -> tuple[Any, bool, bool]:
    """The state after the plan, whether it was solved, and whether it is over."""
    success = done = False
    for number, action in enumerate(plan):
        key = jax.random.fold_in(jax.random.key(seed), number)
        action = jnp.asarray(action, jnp.int32)
        state, outcome = functions.step(key, state, action)
        success, done = success or bool(outcome.success), bool(outcome.done)
    return state, success, done


def _check_absorbs(env: base.Environment, step_all: Callable, state) -> None:
    """Requires that no action after the end changes or earns anything.

    Args:
      env: the environment.
      step_all: its step of (keys [n], one state, actions int32[n, ...]).
      state: in which a play has ended.
    """
    keys = jax.random.split(jax.random.key(8), 2 * _AFTER)
    actions = jax.vmap(lambda key: base.random_action(key, env))(keys)
    if actions.ndim == 1:  # Each action once, where there are not too many.
        each = jnp.arange(_AFTER) % len(env.action_names)
        actions = jnp.concatenate([each, actions[_AFTER:]])
    after, outcome = step_all(keys, state, actions.astype(jnp.int32))
    after, state = jax.device_get((after, state))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), after, state)
    is_still = all(jax.tree.leaves(same)) and bool(outcome.done.all())
    require(
        is_still and (outcome.reward == 0).all() and not outcome.success.any(),
        "an ended episode continued after its solution: where state.done nothing"
        " changes, reward is 0 and success False",
    )


def _state(plays: Plays, play: int, time: int) -> Any:
    """One state of the plays, as NumPy arrays."""
    return jax.tree.map(lambda leaf: leaf[play, time], plays.states)
