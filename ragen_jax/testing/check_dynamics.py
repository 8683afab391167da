"""The checks of `check_env` on types, randomness and ends, and the plays they read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, traced_checks

MEMBERS = 2  # plays that share a level, as the members of a group do
_IDLE = 1 / 8  # share of NO_ACTION, at least; with few actions it is one like others


class CheckError(Exception):
    """An environment fails a check: one sentence with the remedy."""


def require(holds: Any, sentence: str) -> None:
    """Raises CheckError with the sentence unless `holds`."""
    if not holds:
        raise CheckError(sentence)


@struct.dataclass
class Plays:
    """B random plays of T actions, two of each level. NumPy arrays."""

    level: Any  # int32[B], plays of one level have the same key of `reset`
    split: Any  # int32[B]; every level's key is used for each split
    states: Any  # leaves [B, T + 1, ...]
    actions: Any  # int32[B, T] or [B, T, action_size], one in eight or more NO_ACTION
    outcome: base.Outcome  # of [B, T]
    observation: Any  # int32[B, T + 1, M]


@dataclasses.dataclass(frozen=True)
class Functions:
    """An environment's functions, jitted, on one play."""

    reset: Callable
    step: Callable
    observe: Callable


def compile_functions(env: base.Environment) -> Functions:
    """The environment's functions, each compiled when it is first called.

    Wrapped in new objects, so that jit's cache counts only what is compiled here.
    """
    return Functions(
        reset=jax.jit(functools.partial(env.reset)),
        step=jax.jit(functools.partial(env.step)),
        observe=jax.jit(functools.partial(env.observe)),
    )


