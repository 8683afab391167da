"""What the contract asks of a world's rules: types, chance, ends, levels, helpers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

_MEMBERS = 2  # games that share a level, as the members of a group do
_SOLVED = 3  # levels of each split that `solve` is tried on
_CHANCES = 3  # replays of each solution, to see whether chance plays a part
_TYPES = {"reward": jnp.float32, "success": jnp.bool_, "done": jnp.bool_}


class ContractError(Exception):
    """A world breaks the contract: one sentence with the remedy."""


def require(holds: Any, sentence: str) -> None:
    """Raises ContractError with the sentence unless `holds`."""
    if not holds:
        raise ContractError(sentence)


@struct.dataclass
class Games:
    """B random games of T actions, two of each level. NumPy arrays."""

    level: Any  # int32[B], games of one level have the same key of `reset`
    split: Any  # int32[B]; every level's key is used for each split
    states: Any  # leaves [B, T + 1, ...]
    actions: Any  # int32[B, T], NO_ACTION as often as any other
    outcome: base.Outcome  # of [B, T]
    observation: Any  # int32[B, T + 1, M]


@dataclasses.dataclass(frozen=True)
class Functions:
    """A world's functions, jitted, on one game."""

    reset: Callable
    step: Callable
    observe: Callable


def compile_functions(world: base.World) -> Functions:
    """The world's functions, each compiled when it is first called.

    Each is wrapped, so that what is compiled is counted for this world alone.
    """
    return Functions(
        reset=jax.jit(functools.partial(world.reset)),
        step=jax.jit(functools.partial(world.step)),
        observe=jax.jit(functools.partial(world.observe)),
    )


def make_player(world: base.World, games: int, steps: int) -> Callable[[], Games]:
    """What plays the same B >= `games` random games of T = `steps` at each call."""
    levels = -(-games // (_MEMBERS * len(base.SPLITS)))
    shape = (levels, len(base.SPLITS), _MEMBERS)
    level, split, _ = (index.reshape(-1) for index in np.indices(shape, np.int32))
    play = jax.jit(jax.vmap(functools.partial(_play, world, steps)))

    def run() -> Games:
        index = np.arange(level.size, dtype=np.int32)
        return jax.tree.map(np.asarray, play(level, split, index))

    return run


def _play(world: base.World, steps: int, level, split, index) -> Games:
    """One random game."""
    step_keys, actions = _chances(world, steps, index)
    first = world.reset(_level_key(level), split)

    def one_step(state, inputs):
        key, action = inputs
        after, outcome = world.step(key, state, action)
        return after, (after, outcome)

    _, (later, outcome) = jax.lax.scan(one_step, first, (step_keys, actions))
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    observation = jax.vmap(world.observe)(states)
    return Games(level, split, states, actions, outcome, observation)


def _level_key(level) -> jax.Array:
    return jax.random.fold_in(jax.random.key(5), level)


def _chances(world: base.World, steps: int, index) -> tuple[jax.Array, jax.Array]:
    """The keys [T] and the actions int32[T] of one game's steps."""
    key = jax.random.fold_in(jax.random.key(6), index)
    step_key, action_key = jax.random.split(key)
    actions = jax.random.randint(
        action_key, (steps,), base.NO_ACTION, len(world.action_names), jnp.int32
    )
    return jax.random.split(step_key, steps), actions


# Checks ------------------------------------------------------------------------------


def check_types(world: base.World) -> None:
    """Traces the functions: a step keeps the state's types, outcomes are scalars."""
    key, number = jax.random.key(0), jnp.int32(0)
    first = jax.eval_shape(world.reset, key, number)
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        require(
            not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key),
            f"State{jax.tree_util.keystr(path)} is a key: keep its"
            " jax.random.key_data, or draw from the key that step is given",
        )
    after, outcome = jax.eval_shape(world.step, key, first, number)
    before, later = (jax.tree.structure(tree) for tree in (first, after))
    require(
        before == later, f"step turns {before} into {later}: return the same fields"
    )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(after), strict=True
    )
    for (path, old), new in pairs:
        require(
            (old.shape, old.dtype) == (new.shape, new.dtype),
            f"step turns State{jax.tree_util.keystr(path)} from {_type(old)} into"
            f" {_type(new)}: let it keep shape and type",
        )
    for name, dtype in _TYPES.items():
        value = getattr(outcome, name)
        require(
            (value.shape, value.dtype) == ((), dtype),
            f"step gives outcome.{name} as {_type(value)}: make it {dtype.__name__}[]",
        )


