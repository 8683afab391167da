"""What announces a decline of validation success, and how often it is a false alarm."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ragen_jax.diagnostics import validation_decline
from ragen_jax.studies import measures
from ragen_jax.studies.across import bandit_std, numbers
from ragen_jax.studies.across.numbers import share
from ragen_jax.studies.across.pool import Pool, Trained
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.utils.words import counted, listed

_FEWEST = 8  # validations of a run that is looked at
# As the alarm's, which asks for three standard errors, too.
_MARGIN = validation_decline.MARGIN  # of success, below the best validation
_RUNNING = validation_decline.TIMES  # validations in a row below it

SIGNS: Mapping[str, Callable[[RunRecord], float]] = {
    "in-group std": lambda run: measures.onset(run, "filter/reward_std"),
    "entropy": lambda run: measures.departure(run, "rollout/entropy", 1 / 2, 2),
    "gradient norm": lambda run: measures.spike(run, "update/actor_grad_norm"),
    "distinct thoughts": lambda run: measures.departure(
        run, "health/distinct_thoughts", 1 / 2, math.inf
    ),
}


def decline(run: RunRecord) -> float:
    """The iteration of the first validation of a decline; NaN without one.

    It is the first of _RUNNING validations that lie below the best so far by more than
    _MARGIN.
    """
    iterations, values = run.series("validation/success")
    if not len(values):
        return math.nan
    # A data file keeps six digits: what is just at the margin is not beyond it.
    low = np.maximum.accumulate(values) - values > _MARGIN + 1e-6
    for first in range(len(low) - _RUNNING + 1):
        if low[first : first + _RUNNING].all():
            return float(iterations[first])
    return math.nan


@dataclasses.dataclass(frozen=True)
class Sign:
    """How a sign fares: counts of runs."""

    name: str
    before: int  # declining runs in which it comes before the decline
    declining: int
    at_all: int  # other runs in which it comes
    by_then: int  # ... no later than the median decline
    others: int

    @property
    def is_told_apart(self) -> bool:
        """Whether Wilson's interval of `before` lies above that of `at_all`."""
        if not (self.declining and self.others):
            return False
        low, _ = numbers.wilson(self.before, self.declining)
        return low > numbers.wilson(self.at_all, self.others)[1]


def tally(runs: Sequence[RunRecord]) -> list[Sign]:
    """Each sign's counts."""
    declines = [(run, decline(run)) for run in runs]
    declining = [(run, at) for run, at in declines if not math.isnan(at)]
    others = [run for run, at in declines if math.isnan(at)]
    median = float(np.median([at for _, at in declining])) if declining else math.nan
    found = []
    for name, sign in SIGNS.items():
        times = [sign(run) for run in others]  # A comparison with NaN is false.
        found.append(
            Sign(
                name,
                before=sum(sign(run) < at for run, at in declining),
                declining=len(declining),
                at_all=sum(not math.isnan(time) for time in times),
                by_then=sum(time <= median for time in times),
                others=len(others),
            )
        )
    return found


def section(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## What announces a decline",
        "",
        "Does a sign come before validation success declines, and only then?",
        "",
        "All runs without a rollback that validate in one environment, at least"
        f" {_FEWEST} times. A decline is"
        f" validation success more than {100 * _MARGIN:.0f} points below its best so"
        f" far, {_RUNNING} validations running; it is dated by the first. Signs are"
        " those of the studies' measures `std_lead` (below half of its peak),"
        " `entropy_lead` (below half or above twice its beginning), `gradient_lead`"
        " (above three times its median so far) and `thoughts_lead` (below half of its"
        " beginning). A run that does not decline has more time for a false alarm than"
        " one has before its decline; the last column counts those alarms alone that"
        " come no later than the median decline. Shares with Wilson's intervals, runs"
        " counted as independent, which those of a seed are not quite.",
        "",
    ]
    chosen: dict[str, list[Trained]] = {}
    for run in pool.runs:
        _, values = run.record.series("validation/success")
        is_one = len(run.record.tested) == 1  # Of several the mean is validated.
        if is_one and not run.rewinds and len(values) >= _FEWEST:
            chosen.setdefault(run.environment, []).append(run)
    for name, runs in sorted(chosen.items()):
        lines += _environment(name, runs, pool)
    if not chosen:
        lines += [f"No run has {_FEWEST} validations in one environment.", ""]
    return [*lines, *bandit_std.part(pool)]


def _environment(name: str, runs: Sequence[Trained], pool: Pool) -> list[str]:
    found = tally([run.record for run in runs])
    first, seeds = found[0], {run.seed for run in runs}
    verb = "declines" if first.declining == 1 else "decline"
    declining = [run for run in runs if not math.isnan(decline(run.record))]
    studies = collections.Counter(map(pool.study_of, declining)).most_common()
    of_which = ", ".join(f"{count} of `{study}`" for study, count in studies)
    lines = [
        f"{name}: {counted(len(runs), 'run')} of {counted(len(seeds), 'seed')}, of"
        f" which {first.declining} {verb}{f' ({of_which})' if of_which else ''}.",
        "",
    ]
    head = ["sign", "before a decline", "without a decline, at all", "by the median"]
    rows = [
        [
            sign.name,
            share(sign.before, sign.declining),
            share(sign.at_all, sign.others),
            share(sign.by_then, sign.others) if sign.declining else "",
        ]
        for sign in found
    ]
    return [*lines, *numbers.table(head, rows), _finding(name, found), ""]


def _finding(name: str, found: Sequence[Sign]) -> str:
    if not found[0].declining:
        alarms = [sign.name for sign in found if sign.at_all]
        said = listed(alarms) if alarms else "none"
        return (
            f"**Finding.** On {name} no run declines; signs that come all the same:"
            f" {said}."
        )
    told = [sign.name for sign in found if sign.is_told_apart]
    if told:
        signs = "the sign of" if len(told) == 1 else "the signs of"
        verb = "comes" if len(told) == 1 else "come"
        return (
            f"**Finding.** On {name} {signs} {listed(told)} {verb} more often, beyond"
            " both intervals, before a decline than where none follows."
        )
    silent = [sign.name for sign in found if sign.before == sign.at_all == 0]
    also = f" ({listed(silent)} never)" if silent else ""
    return (
        f"**Finding.** On {name} no sign comes before a decline more often, beyond both"
        f" intervals, than where none follows{also}."
    )
