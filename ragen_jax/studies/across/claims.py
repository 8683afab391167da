"""How many of the studies' verdicts remain if so many are asked for."""

import collections
import dataclasses
import math

import numpy as np

from ragen_jax.studies import statistics, verdicts
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
    """All claims whose runs have a Student's interval."""
    found = []
    for name, study in pool.studies.items():
        records = collections.defaultdict(list)
        for arm, runs in pool.arms(name).items():
            records[arm] = [run.record for run in runs.values()]
        for claim in study.claims:
            verdict = verdicts.judge(claim, records)
            if not math.isnan(verdict.p):
                above = verdict.quantity.mean > claim.margin
                holds = above == (claim.relation == "greater")
                found.append(Judged(name, claim, verdict.p, holds))
    return found


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
