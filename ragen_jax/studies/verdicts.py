"""Verdicts on a study's claims, computed from the intervals of its data."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ragen_jax.studies.definition import Claim
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.studies.statistics import (
    SIGNIFICANT,
    Interval,
    difference,
    holm,
    interval,
    p_value,
)

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided with these seeds"
_WEAKLY = "by the bootstrap alone"
WEAKLY_HOLDS, WEAKLY_FAILS = f"{HOLDS} {_WEAKLY}", f"{FAILS} {_WEAKLY}"
# For a verdict by the bootstrap alone, or on a measure that some seeds lack.
_FEWEST_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim, the quantity it is about, and the verdict on it."""

    claim: Claim
    quantity: Interval  # left - right, or left alone
    verdict: str  # one of the five above

    @property
    def p(self) -> float:
        """Student's two-sided p against the margin; NaN without a t interval."""
        return p_value(self.quantity, self.claim.margin)


def corrected(verdicts: Sequence[Verdict]) -> tuple[int, int, int]:
    """How a family of claims fares after Holm's correction.

    Returns:
      How many have a p; how many of these hold or do not hold, by both intervals; and
      of how many of the latter p is still below 0.05 when it is corrected for all.
    """
    family = [verdict for verdict in verdicts if not math.isnan(verdict.p)]
    by_holm = holm([verdict.p for verdict in family])
    decided = [
        p
        for verdict, p in zip(family, by_holm, strict=True)
        if verdict.verdict in (HOLDS, FAILS)
    ]
    return len(family), len(decided), sum(p < SIGNIFICANT for p in decided)


def judge(claim: Claim, runs: Mapping[str, Sequence[RunRecord]]) -> Verdict:
    """The verdict on one claim.

    It holds if both 95 % intervals, bootstrap and Student's t, lie wholly on the
    claimed side of the margin, and does not hold if both lie on the other. If only the
    bootstrap's does, and there are at least three seeds, the verdict says so: with
    three seeds and no levels, it errs in 25 % of comparisons in which nothing differs.
    Otherwise the claim is undecided. With fewer than two seeds it always is: the levels
    of one run say nothing about another run. With fewer than three it is where a
    further seed lacks the measure: which seeds have one is no matter of chance.

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
    by_bootstrap = _side(claim, quantity.low, quantity.high)
    by_student = _side(claim, quantity.t_low, quantity.t_high)
    fewest = _FEWEST_SEEDS if quantity.left_out else 2
    if quantity.seeds < fewest or by_bootstrap == 0:
        return UNDECIDED
    if by_student == by_bootstrap:
        return HOLDS if by_bootstrap > 0 else FAILS
    if quantity.seeds < _FEWEST_SEEDS:
        return UNDECIDED
    return WEAKLY_HOLDS if by_bootstrap > 0 else WEAKLY_FAILS


def _side(claim: Claim, low: float, high: float) -> int:
    """1: the interval is on the claimed side of the margin; -1: on the other.

    0 if it contains the margin, or there is no interval (NaN).
    """
    low, high = low - claim.margin, high - claim.margin
    if claim.relation == "less":
        low, high = -high, -low
    if low > 0:
        return 1
    return -1 if high < 0 else 0
