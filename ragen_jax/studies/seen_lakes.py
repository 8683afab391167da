"""How many test lakes training has shown, and whether that helps.

python -m ragen_jax.studies.seen_lakes

The content that decides a level's split includes the player's start. So a test lake may
be what a training lake looks like once its player has walked: the same ice, holes and
goal, and so the same prompt. This reads the runs of docs/studies, draws the levels that
they trained and were tested on again, and compares the lakes shown with the others.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from ragen_jax.envs.base import TEST, TRAIN
from ragen_jax.envs.frozen_lake import env, planning
from ragen_jax.envs.frozen_lake.types import HOLE, ICE, FrozenLake, State
from ragen_jax.rollout import prng
from ragen_jax.studies.across import numbers, pool
from ragen_jax.studies.across.pool import Trained

_ROOT = Path(__file__).parents[2]
_LEVELS = 256  # of each run's test
_ITERATIONS, _PROMPTS = 200, 8  # of its training
# The runs that are read: most of those on FrozenLake.
_WANTED: Mapping[str, object] = {
    "iterations": _ITERATIONS,
    "rollout.prompts": _PROMPTS,
    "evaluation.test_prompts": _LEVELS,
    "env.name": "frozen_lake",
    "env.size": 4,
    "env.frozen_probability": 0.9,
    "env.success_probability": 0.8,
}
_NAMES = ("gain", "before", "after")


@functools.lru_cache
def lakes(seed: int, split: int, iterations: int, groups: int) -> State:
    """The levels of a run's rollouts, iteration by iteration; arrays of NumPy.

    Args:
      seed: of the run.
      split: TRAIN or TEST.
      iterations: 1 for a test.
      groups: prompts of an iteration.
    """

    @jax.jit
    def draw() -> State:
        def level(iteration, group):
            key = prng.iteration_key(np.uint32(seed), jnp.int32(split), iteration)
            return env.reset(prng.level_key(key, group), jnp.int32(split), FrozenLake())

        of_groups = jax.vmap(level, (None, 0))
        each = jax.vmap(of_groups, (0, None))(
            jnp.arange(iterations), jnp.arange(groups)
        )
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each)

    return jax.device_get(draw())


def shown(training: State, test: State) -> np.ndarray:
    """bool[L], whether an episode of a training lake may come to look like the test's.

    It does if its player can walk over ice to where the other starts: with the same
    tiles, and without a step on the goal, which would end it.

    Args:
      training, test: lakes; `tiles` int32[N, S, S], `player` int32[N, 2].
    """
    starts: dict[bytes, list[np.ndarray]] = {}
    for tiles, player in zip(training.tiles, training.player, strict=True):
        starts.setdefault(tiles.tobytes(), []).append(player)
    found = []
    for tiles, player in zip(test.tiles, test.player, strict=True):
        parts, _ = ndimage.label(tiles == ICE)
        own = parts[tuple(player)]
        others = starts.get(tiles.tobytes(), [])
        found.append(any(parts[tuple(start)] == own for start in others))
    return np.array(found)


def matched_difference(
    values: np.ndarray, is_shown: np.ndarray, kinds: Sequence[tuple]
) -> float:
    """The mean over lakes shown minus that over others of the same kind; NaN if none.

    Kinds count by the fewer of their two sorts.

    Args:
      values: float[L].
      is_shown: bool[L].
      kinds: of each lake.
    """
    differences, weights = [], []
    for kind in sorted(set(kinds)):
        is_kind = np.array([each == kind for each in kinds])
        here, there = values[is_kind & is_shown], values[is_kind & ~is_shown]
        if len(here) and len(there):
            differences.append(here.mean() - there.mean())
            weights.append(min(len(here), len(there)))
    return float(np.average(differences, weights=weights)) if weights else math.nan


def _compared(seed: int, runs: Sequence[Trained]) -> dict[str, float]:
    """Means over a seed's runs, in percent, and counts of its test lakes."""
    test = lakes(seed, TEST, 1, _LEVELS)
    is_shown = shown(lakes(seed, TRAIN, _ITERATIONS, _PROMPTS), test)
    holes = (test.tiles == HOLE).sum(axis=(1, 2))
    lengths = map(planning.shortest_path, test.tiles, test.player)
    kinds = list(zip(holes.tolist(), map(len, lengths), strict=True))
    found = {"runs": float(len(runs)), "shown": float(is_shown.sum())}
    for count in range(4):
        of_count = holes == count if count < 3 else holes >= count
        found[f"shown/{count}"] = float(is_shown[of_count].sum())
        found[f"lakes/{count}"] = float(of_count.sum())
    before, after = (
        np.mean([np.ravel(run.record.test[f"{when}_by_level"]) for run in runs], axis=0)
        for when in ("before", "after")
    )
    for name, values in zip(_NAMES, (after - before, before, after), strict=True):
        found[f"{name}/shown"] = 100 * float(values[is_shown].mean())
        found[f"{name}/others"] = 100 * float(values[~is_shown].mean())
        found[f"{name}/matched"] = 100 * matched_difference(values, is_shown, kinds)
    return found


def compared(pages: Path) -> dict[int, dict[str, float]]:
    """Seed -> what `_compared` finds of its runs, from the data files in `pages`."""
    by_seed: dict[int, list[Trained]] = {}
    for run in pool.load(_ROOT, pages).runs:
        is_wanted = all(run.settings[key] == value for key, value in _WANTED.items())
        levels = run.record.test.get("before_by_level") or []
        if is_wanted and not run.rewinds and len(levels) == _LEVELS:
            by_seed.setdefault(run.seed, []).append(run)
    return {seed: _compared(seed, runs) for seed, runs in sorted(by_seed.items())}


def lines(found: Mapping[int, Mapping[str, float]]) -> list[str]:
    """What `main` prints: a table of seeds, and means over them."""
    head = ["seed", "runs", "shown", "by holes: 0, 1, 2, more"]
    rows = []
    for seed, values in found.items():
        by_holes = ", ".join(
            f"{values[f'shown/{n}']:.0f} of {values[f'lakes/{n}']:.0f}"
            for n in range(4)
        )
        counts = [f"{values[name]:.0f}" for name in ("runs", "shown")]
        rows.append([str(seed), *counts, by_holes])
    mean = lambda name: numbers.student([values[name] for values in found.values()])
    means = []
    for name in _NAMES:
        shares = [f"{mean(f'{name}/{sort}').value:.1f}" for sort in ("shown", "others")]
        matched = mean(f"{name}/matched")
        means.append(
            [name, *shares]
            + [f"{matched.value:.1f} [{matched.low:.1f}, {matched.high:.1f}]"]
        )
    title = ["success, %", "shown", "others", "difference where alike, by t"]
    return [*numbers.table(head, rows), *numbers.table(title, means)]


def main() -> None:
    """Prints how many lakes were shown, and success on them and on the others."""
    print("\n".join(lines(compared(_ROOT / "docs" / "studies"))))


if __name__ == "__main__":
    main()
