"""How many of the studies' verdicts remain if so many are asked for."""

import dataclasses
import math

import numpy as np

from ragen_jax.studies import measures, statistics
from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.pool import Pool
from ragen_jax.studies.definition import Claim
from ragen_jax.utils.words import counted


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim by Student's t alone."""

    study: str
    claim: Claim
    p_value: float  # two-sided, of the margin
    holds: bool  # the mean is on the claimed side

    @property
    def is_decided(self) -> bool:
        """Whether the 95 % interval leaves out the margin."""
        return self.p_value < statistics.SIGNIFICANT


def judged(pool: Pool) -> list[Judged]:
    """All claims whose runs have a Student's interval.

    As `verdicts.judge`, without its bootstrap, which would take most of a minute.
    """
    found = []
    for name, study in pool.studies.items():
        arms = pool.arms(name)
        for claim in study.claims:
            left = _values(arms.get(claim.left, {}), claim.measure)
            if claim.right is not None:
                right = _values(arms.get(claim.right, {}), claim.measure)
                left = {s: left[s] - right[s] for s in sorted(set(left) & set(right))}
            mean = numbers.student(list(left.values()))
            if not math.isnan(mean.low):
                above = mean.value > claim.margin
                holds = above == (claim.relation == "greater")
                found.append(Judged(name, claim, p_value(mean, claim.margin), holds))
    return found


def _values(arm, measure: str) -> dict[int, float]:
    """Seed -> measure, of the runs that have it."""
    values = {seed: measures.value(run.record, measure) for seed, run in arm.items()}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def p_value(mean: numbers.Mean, margin: float) -> float:
    """Of a two-sided t test that the true mean is the margin."""
    interval = statistics.Interval(
        mean.value, math.nan, math.nan, mean.count, mean.low, mean.high
    )
    return statistics.p_value(interval, margin)


def section(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Many claims",
        "",
        "How many verdicts would remain if the number of claims were allowed for?",
        "",
    ]
    found = judged(pool)
    if not found:
        return [*lines, "No claim has an interval.", ""]
    p_values = [each.p_value for each in found]
    decided = [each for each in found if each.is_decided]
    holding = sum(each.holds for each in decided)
    holm = sum(p < statistics.SIGNIFICANT for p in statistics.holm(p_values))
    expected = numbers.remaining_by_benjamini_hochberg(p_values)
    studies = len({each.study for each in found})
    lines += [
        f"{counted(len(found), 'claim')}, in {studies} of the studies, have a Student's"
        " interval over paired seeds. (A page's verdict asks for the bootstrap's"
        " interval too, and for three seeds where others lack the measure.) Claims"
        " share runs and are not independent; for Holm that does not matter, for"
        " Benjamini and Hochberg negative dependence could.",
        "",
    ]
    rows = [
        ["judged", str(len(found))],
        ["hold: the interval is on the claimed side", str(holding)],
        ["do not hold: it is on the other", str(len(decided) - holding)],
        ["remain after Holm at 5 %", str(holm)],
        ["remain after Benjamini and Hochberg at 5 %", str(expected)],
    ]
    lines += numbers.table(["claims", "number"], rows)
    by_chance = 0.05 * len(found)
    lines += [
        f"**Finding.** {len(decided)} of {len(found)} are decided one by one, where"
        f" {by_chance:.1f} would be if nothing differed from its margin. {expected} are"
        " decided if of the decisions 5 % may be wrong on average, and"
        f" {holm} if the chance of a single wrong one is to be 5 %.",
        "",
    ]
    if holm:
        order = np.argsort(p_values, kind="stable")[:holm]
        lines += ["Those that remain after Holm:", ""]
        lines += [
            f"* `{found[i].study}`: {found[i].claim.text} "
            f"{'Holds' if found[i].holds else 'Does not hold'}, p = {p_values[i]:.1g}."
            for i in order
        ]
    return [*lines, ""]
