"""Verdicts on a study's claims, computed from the intervals of its data."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ragen_jax.studies.definition import Claim
from ragen_jax.studies.measures import RunRecord
from ragen_jax.studies.statistics import Interval, difference, interval

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided with these seeds"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim, the quantity it is about, and what the data say of it."""

    claim: Claim
    quantity: Interval  # left - right, or left alone
    verdict: str  # HOLDS, FAILS or UNDECIDED


def judge(claim: Claim, runs: Mapping[str, Sequence[RunRecord]]) -> Verdict:
    """The verdict on one claim.

    It holds if the whole 95 % interval lies on the claimed side of the margin, does not
    hold if the whole interval lies on the other, and is undecided otherwise, and always
    with fewer than two seeds: one run's levels say nothing about another run.

    Args:
      claim: whose arms are in `runs`; an arm without a finished run has an empty list.
      runs: arm -> finished runs.
    """
    left = runs[claim.left]
    if claim.right is None:
        quantity = interval(left, claim.measure)
    else:
        quantity = difference(left, runs[claim.right], claim.measure)
    return Verdict(claim, quantity, _verdict(claim, quantity))


def _verdict(claim: Claim, quantity: Interval) -> str:
    low, high = quantity.low - claim.margin, quantity.high - claim.margin
    if claim.relation == "less":
        low, high = -high, -low
    if quantity.seeds < 2 or math.isnan(low) or math.isnan(high):
        return UNDECIDED
    if low > 0:
        return HOLDS
    return FAILS if high < 0 else UNDECIDED