def make_player(env: base.Environment, plays: int, steps: int) -> Callable[[], Plays]:
    """A function that returns the same B >= `plays` random plays at each call."""
    levels = -(-plays // (MEMBERS * len(base.SPLITS)))
    shape = (levels, len(base.SPLITS), MEMBERS)
    level, split, _ = (index.reshape(-1) for index in np.indices(shape, np.int32))
    play = jax.jit(jax.vmap(functools.partial(_play, env, steps)))

    def run() -> Plays:
        index = np.arange(level.size, dtype=np.int32)
        return jax.tree.map(np.asarray, play(level, split, index))

    return run


def _play(env: base.Environment, steps: int, level, split, index) -> Plays:
    """One random play."""
    step_keys, actions = _random_actions(env, steps, index)
    first = env.reset(level_key(level), split)

    def one_step(state, inputs):
        key, action = inputs
        after, outcome = env.step(key, state, action)
        return after, (after, outcome)

    _, (later, outcome) = jax.lax.scan(one_step, first, (step_keys, actions))
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    observation = jax.vmap(env.observe)(states)
    return Plays(level, split, states, actions, outcome, observation)


def level_key(level) -> jax.Array:
    """The key of `reset` for a level's number, int32[]."""
    return jax.random.fold_in(jax.random.key(5), level)


def _random_actions(
    env: base.Environment, steps: int, index
) -> tuple[jax.Array, jax.Array]:
    """One play's keys [T], and its actions int32[T] or int32[T, action_size]."""
    key = jax.random.fold_in(jax.random.key(6), index)
    step_key, action_key = jax.random.split(key)
    draw = functools.partial(base.random_action, env=env)
    draws = jax.vmap(draw)(jax.random.split(action_key, steps))
    none_key = jax.random.fold_in(key, 2)
    idle = max(1 / (len(env.action_names) + 1), _IDLE)
    is_none = jax.random.bernoulli(none_key, idle, (steps,))
    is_none = is_none.reshape((steps,) + (1,) * (draws.ndim - 1))
    actions = jnp.where(is_none, base.NO_ACTION, draws).astype(jnp.int32)
    return jax.random.split(step_key, steps), actions


# Checks ------------------------------------------------------------------------------


def check_types(env: base.Environment) -> None:
    """`traced_checks.check_functions`, which traces them, with a CheckError."""
    try:
        traced_checks.check_functions(env)
    except traced_checks.InterfaceError as error:
        raise CheckError(str(error)) from error
    states = []
    jax.eval_shape(
        lambda level: states.append(env.reset(level_key(level), jnp.int32(0))), 0
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        require(
            isinstance(leaf, jax.Array | np.ndarray | np.generic),
            f"reset gives State{jax.tree_util.keystr(path[1:])} as {leaf!r}: make it an"
            " array with a dtype, as jnp.int32(0) is",
        )


def check_finite(plays: Plays) -> None:
    """Requires that all floats in states and outcomes are finite."""
    for owner, tree in (("State", plays.states), ("outcome", plays.outcome)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            require(
                not np.issubdtype(leaf.dtype, np.floating) or np.isfinite(leaf).all(),
                f"{owner}{jax.tree_util.keystr(path)} holds a number that is not"
                " finite: look for a division by 0, a log or a sqrt",
            )


def check_repeats(
    env: base.Environment, functions: Functions, plays: Plays, again: Plays
) -> None:
    """Requires the same plays from the same keys: again, and outside the batch."""
    _require_same(plays, again, "the same key gives another play when it is repeated")
    index = plays.level.size - 2
    keys, actions = _random_actions(env, plays.actions.shape[1], index)
    state = functions.reset(level_key(plays.level[index]), plays.split[index])
    states, outcomes = [state], []
    for key, action in zip(keys, actions, strict=True):
        state, outcome = functions.step(key, state, action)
        states.append(state)
        outcomes.append(outcome)
    stacked = [jax.tree.map(lambda *xs: np.stack(xs), *xs) for xs in (states, outcomes)]
    alone = (*stacked, np.stack([functions.observe(state) for state in states]))
    inside = (plays.states, plays.outcome, plays.observation)
    _require_same(
        jax.tree.map(lambda leaf: leaf[index], inside),
        alone,
        "a play depends on the batch it is in",
    )
    for name in ("reset", "step", "observe"):
        require(
            getattr(functions, name)._cache_size() == 1,
            f"{name} is compiled more than once, for a fresh state's types differ from"
            " a later one's: make every leaf of the State with an explicit dtype",
        )


def _require_same(expected: Any, actual: Any, sentence: str) -> None:
    """Requires equal leaves, up to rounding where they are floats."""
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
    ):
        is_float = np.issubdtype(one.dtype, np.floating)
        tolerance = 1e-5 if is_float else 0
        same = np.allclose(one, other, rtol=tolerance, atol=tolerance)
        require(same, f"{sentence}: let all randomness come from the key")


def check_starts(plays: Plays) -> None:
    """Requires that plays of one level begin in the same state."""
    first = [leaf[:, 0] for leaf in jax.tree.leaves(plays.states)]
    first.append(plays.observation[:, 0])
    for leaf in first:
        pairs = leaf.reshape(-1, MEMBERS, *leaf.shape[1:])
        require(
            (pairs[:, 0] == pairs[:, 1]).all(),
            "members of a group begin differently: let reset read its key alone",
        )


def check_end(plays: Plays, *, must_end: bool) -> None:
    """Requires that success comes with `done`, and that nothing changes after it."""
    outcome, done = plays.outcome, plays.outcome.done
    require(
        done[:, :-1].any() or not must_end,
        f"no play of {len(done)} ended in {done.shape[1]} random actions, so that the"
        " end was not seen: supply `solve`, or use --endless",
    )
    require(not done.all(), "episodes are over when they begin: let reset start them")
    require(
        (done[:, :-1] <= done[:, 1:]).all(),
        "an ended episode continued: keep done True",
    )
    require(
        (outcome.success.sum(axis=1) <= 1).all(), "success came twice in an episode"
    )
    was_done = np.pad(done[:, :-1], [(0, 0), (1, 0)])
    require(
        not (outcome.success & (was_done | ~done)).any(),
        "success came without the end: it belongs to the action that ends the episode",
    )
    require(
        (outcome.reward[was_done] == 0).all(),
        "an ended episode gave a reward: it is 0 where state.done",
    )
    _require_unchanged(plays.states, was_done, "an ended episode changed its state")


def check_no_action(plays: Plays) -> None:
    """Requires that NO_ACTION changes and earns nothing."""
    # Of an action of several numbers, the first tells whether it is NO_ACTION.
    kinds = plays.actions.reshape(*plays.outcome.done.shape, -1)[..., 0]
    is_idle, outcome = kinds == base.NO_ACTION, plays.outcome
    require(is_idle.any(), "NO_ACTION was never played: make more or longer plays")
    require((outcome.reward[is_idle] == 0).all(), "NO_ACTION gave a reward: give 0")
    require(not outcome.success[is_idle].any(), "NO_ACTION gave success: give False")
    _require_unchanged(plays.states, is_idle, "NO_ACTION changed the state")


def _require_unchanged(states: Any, where: np.ndarray, sentence: str) -> None:
    """Requires states (leaves [B, T + 1, ...]) not to change in steps bool[B, T]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        require(
            (leaf[:, :-1][where] == leaf[:, 1:][where]).all(),
            f"{sentence} (State{jax.tree_util.keystr(path)}): return it as it was",
        )
