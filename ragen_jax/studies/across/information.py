"""Mutual information and success, with the prompts of a checkpoint taken out."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from ragen_jax.studies import measures
from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.numbers import Mean, shown
from ragen_jax.studies.across.pool import Pool, Trained

_NUMBERS = {
    "mutual information": "trajectory/token/mutual",
    "its z-score": "trajectory/token/zscore",
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One checkpoint of a run."""

    arm: tuple[str, ...]
    step: int
    number: float
    success: float


def checkpoints(runs: Sequence[Trained], name: str) -> dict[int, list[Point]]:
    """Seed -> its runs' checkpoints that have a number, at steps that several have."""
    found: dict[int, list[Point]] = {}
    for run in runs:
        for diagnosis in run.record.diagnoses:
            number = diagnosis.get("information", {}).get(name)
            success = diagnosis["text"]["success"]
            if number is not None and success is not None:
                point = Point(run.arm, int(diagnosis["step"]), number, success)
                found.setdefault(run.seed, []).append(point)
    for seed, points in found.items():
        steps = [point.step for point in points]
        found[seed] = [point for point in points if steps.count(point.step) > 1]
    return {seed: points for seed, points in found.items() if points}


def within(points: Sequence[Point], *, ranks_first: bool = False) -> float:
    """Rank correlation of what effects of run and prompts leave of both; of one seed.

    Checkpoints of a seed at one step are measured on the same prompts, and are equally
    old: both go with the step's effect.

    Args:
      points: of a seed's runs.
      ranks_first: take the effects out of ranks, and correlate what they leave; so no
        single large value shifts the effects of its run and step.
    """
    arms, steps = [p.arm for p in points], [p.step for p in points]
    residuals = []
    for values in ([p.number for p in points], [p.success for p in points]):
        values = stats.rankdata(values).tolist() if ranks_first else values
        left, freedom = numbers.without_two_effects(arms, steps, values)
        if freedom < 1:
            return math.nan
        residuals.append(np.round(left, 9))  # Ties that rounding would have broken.
    if not ranks_first:
        return measures.spearman(residuals[0].tolist(), residuals[1].tolist())
    if residuals[0].std() == 0 or residuals[1].std() == 0:
        return math.nan
    return float(np.corrcoef(residuals)[0, 1])


def between(points: Sequence[Point]) -> tuple[float, float]:
    """Shares of the variance of success that go with the steps; of one seed.

    Of the variance within runs, and of what a straight line in time, the same for all
    runs, leaves of it: the steps of prompts that differ, rather than of age.
    """
    arms, success = [p.arm for p in points], [p.success for p in points]
    one = [0] * len(points)
    within_runs, _ = numbers.without_two_effects(arms, one, success)
    age, _ = numbers.without_two_effects(arms, one, [p.step for p in points])
    left, _ = numbers.without_two_effects(arms, [p.step for p in points], success)
    slope = float(within_runs @ age) / max(float(age @ age), 1e-12)
    totals = [float(x @ x) for x in (within_runs, within_runs - slope * age)]
    first, second = (
        1 - float(left @ left) / total if total > 1e-12 else math.nan
        for total in totals
    )
    return first, second


def plain(runs: Sequence[Trained], measure: str) -> Mean:
    """A study's own measure, averaged over the runs of a seed, then over seeds."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        value = measures.value(run.record, measure)
        if not math.isnan(value):
            by_seed.setdefault(run.seed, []).append(value)
    return numbers.student([float(np.mean(values)) for values in by_seed.values()])


def section(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Mutual information",
        "",
        "Do checkpoints whose thoughts tell more of their prompts succeed more, if the"
        " prompts and the runs are taken out?",
        "",
    ]
    groups: dict[str, list[Trained]] = {}
    for run in pool.runs:
        if run.record.diagnoses:
            same = "--same_prompts" in pool.diagnosed_by(run)
            title = f"{run.environment}, the same prompts" if same else run.environment
            groups.setdefault(title, []).append(run)
    if not groups:
        return [*lines, "No run has been diagnosed.", ""]
    lines += [
        "Rank correlations over checkpoints, with Student's interval over seeds: of"
        " each run alone, as the studies measure it; and of what effects of run and"
        " step leave, of the values or of their ranks. Unless they are said to be the"
        " same, each step has prompts of its own, which all arms of a seed share, so"
        " the effect of the step is that of the prompts and of the run's age. The share"
        " of the step is that of success's variance within runs; the last column is the"
        " share of what a straight line in time leaves of it, so rather that of the"
        " prompts.",
        "",
    ]
    rows = []
    signs: dict[str, dict[str, tuple[Mean, Mean]]] = {}
    for title, runs in sorted(groups.items()):
        row, mean = _rows(title, runs)
        rows += row
        signs[title] = mean
    head = ["environment", "runs", "seeds", "number", "each run", "without both"]
    head += ["of ranks without both"]
    head += ["share of the step", "beyond a line"]
    lines += numbers.table(head, rows)
    return [*lines, _finding(signs), ""]


def _rows(
    title: str, runs: Sequence[Trained]
) -> tuple[list[list[str]], dict[str, tuple[Mean, Mean]]]:
    """The rows of an environment, and both correlations without both, by number."""
    rows, means = [], {}
    for label, name in _NUMBERS.items():
        by_seed = checkpoints(runs, name)
        mean, of_ranks = (
            numbers.student([within(p, ranks_first=first) for p in by_seed.values()])
            for first in (False, True)
        )
        shares = [between(points) for points in by_seed.values()]
        measure = f"{name.split('/')[-1]}_correlation"
        cells = [shown(plain(runs, measure)), shown(mean), shown(of_ranks)]
        cells += [shown(numbers.student([s[i] for s in shares])) for i in (0, 1)]
        seeds = len({run.seed for run in runs})
        rows.append([title, str(len(runs)), str(seeds), label, *cells])
        means[label] = mean, of_ranks
    return rows, means


def _finding(found: Mapping[str, Mapping[str, tuple[Mean, Mean]]]) -> str:
    pairs = [
        (f"{title}: {label} goes with {'more' if mean.side > 0 else 'less'} success",)
        + (mean, of_ranks)
        for title, means in found.items()
        for label, (mean, of_ranks) in means.items()
        if mean.count
    ]
    if not pairs:
        return "**Finding.** No step of a seed has two runs to compare."
    decided = [(said, of_ranks) for said, mean, of_ranks in pairs if mean.side]
    count = sum(not math.isnan(mean.low) for _, mean, _ in pairs)
    said = f"Intervals that exclude 0, without both: {len(decided)} of {count}"
    if decided:
        named = "; ".join(said for said, _ in decided)
        kept = sum(bool(of_ranks.side) for _, of_ranks in decided)
        said += f" ({named}); of ranks {kept} of these do"
    same = len({mean.value > 0 for _, mean, _ in pairs}) == 1
    signs = "all means have one sign" if same else "the means have both signs"
    return f"**Finding.** {said}; {signs}."
