"""Intervals of measures, by a bootstrap over seeds and levels and by Student's t; p."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from ragen_jax.studies import measures
from ragen_jax.studies.run_record import RunRecord

DRAWS = 10_000  # of the bootstrap
LEVEL = 0.95  # of intervals
SIGNIFICANT = 0.05  # 1 - LEVEL: a smaller p leaves the margin out of the interval


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its 95 % intervals; NaN for those that there are not.

    The bootstrap's interval is far too narrow for few seeds. With two or three it
    reaches from the least value to the greatest, which misses the true mean of a
    symmetric distribution in 50 % or 25 % of cases; with five normal values it misses
    in 16 %. Student's t (Gosset 1908) is exact for any number of normal values.
    """

    mean: float
    low: float  # bootstrap
    high: float
    seeds: int  # that have the measure
    t_low: float = math.nan  # Student's t over seeds; needs two that differ
    t_high: float = math.nan
    left_out: int = 0  # seeds without the measure


def interval(runs: Sequence[RunRecord], measure: str) -> Interval:
    """The mean over seeds of a measure of one arm.

    The bootstrap draws seeds with replacement, and within each seed its levels, if the
    measure is known level by level. The interval of one seed is about levels alone.
    Runs without the measure are left out.
    """
    return _bootstrap(
        [
            _Sample(measures.value(r, measure), measures.by_level(r, measure))
            for r in runs
        ]
    )


def difference(
    left: Sequence[RunRecord], right: Sequence[RunRecord], measure: str
) -> Interval:
    """left - right, paired by seed, and by level: arms of a seed share test levels."""
    right_by_seed = {run.seed: run for run in right}
    samples = []
    for run in left:
        if (other := right_by_seed.get(run.seed)) is not None:
            value = measures.value(run, measure) - measures.value(other, measure)
            samples.append(_Sample(value, _level_differences(run, other, measure)))
    return _bootstrap(samples)


def _level_differences(
    left: RunRecord, right: RunRecord, measure: str
) -> np.ndarray | None:
    """float[levels], left - right; None unless both know the same number of levels."""
    by_level = [measures.by_level(run, measure) for run in (left, right)]
    if by_level[0] is None or by_level[1] is None:
        return None
    if len(by_level[0]) != len(by_level[1]):
        return None
    return by_level[0] - by_level[1]


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One seed's value of a measure, or its difference between two arms."""

    value: float
    levels: np.ndarray | None  # float[levels]; None if not known by level


def _bootstrap(samples: Sequence[_Sample]) -> Interval:
    """The mean of samples with both intervals, always by the same draws."""
    given = len(samples)
    samples = [sample for sample in samples if not math.isnan(sample.value)]
    left_out = given - len(samples)
    if not samples:
        return Interval(math.nan, math.nan, math.nan, 0, left_out=left_out)
    mean = float(np.mean([sample.value for sample in samples]))
    if len(samples) == 1 and samples[0].levels is None:
        return Interval(mean, math.nan, math.nan, 1, left_out=left_out)
    rng = np.random.default_rng(0)
    # Value of each seed in each draw: float[seeds, DRAWS], by levels drawn for it.
    drawn = np.empty((len(samples), DRAWS))
    for row, sample in zip(drawn, samples, strict=True):
        row[:] = sample.value
        if sample.levels is not None:
            # The mean of n levels drawn with replacement, for all draws at once.
            n = len(sample.levels)
            counts = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
            row[:] = counts @ sample.levels / n
    seeds = rng.integers(len(samples), size=(DRAWS, len(samples)))
    means = drawn[seeds, np.arange(DRAWS)[:, None]].mean(axis=1)  # float[DRAWS]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    half = student_half([sample.value for sample in samples])
    return Interval(
        mean,
        low=float(low),
        high=float(high),
        seeds=len(samples),
        t_low=mean - half,
        t_high=mean + half,
        left_out=left_out,
    )


def p_value(quantity: Interval, margin: float) -> float:
    """Two-sided p of Student's t over seeds, that the true mean is the margin.

    Below 0.05 where Student's interval does not contain the margin. NaN without one.
    """
    half = quantity.t_high - quantity.mean
    if math.isnan(half):
        return math.nan
    freedom = quantity.seeds - 1
    quantile = special.stdtrit(freedom, (1 + LEVEL) / 2)
    t = quantile * abs(quantity.mean - margin) / half
    return float(2 * special.stdtr(freedom, -t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p, corrected for there being others (Holm 1979, Scand. J. Statist. 6).

    Of n, the smallest counts n-fold, the next n - 1, and so on, but none less than one
    before it, nor above 1. Of those that are below 0.05 then, one or more is so by
    chance in at most 5 % of such families, however their members depend on each other.
    """
    corrected, highest = [0.0] * len(p_values), 0.0
    by_size = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for place, index in enumerate(by_size):
        highest = max(highest, (len(p_values) - place) * p_values[index])
        corrected[index] = min(1.0, highest)
    return corrected


def student_half(values: Sequence[float]) -> float:
    """Half the width of Student's interval; NaN for one value, or equal ones.

    Whole numbers of few seeds are often equal by chance: their sample variance of 0
    says nothing about the true one. A data file keeps six digits: values that differ
    by less are equal.
    """
    n = len(values)
    if n < 2 or np.allclose(values, values[0], rtol=1e-5, atol=2e-6):
        return math.nan
    quantile = special.stdtrit(n - 1, (1 + LEVEL) / 2)
    return float(quantile * np.std(values, ddof=1) / math.sqrt(n))
