"""The in-group standard deviation that success on Bandit implies by arithmetic."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ragen_jax.studies import measures
from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.pool import Pool, Trained
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.utils.words import counted

_GRID = np.linspace(0, 1, 201)  # of success
_STD = "filter/reward_std"


@functools.lru_cache
def expected(low_reward: float, pays: float, size: int) -> np.ndarray:
    """float[_GRID], the expected sample std of a group's returns, by success.

    Of `size` episodes a binomial number pulls the high-risk arm, which pays 1 with
    probability `pays` and else 0; the others get `low_reward`. Summed over all cases.
    """
    pulls, wins = np.meshgrid(np.arange(size + 1), np.arange(size + 1), indexing="ij")
    total = wins + low_reward * (size - pulls)
    squares = wins + low_reward**2 * (size - pulls)
    variance = np.maximum(0, squares - total**2 / size) / (size - 1)
    # float[pulls], given how many pull it; where more win than pull, nothing.
    given = (stats.binom.pmf(wins, pulls, pays) * np.sqrt(variance)).sum(axis=1)
    chances = stats.binom.pmf(np.arange(size + 1)[:, None], size, _GRID)
    return given @ chances


def halves_at(values: np.ndarray) -> float:
    """The highest success below which `values` are under half of that at success 1."""
    return float(_GRID[np.flatnonzero(values < values[-1] / 2)[-1]])


def predicted(run: Trained) -> RunRecord:
    """A record whose std is what training success implies, nothing else."""
    settings = run.settings
    values = expected(
        settings["env.low_reward"],
        settings["env.high_probability"],
        settings["rollout.group_size"],
    )
    iterations, success = run.record.series("train/success")
    std = np.interp(success, _GRID, values)
    pairs = zip(iterations.tolist(), std.tolist(), strict=True)
    records = [{"iteration": at, _STD: value} for at, value in pairs]
    return RunRecord(run.seed, records, {})


def part(pool: Pool) -> list[str]:
    """Lines below the signs of a decline; none without runs of Bandit."""
    runs = [
        run
        for run in pool.runs
        if run.environment == "Bandit"
        and not run.rewinds
        and run.settings["rollout.group_size"] > 1
        and len(run.record.series(_STD)[1])
    ]
    if not runs:
        return []
    first = runs[0].settings
    low, pays = first["env.low_reward"], first["env.high_probability"]
    at = halves_at(expected(low, pays, first["rollout.group_size"]))
    # From the mean of squares, h pays + (1 - h) low², minus the mean's square.
    slope = pays + low**2 - 2 * low * pays
    lines = [
        "Could the std announce a decline on Bandit at all? The low-risk arm pays"
        f" {low:g}, the high-risk one, whose choice is the success h, 1 with"
        f" probability {pays:g}. So a return's variance is {slope:g} h -"
        f" {(pays - low) ** 2:g} h², and the std is concave in h: if all prompts"
        " succeed alike, the expected sample std of"
        f" {first['rollout.group_size']} episodes falls below half of its value at"
        f" success 1 only below a success of {100 * at:.1f} %; if each prompt succeeds"
        " always or never, it is proportional to success and halves with it. So"
        " `std_lead` is compared with what success alone lets one expect, prompts"
        f" alike, in the {counted(len(runs), 'run')} of Bandit without a rollback and"
        " with groups of two or more, each by its own group size.",
        "",
    ]
    onsets = [
        Onsets(
            std=measures.onset(run.record, _STD),
            implied=measures.onset(predicted(run), _STD),
            success=measures.onset(run.record, "train/success"),
        )
        for run in runs
    ]
    return [*lines, _finding(at, onsets), ""]


@dataclasses.dataclass(frozen=True)
class Onsets:
    """Iterations at which series of a run fall below half of their peak; or NaN."""

    std: float
    implied: float  # of the std that success implies
    success: float


def _finding(at: float, onsets: Sequence[Onsets]) -> str:
    implied = [each for each in onsets if not math.isnan(each.implied)]
    not_implied = [each for each in onsets if math.isnan(each.implied)]
    rule = "cannot" if at <= 0.5 else "may"
    both = [each.std - each.implied for each in implied if not math.isnan(each.std)]
    before = [e for e in onsets if e.std < e.success]  # False where one is NaN.
    fallen = [e for e in onsets if not math.isnan(e.success)]
    apart = f", at the median {np.median(both):+.0f} iterations from it" if both else ""
    return (
        f"**Finding.** In expectation the std {rule} halve before success does, if"
        " prompts stay alike, or stay at always or never; a change from the first to"
        " the second lowers the std beside that. Success"
        f" halves in {len(fallen)} runs, and the std before it in {len(before)} of"
        " these. Where success implies that the std halves, it does in"
        f" {numbers.share(len(both), len(implied))}{apart}; where not, in"
        f" {numbers.share(len(_seen(not_implied)), len(not_implied))}."
    )


def _seen(onsets: Sequence[Onsets]) -> list[Onsets]:
    return [each for each in onsets if not math.isnan(each.std)]