def _type(array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def check_finite(games: Games) -> None:
    """No state and no reward is infinite or not a number."""
    for leaf in jax.tree.leaves((games.states, games.outcome)):
        if np.issubdtype(leaf.dtype, np.floating):
            require(
                np.isfinite(leaf).all(),
                "a state or reward holds a number that is"
                " not finite: look for a division by 0",
            )


def check_repeats(
    world: base.World, functions: Functions, games: Games, again: Games
) -> None:
    """The same keys give the same games: once more, and outside the batch."""
    _require_same(games, again, "the same key gives another game when played again")
    index = games.level.size - 2
    keys, actions = _chances(world, games.actions.shape[1], index)
    state = functions.reset(_level_key(games.level[index]), games.split[index])
    states, outcomes = [state], []
    for key, action in zip(keys, actions, strict=True):
        state, outcome = functions.step(key, state, action)
        states.append(state)
        outcomes.append(outcome)
    stacked = [jax.tree.map(lambda *xs: np.stack(xs), *xs) for xs in (states, outcomes)]
    alone = (*stacked, np.stack([functions.observe(state) for state in states]))
    inside = (games.states, games.outcome, games.observation)
    _require_same(
        jax.tree.map(lambda leaf: leaf[index], inside),
        alone,
        "a game depends on the batch it is in",
    )
    for name in ("reset", "step", "observe"):
        require(
            getattr(functions, name)._cache_size() == 1,
            f"{name} is compiled more than once, for a fresh state's types differ from"
            " a later one's: make every leaf of the State with an explicit dtype",
        )


def _require_same(left: Any, right: Any, sentence: str) -> None:
    """Exactly, but for the rounding of floating-point numbers."""
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        is_float = np.issubdtype(one.dtype, np.floating)
        tolerance = 1e-5 if is_float else 0
        same = np.allclose(one, other, rtol=tolerance, atol=tolerance)
        require(same, f"{sentence}: let all chance come from the key")


def check_starts(games: Games) -> None:
    """Games of one level begin alike, and no level is of two splits."""
    first = [leaf[:, 0] for leaf in jax.tree.leaves(games.states)]
    first.append(games.observation[:, 0])
    for leaf in first:
        pairs = leaf.reshape(-1, _MEMBERS, *leaf.shape[1:])
        require(
            (pairs[:, 0] == pairs[:, 1]).all(),
            "members of a group begin differently: let reset read its key alone",
        )
    owner: dict[bytes, int] = {}
    for ids, split in zip(games.observation[:, 0], games.split.tolist(), strict=True):
        require(
            owner.setdefault(ids.tobytes(), split) == split,
            "one level came up in two splits: let reset draw again until"
            " base.split_of(base.content_hash(...)) is the split it is asked for",
        )


def check_end(games: Games, *, must_end: bool) -> None:
    """After `done` nothing changes and nothing is earned; success comes once, at it."""
    outcome, done = games.outcome, games.outcome.done
    require(
        done[:, -1].any() or not must_end,
        f"no game of {len(done)} ended in {done.shape[1]} random actions, so that the"
        " end was not seen: supply `solve`, or say that chance ends none",
    )
    require(not done.all(), "games are over when they begin: let reset start them")
    require(
        (done[:, :-1] <= done[:, 1:]).all(), "an ended game went on: keep done True"
    )
    require((outcome.success.sum(axis=1) <= 1).all(), "success came twice in a game")
    was_done = np.pad(done[:, :-1], [(0, 0), (1, 0)])
    require(
        not (outcome.success & (was_done | ~done)).any(),
        "success came without the end: it belongs to the action that ends the game",
    )
    require(
        (outcome.reward[was_done] == 0).all(),
        "an ended game gave a reward: it is 0 where state.done",
    )
    _require_unchanged(games.states, was_done, "an ended game changed its state")


def check_no_action(games: Games) -> None:
    """NO_ACTION is no move."""
    is_idle, outcome = games.actions == base.NO_ACTION, games.outcome
    require(is_idle.any(), "NO_ACTION was never played: play more or longer games")
    require((outcome.reward[is_idle] == 0).all(), "NO_ACTION gave a reward: give 0")
    require(not outcome.success[is_idle].any(), "NO_ACTION gave success: give False")
    _require_unchanged(games.states, is_idle, "NO_ACTION changed the state")


def _require_unchanged(states: Any, where: np.ndarray, sentence: str) -> None:
    """Every leaf [B, T + 1, ...] is the same before and after the steps `where`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        require(
            (leaf[:, :-1][where] == leaf[:, 1:][where]).all(),
            f"{sentence} (State{jax.tree_util.keystr(path)}): return it as it was",
        )


# Helpers of a world ------------------------------------------------------------------


def check_landmarks(world: base.World, games: Games) -> None:
    """(row, column) pairs, or (-1, -1)."""
    states = jax.tree.map(lambda leaf: leaf[:, -1], games.states)
    marks = np.asarray(jax.jit(jax.vmap(world.landmarks))(states))
    require(
        marks.dtype == np.int32 and marks.ndim == 3 and marks.shape[2] == 2,
        f"landmarks gives {marks.dtype}{list(marks.shape[1:])}: make it int32[n, 2]",
    )
    is_none = (marks == -1).all(axis=2)
    require(
        ((marks >= 0).all(axis=2) | is_none).all(),
        "landmarks gives a negative place: (-1, -1) alone means none",
    )


def check_picture(world: base.World, games: Games) -> None:
    """uint8[h, w, 3] of one size, for fresh and later states."""
    shapes = set()
    for game in range(0, len(games.level), 8):
        for time in (0, -1):
            image = world.picture(_state(games, game, time))
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


def check_solve(world: base.World, functions: Functions, games: Games) -> bool:
    """Solutions hold actions and, where chance plays no part, lead to success.

    Returns:
      Whether some game ended, and it was seen that the end absorbs.
    """
    last = _SOLVED * len(base.SPLITS) * _MEMBERS
    found, ended = 0, False
    for game in range(0, min(last, len(games.level)), _MEMBERS):
        start = _state(games, game, 0)
        plan = tuple(world.solve(start))
        found += bool(plan)
        require(
            all(0 <= action < len(world.action_names) for action in plan),
            f"solve gives {plan}: choose actions from 0 to"
            f" {len(world.action_names) - 1}",
        )
        ends = [_replay(functions, start, plan, seed) for seed in range(_CHANCES)]
        leaves = [jax.tree.leaves(state) for state, *_ in ends]
        is_sure = all(
            np.array_equal(a, b)
            for other in leaves[1:]
            for a, b in zip(leaves[0], other, strict=True)
        )
        state, success, done = ends[0]
        require(
            success or not is_sure or not plan,
            f"solve gives {plan} for a level, which does not lead to success",
        )
        if done:
            _check_absorbs(functions, state)
            ended = True
    require(found, "solve finds nothing for any level: leave it out, or mend it")
    return ended


def _replay(functions: Functions, state, plan, seed: int) -> tuple[Any, bool, bool]:
    """The state after the plan, whether it was solved, and whether it is over."""
    success = done = False
    for number, action in enumerate(plan):
        key = jax.random.fold_in(jax.random.key(seed), number)
        state, outcome = functions.step(key, state, jnp.int32(action))
        success, done = success or bool(outcome.success), bool(outcome.done)
    return state, success, done


def _check_absorbs(functions: Functions, state) -> None:
    after, outcome = functions.step(jax.random.key(0), state, jnp.int32(0))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state, after)
    is_still = all(jax.tree.leaves(same)) and bool(outcome.done)
    require(
        is_still and outcome.reward == 0 and not outcome.success,
        "an ended game went on after its solution: where state.done nothing changes,"
        " reward is 0 and success False",
    )


def _state(games: Games, game: int, time: int) -> Any:
    """One state of the games, as NumPy arrays."""
    return jax.tree.map(lambda leaf: leaf[game, time], games.states)
