"""How much two arms of a seed differ by chance, and how many seeds that asks for."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.studies import measures
from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.pool import Pool, Trained

_DIFFERENCES = (0.02, 0.05, 0.1, 0.2)  # of test success
_FAILED = 0.2  # of test success below a setting's median
_LEAST_FREEDOM = 4  # with fewer degrees an interval says next to nothing


@dataclasses.dataclass(frozen=True)
class Spread:
    """The standard deviation of a paired difference of test success in a setting."""

    title: str
    runs: int
    seeds: int
    freedom: int
    deviation: float


def _setting(run: Trained) -> tuple[str, str, float]:
    """Environment, schedule and rate; a mean over several environments is its own."""
    schedule = str(run.settings["optimizer.schedule"])
    several = len(run.record.tested)
    where = run.environment
    where += f", tested in {several} environments" * (several > 1)
    return where, schedule, float(run.settings["optimizer.actor_lr"])


def without_failures(runs: Sequence[Trained]) -> list[Trained]:
    """The runs of those arms of which none ends far below the median of all."""
    ends = {id(run): measures.value(run.record, "test_success") for run in runs}
    least = float(np.median(list(ends.values()))) - _FAILED
    failed = {run.arm for run in runs if ends[id(run)] < least}
    return [run for run in runs if run.arm not in failed]


def spread(title: str, tables: Sequence[Sequence[Trained]]) -> Spread | None:
    """Pooled over tables of arms by seeds; None if they tell next to nothing.

    The residuals are of effects of arm and seed, in each table. Of two arms with equal
    seeds the difference has twice their variance.
    """
    squares, freedom = 0.0, 0
    used: list[Trained] = []
    for runs in tables:
        ends = [measures.value(run.record, "test_success") for run in runs]
        left, degrees = numbers.without_two_effects(
            [run.arm for run in runs], [run.seed for run in runs], ends
        )
        if degrees:
            squares, freedom = squares + float(left @ left), freedom + degrees
            used += runs
    if freedom < _LEAST_FREEDOM or squares < 1e-9:
        return None
    seeds = len({run.seed for run in used})
    deviation = math.sqrt(2 * squares / freedom)
    return Spread(title, len(used), seeds, freedom, deviation)


def spreads(pool: Pool) -> list[Spread]:
    """Of each setting, with all arms and with those alone of which no run fails."""
    tables: dict[tuple[str, str, float], dict[int, list[Trained]]] = {}
    for run in pool.runs:
        if run.rewinds or math.isnan(measures.value(run.record, "test_success")):
            continue
        by_length = tables.setdefault(_setting(run), {})
        by_length.setdefault(run.settings["iterations"], []).append(run)
    found = []
    for (environment, schedule, rate), by_length in sorted(tables.items()):
        every = list(by_length.values())
        sound = [without_failures(runs) for runs in every]
        title = f"{environment}, {schedule}, {rate:g}"
        whole = spread(title, every)
        part = spread(f"{title}; no failing arm", [runs for runs in sound if runs])
        found += [whole] if whole else []
        found += [part] if part and whole and part.runs < whole.runs else []
    return found


def section(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Power",
        "",
        "How many seeds does a difference between two arms need to be seen?",
        "",
    ]
    found = spreads(pool)
    if not found:
        return [*lines, "No setting has two arms and two seeds.", ""]
    lines += [
        "The standard deviation (SD) of the difference of test success between two"
        " arms of one seed, in points: from what effects of arm and seed leave of a"
        " setting's table (environment, what is tested, schedule and rate; iterations"
        " apart, then pooled), times the root of 2; its interval by chi-square. Then"
        " the seeds that give a paired t test at 5 % a power of 80 %, by noncentral t,"
        " if the true difference is 2, 5, 10 or 20 points, and the power of three seeds"
        " for 5 points. A failing arm is one of which a run ends more than"
        f" {100 * _FAILED:.0f} points below the median of its setting and number of"
        " iterations. Leaving those out looks at the outcome, and makes SDs of settings"
        " in which runs fail by chance too small; keeping them makes values far from"
        " normal, for which the seeds are a rough guide. Runs that roll back are left"
        f" out, and settings with fewer than {_LEAST_FREEDOM} degrees of freedom.",
        "",
    ]
    wanted = [f"{100 * difference:.0f} points" for difference in _DIFFERENCES]
    head = ["setting", "runs", "seeds", "SD", *wanted, "three seeds, 5 points"]
    lines += numbers.table(head, [_row(each) for each in found])
    enough: list[Spread] = []
    too_few: list[Spread] = []
    for each in found:
        fits = numbers.power(0.05, each.deviation, 3) >= 0.8
        (enough if fits else too_few).append(each)
    lines += [
        "**Finding.** With three seeds a true difference of 5 points is found in at"
        f" least 80 % of cases in {len(enough)} of {len(found)} settings"
        f"{_named(enough)}; in the others it takes"
        f" {_range([numbers.seeds_needed(0.05, s.deviation) for s in too_few])}."
    ]
    return [*lines, ""]


def _named(found: Sequence[Spread]) -> str:
    return f" ({'; '.join(each.title for each in found)})" if found else ""


def _range(seeds: Sequence[int]) -> str:
    """As "from 4 to 25 seeds"; a search that found none comes last."""
    if not seeds:
        return "no more"
    ordered = sorted(seeds, key=lambda n: n or math.inf)
    if ordered[0] == ordered[-1]:
        return f"{_needed(ordered[0])} seeds"
    return f"from {_needed(ordered[0])} to {_needed(ordered[-1])} seeds"


def _needed(seeds: int) -> str:
    return str(seeds) if seeds else "above 2000"


def _row(each: Spread) -> list[str]:
    limits = numbers.deviation_limits(each.deviation, each.freedom)
    deviation, low, high = (numbers.decimal(100 * x) for x in (each.deviation, *limits))
    needed = [numbers.seeds_needed(d, each.deviation) for d in _DIFFERENCES]
    return [
        each.title,
        str(each.runs),
        str(each.seeds),
        f"{deviation} [{low}, {high}], {each.freedom} degrees",
        *(_needed(n) for n in needed),
        f"{100 * numbers.power(0.05, each.deviation, 3):.0f} %",
    ]
