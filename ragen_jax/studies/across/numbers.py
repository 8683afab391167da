"""Intervals, power and corrections for many tests, and how a page writes them."""

import bisect
import dataclasses
import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import special

from ragen_jax.studies import statistics

_MOST_SEEDS = 2000  # that a search for enough of them goes to


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval by Student's t; NaN where there is none."""

    value: float
    low: float
    high: float
    count: int  # of values, most often seeds

    @property
    def side(self) -> int:
        """1 if the interval lies above 0, -1 if below, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def student(values: Sequence[float]) -> Mean:
    """The mean of values that are not NaN, with Student's interval.

    Equal values, or fewer than two, have none, as in `ragen_jax.studies.statistics`.
    """
    known = np.array([v for v in values if not math.isnan(v)])
    if not len(known):
        return Mean(math.nan, math.nan, math.nan, 0)
    mean, half = float(known.mean()), statistics.student_half(known.tolist())
    return Mean(mean, mean - half, mean + half, len(known))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927, JASA 22); NaN of nothing."""
    if not count:
        return math.nan, math.nan
    z = special.ndtri((1 + statistics.LEVEL) / 2)
    share, spread = hits / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    half = float(half / (1 + spread))
    # Of no hits the lower bound is 0, whatever rounding left.
    return max(0.0, float(middle) - half), min(1.0, float(middle) + half)


def deviation_limits(deviation: float, freedom: int) -> tuple[float, float]:
    """The 95 % interval of a standard deviation of normal values, by chi-square."""
    tail = (1 - statistics.LEVEL) / 2
    low, high = (special.chdtri(freedom, p) for p in (tail, 1 - tail))
    return deviation * math.sqrt(freedom / low), deviation * math.sqrt(freedom / high)


def power(difference: float, deviation: float, seeds: int) -> float:
    """How often a paired t test at 5 % finds a true difference, by noncentral t.

    Args:
      difference: the true one.
      deviation: standard deviation of one seed's difference.
      seeds: how many, at least two.
    """
    bound = special.stdtrit(seeds - 1, (1 + statistics.LEVEL) / 2)
    shift = difference / deviation * math.sqrt(seeds)
    within = special.nctdtr(seeds - 1, shift, bound)
    below = special.nctdtr(seeds - 1, shift, -bound)
    # Far from 0 the lower tail is nothing, which SciPy may call NaN.
    return float(1 - within + np.nan_to_num(below))


def seeds_needed(difference: float, deviation: float, wanted: float = 0.8) -> int:
    """The fewest seeds with which the power is `wanted`; 0: more than 2000."""
    counts = range(2, _MOST_SEEDS + 1)
    place = bisect.bisect_left(
        counts, wanted, key=lambda seeds: power(difference, deviation, seeds)
    )
    return counts[place] if place < len(counts) else 0


def without_two_effects(
    rows: Sequence[Hashable], columns: Sequence[Hashable], values: Sequence[float]
) -> tuple[np.ndarray, int]:
    """What an effect of each row and one of each column leave of values.

    Least squares, so that a table may lack some of its cells.

    Args:
      rows: of each value, as an arm.
      columns: of each value, as a seed.
      values: of the cells that there are.

    Returns:
      float[n], the residuals, and their degrees of freedom.
    """
    design = np.concatenate([_indicators(rows), _indicators(columns)], axis=1)
    y = np.asarray(values, float)
    fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    return y - design @ fit, len(y) - int(rank)


def _indicators(labels: Sequence[Hashable]) -> np.ndarray:
    """float[n, labels], 1 at each value's label."""
    place = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.eye(len(place))[[place[label] for label in labels]]


def remaining_by_benjamini_hochberg(
    p_values: Sequence[float], level: float = 0.05
) -> int:
    """How many remain if at most `level` of those are to be errors, on average.

    Benjamini and Hochberg 1995, JRSS B 57: the most k whose k-th least p-value is at
    most level * k / m.
    """
    ordered = np.sort(np.asarray(p_values, float))
    ranks = np.arange(1, len(ordered) + 1)
    below = np.flatnonzero(ordered <= level * ranks / max(1, len(ordered)))
    return int(below[-1]) + 1 if len(below) else 0


# How they are written -----------------------------------------------------------------


def decimal(value: float, digits: int = 1) -> str:
    """A number; a rounded -0.0 has no sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def points(mean: Mean) -> str:
    """A difference of shares in percentage points, with its interval."""
    low, high = 100 * mean.low, 100 * mean.high
    return shown(Mean(100 * mean.value, low, high, mean.count), 1)


def shown(mean: Mean, digits: int = 2) -> str:
    """A mean with its interval."""
    if math.isnan(mean.value):
        return "none"
    if math.isnan(mean.low):
        return f"{decimal(mean.value, digits)} (no interval)"
    limits = f"[{decimal(mean.low, digits)}, {decimal(mean.high, digits)}]"
    return f"{decimal(mean.value, digits)} {limits}"


def share(hits: int, count: int) -> str:
    """As "2 of 41, 5 % [1, 16]", with Wilson's interval."""
    if not count:
        return "0 of 0"
    low, high = wilson(hits, count)
    return (
        f"{hits} of {count}, {100 * hits / count:.0f} % [{100 * low:.0f},"
        f" {100 * high:.0f}]"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines and an empty one."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]
