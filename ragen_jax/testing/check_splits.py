"""Checks that every split has levels, and that no level is in two splits."""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base, first_levels
from ragen_jax.testing.check_dynamics import CheckError, level_key, require

_BATCH = 256  # levels of each split that are drawn at once
_BATCHES = 8
_SECONDS = 5.0  # after which no further batch is drawn: some levels are slow to draw
_PAIRS = (
    (base.TEST, base.TRAIN),
    (base.VALIDATION, base.TRAIN),
    (base.TEST, base.VALIDATION),
)


class Drawn(NamedTuple):
    """Levels that `check_splits` drew."""

    count: int  # drawn of each split
    different: tuple[int, ...]  # by split, how many of these are different


def check_every_split_comes(env: base.Environment) -> None:
    """Draws one level of each split, with a time limit: the search may never end.

    Raises:
      CheckError: if a draw takes longer than a minute. It then goes on in a thread that
        ends with the process.
    """
    split = first_levels.missing_split(env, range(len(base.SPLITS)))
    if split is not None:
        raise CheckError(first_levels.missing_sentence(split))


def check_splits(env: base.Environment) -> Drawn:
    """Draws levels of each split, and compares them.

    Two levels are equal if their first observations and all integers of their states
    agree. Floats are not compared, nor is uint32[2], as a key's data is: randomness
    that a state has drawn in advance makes no different level.

    Raises:
      CheckError: if a level came up in two splits, and how many did; if every key
        gives the same one; or if some are over before the first action.
    """
    drawn, over = _draw(env)
    for name, levels, count in zip(base.SPLITS, drawn, over, strict=True):
        require(
            not count,
            f"of {len(levels)} {name} levels {count} are over when they begin: let"
            " reset draw again until something is left to do",
        )
    level_sets = [set(levels) for levels in drawn]
    for one, other in _PAIRS:
        shared = sum(level in level_sets[other] for level in drawn[one])
        require(
            not shared,
            f"of {len(drawn[one])} {base.SPLITS[one]} levels {shared} are"
            f" {base.SPLITS[other]} levels too (floats are not compared): let reset"
            " draw again until base.split_of(base.content_hash(...)) is the split it is"
            " asked for, and hash integers that the State keeps",
        )
    different = tuple(map(len, level_sets))
    for split, name in enumerate(base.SPLITS):
        require(
            different[split] > 1,
            f"reset gives one {name} level for all of {len(drawn[split])} keys (floats"
            " are not compared): let it draw from its key, among several levels of each"
            " split, and let the State keep the integers that tell them apart",
        )
    return Drawn(len(drawn[0]), different)


def _draw(env: base.Environment) -> tuple[list[list[bytes]], list[int]]:
    """For each split its levels, each as its bytes; a level may come more than once.

    Also how many of each split's are over when they begin.
    """
    level, split = (
        index.reshape(-1) for index in np.indices((_BATCH, len(base.SPLITS)), np.int32)
    )
    draw = jax.jit(jax.vmap(functools.partial(_start, env)))
    drawn: list[list[bytes]] = [[] for _ in base.SPLITS]
    over = [0 for _ in base.SPLITS]
    begin = None
    for batch in range(_BATCHES):
        if begin is not None and time.monotonic() - begin > _SECONDS:
            break
        leaves, is_over = draw(batch * _BATCH + level, split)
        rows, is_over = _rows(leaves), np.asarray(is_over)
        begin = begin or time.monotonic()  # After the first, which compiled.
        for row, owner, ended in zip(rows, split, is_over, strict=True):
            drawn[owner].append(row.tobytes())
            over[owner] += bool(ended)
    return drawn, over


def _start(env: base.Environment, level, split) -> tuple[list[jax.Array], jax.Array]:
    """What tells a level from others: its first observation, and parts of its state.

    Also whether it is over although nothing was done, bool[].
    """
    key = level_key(level)
    state = env.reset(key, split)
    content = [leaf for leaf in jax.tree.leaves(state) if _counts(leaf)]
    shape = (env.action_size,) if env.action_size else ()
    nothing = jnp.full(shape, base.NO_ACTION, jnp.int32)
    return [env.observe(state), *content], env.step(key, state, nothing)[1].done


def _counts(leaf: Any) -> bool:
    is_whole = jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_
    return is_whole and not _is_key_data(leaf)


def _is_key_data(leaf: Any) -> bool:
    """Whether a leaf of one State has the type and shape of `jax.random.key_data`."""
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return leaf.dtype == data.dtype and leaf.shape[-1:] == data.shape


def _rows(leaves: list[jax.Array]) -> np.ndarray:
    """uint8[B, bytes] of arrays [B, ...]."""
    parts = [np.asarray(leaf).reshape(len(leaf), -1) for leaf in leaves]
    return np.concatenate(
        [np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1
    )
