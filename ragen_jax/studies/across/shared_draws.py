"""What arms of one seed have in common: the levels that each iteration draws."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.studies import measures
from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.numbers import Mean, points, shown
from ragen_jax.studies.across.pool import Pool, Trained
from ragen_jax.utils.words import listed

_TREND = 41  # iterations of the centred mean that is a series' trend
_OTHER_TREND = 21  # for comparison
_SHORTEST = 60  # iterations of runs that are correlated
_SUCCESS = "train/success"


def detrended(values: np.ndarray, width: int = _TREND) -> np.ndarray:
    """Values minus their centred running mean, which is cut off at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places, half = np.arange(len(values)), width // 2
    first = np.maximum(0, places - half)
    end = np.minimum(len(values), places + half + 1)
    return values - (sums[end] - sums[first]) / (end - first)


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Of detrended training success, averaged over pairs, then over seeds."""

    environment: str
    runs: int
    same: Mean  # of two arms of a seed
    different: Mean  # of a run with those of other seeds


def _draws(run: Trained) -> tuple:
    """Equal for runs that would draw the same levels from the same seed."""
    levels = {k: str(v) for k, v in run.settings.items() if k.startswith("env.")}
    of_size = ("iterations", "rollout.prompts", "rollout.group_size")
    return (*sorted(levels.items()), *(run.settings[key] for key in of_size))


def correlations(pool: Pool) -> list[Correlation]:
    """Of each environment in which several runs draw the same levels."""
    groups: dict[str, dict[tuple, list[Trained]]] = {}
    for run in pool.runs:
        _, values = run.record.series(_SUCCESS)
        if not run.rewinds and len(values) == run.settings["iterations"] >= _SHORTEST:
            group = groups.setdefault(run.environment, {})
            group.setdefault(_draws(run), []).append(run)
    found = []
    for name, by_draws in sorted(groups.items()):
        same: dict[int, list[float]] = {}
        different: dict[int, list[float]] = {}
        for runs in by_draws.values():
            _correlate(runs, same, different)
        if same and different:
            means = (
                numbers.student([float(np.mean(values)) for values in kind.values()])
                for kind in (same, different)
            )
            count = sum(len(runs) for runs in by_draws.values())
            found.append(Correlation(name, count, *means))
    return found


def _correlate(
    runs: Sequence[Trained],
    same: dict[int, list[float]],
    different: dict[int, list[float]],
) -> None:
    """Adds each run's correlations with the others, by its seed."""
    # The first rise stays in a mean that is cut off at the beginning.
    first = _TREND // 2
    left = np.array([detrended(run.record.series(_SUCCESS)[1])[first:] for run in runs])
    norms = np.linalg.norm(left, axis=1)
    for i, run in enumerate(runs):
        for j, other in enumerate(runs):
            # The trend leaves a mean near 0. A constant series has no correlation.
            if i != j and norms[i] * norms[j] > 1e-9:
                kind = same if run.seed == other.seed else different
                product = float(left[i] @ left[j] / (norms[i] * norms[j]))
                kind.setdefault(run.seed, []).append(product)


def falls(pool: Pool, width: int) -> dict[str, tuple[Mean, Mean]]:
    """Arm of baseline -> (fall, the same without what the other arm's draws explain).

    Of the arms on Sokoban; the other arm's detrended series is subtracted.
    """
    arms = {
        name: arm
        for name, arm in pool.arms("baseline").items()
        if next(iter(arm.values())).environment == "Sokoban"
    }
    found = {}
    for name, arm in arms.items():
        for other in (o for title, o in arms.items() if title != name):
            plain, cleared = [], []
            for seed in sorted(set(arm) & set(other)):
                _, values = arm[seed].record.series(_SUCCESS)
                _, others = other[seed].record.series(_SUCCESS)
                plain.append(measures.fall(values))
                cleared.append(measures.fall(values - detrended(others, width)))
            found[name] = numbers.student(plain), numbers.student(cleared)
    return found


def section(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Shared draws",
        "",
        "How much of a training curve is the difficulty of the levels that an iteration"
        " happened to draw?",
        "",
    ]
    found = correlations(pool)
    if not found:
        return [*lines, "No two arms and two seeds draw alike.", ""]
    lines += [
        "Arms of a seed draw the same levels. Training success minus its trend (a"
        f" centred mean of {_TREND} iterations, cut off at both ends), from iteration"
        f" {_TREND // 2 + 1} on, as before it a rise at the beginning is left in,"
        " correlated between runs of equal environment, prompts and iterations: means"
        " over pairs, then over seeds with Student's interval; two seeds share a pair"
        " of different seeds, so that interval is rough.",
        "",
    ]
    rows = [
        [
            c.environment,
            str(c.runs),
            str(c.same.count),
            shown(c.same),
            shown(c.different),
        ]
        for c in found
    ]
    head = ["environment", "runs", "seeds", "one seed, two arms", "two seeds"]
    lines += numbers.table(head, rows)
    apart = [c.environment for c in found if c.same.low > c.different.high]
    said = "in none of these environments"
    if apart:
        said = f"on {listed(apart)}"
    lines += [
        f"**Finding.** Arms of a seed rise and fall together, beyond both intervals"
        f" more than runs of different seeds, {said}.",
        "",
    ]
    return [*lines, *_of_falls(pool)]


def _of_falls(pool: Pool) -> list[str]:
    found, other = falls(pool, _TREND), falls(pool, _OTHER_TREND)
    if not found:
        return []
    lines = [
        "What that does to the fall on Sokoban (`lost_success` of `baseline`, points):"
        " the other arm's detrended series is an estimate of the shared draw, which is"
        f" subtracted; with a trend of {_TREND} iterations, and of {_OTHER_TREND}.",
        "",
    ]
    rows = [
        [name, str(plain.count), points(plain), points(cleared), points(other[name][1])]
        for name, (plain, cleared) in found.items()
    ]
    head = ["arm", "seeds", "as measured", "without the draw", f"of {_OTHER_TREND}"]
    lines += numbers.table(head, rows)
    narrower, decided = [], []
    for name, (plain, cleared) in found.items():
        if cleared.high - cleared.low < plain.high - plain.low:
            narrower.append(name)
        if cleared.side and other[name][1].side == cleared.side:
            decided.append(f"{name} {'falls' if cleared.side > 0 else 'rises'}")
    said = f"narrows the interval of {listed(narrower) if narrower else 'no arm'}"
    then = listed(decided) if decided else "none of the falls is decided"
    return [*lines, f"**Finding.** Subtracting the shared draw {said}; {then}.", ""]
