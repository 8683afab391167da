"""The measures that a study takes of a finished run: one number, or one per level."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.studies.run_record import RunRecord

_SMOOTHED = 5  # iterations of the running mean that peaks and onsets are read from
_LOST = 0.5  # share of its peak below which a series has collapsed
_SPIKE = 3  # multiple of the median so far above which a gradient norm is a spike


# Of the test --------------------------------------------------------------------------


def _test(run: RunRecord, environment: str, read: Callable) -> float:
    """The mean of what `read` takes from each environment's test; "": of all."""
    values = [read(test) for test in run.tests(environment)]
    return float(np.mean(np.array(values, float))) if values else math.nan


def _levels(test: Mapping[str, Any], measure: str) -> np.ndarray | None:
    """float[levels], a measure of each; None where the test kept none."""
    after, before = test.get("after_by_level"), test.get("before_by_level")
    if after is None or before is None:
        return None
    values = {
        "test_success": np.asarray(after, float),
        "test_before": np.asarray(before, float),
        "test_gain": np.asarray(after, float) - np.asarray(before, float),
    }
    return values[measure]


# Of the curves ------------------------------------------------------------------------


def _last_tenth(run: RunRecord, name: str) -> float:
    _, values = run.series(name)
    last = values[-max(1, len(values) // 10) :]
    return float(last.mean()) if len(last) else math.nan


def _validation(run: RunRecord, choose: Callable[[np.ndarray], float]) -> float:
    return _chosen(run, "validation/success", choose)


def _chosen(run: RunRecord, name: str, choose: Callable[[np.ndarray], float]) -> float:
    _, values = run.series(name)
    return float(choose(values)) if len(values) else math.nan


def smoothed(values: np.ndarray) -> np.ndarray:
    """The running mean of _SMOOTHED values; the one mean of all if there are fewer.

    Args:
      values: float[n].

    Returns:
      float[max(1, n - _SMOOTHED + 1)], entry i that of values i to i + _SMOOTHED - 1.
    """
    width = min(_SMOOTHED, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def _peak(run: RunRecord, name: str) -> float:
    _, values = run.series(name)
    return float(smoothed(values).max()) if len(values) else math.nan


def fall(values: np.ndarray) -> float:
    """The mean of a series' highest tenth minus that of its last tenth; NaN if empty.

    The maximum of noisy means is too high: a constant success of 0.76, measured on
    eight levels an iteration, would have "lost" 0.11. So the values at even places
    choose the highest tenth and those at odd places measure it, then the reverse, and
    the mean of both counts. Of equal tenths the first is taken.

    Args:
      values: float[n], in order.
    """
    width = max(2, len(values) // 10)
    if len(values) < width:
        return 0.0 if len(values) else math.nan
    tenths = np.lib.stride_tricks.sliding_window_view(values, width)[::2]
    even, odd = (tenths[:, first::2].mean(axis=1) for first in (0, 1))
    highest = (odd[_first_highest(even)] + even[_first_highest(odd)]) / 2
    return float(highest - values[-width:].mean())


def _first_highest(means: np.ndarray) -> int:
    """Index of the first maximum, to five digits: a data file keeps six."""
    return int(np.isclose(means, means.max(), rtol=1e-5).argmax())


def _collapsed(run: RunRecord) -> float:
    peak, last = _peak(run, "train/success"), _last_tenth(run, "train/success")
    return math.nan if math.isnan(peak) else float(last < _LOST * peak)


def onset(run: RunRecord, name: str) -> float:
    """The first iteration after its peak at which a smoothed series is below half.

    NaN if it never falls to half of the peak. The iteration is the mean's last one.
    """
    iterations, values = run.series(name)
    if not len(values):
        return math.nan
    means = smoothed(values)
    peak = int(means.argmax())
    below = np.flatnonzero(means[peak:] < _LOST * means[peak])
    if not len(below):
        return math.nan
    return float(iterations[peak + below[0] + len(values) - len(means)])


def departure(run: RunRecord, name: str, least: float, most: float) -> float:
    """The first iteration at which a smoothed series leaves a range.

    The range is `least` to `most` times the series' first running mean. NaN if it
    stays within.
    """
    iterations, values = run.series(name)
    means = smoothed(values) if len(values) else values
    begun = means[:1]  # May be 0: times an infinite `most` it would be NaN.
    return _first(iterations, (means < least * begun) | (means / most > begun))


def spike(run: RunRecord, name: str) -> float:
    """The first iteration at which a series is above _SPIKE times its median so far.

    Looked for after the first _SMOOTHED values. NaN if there is none.
    """
    iterations, values = run.series(name)
    medians = [np.median(values[:end]) for end in range(_SMOOTHED, len(values))]
    return _first(iterations, values[_SMOOTHED:] > _SPIKE * np.array(medians))


def _first(iterations: np.ndarray, is_so: np.ndarray) -> float:
    """The iteration of the first True; the flags belong to the last iterations."""
    if not is_so.any():
        return math.nan
    without_flag = len(iterations) - len(is_so)
    return float(iterations[without_flag + is_so.argmax()])


def _lead(sign: Callable[[RunRecord], float]) -> Callable[[RunRecord], float]:
    """A measure: iterations from a sign to the onset of the fall of success."""
    return lambda run: onset(run, "train/success") - sign(run)


def _first_collapse(run: RunRecord) -> float:
    if run.rollbacks:  # The records no longer hold what a rollback discarded.
        return float(run.rollbacks[0]["from"])
    iterations, levels = run.series("health/level")
    collapses = iterations[levels >= 2]
    return float(collapses[0]) if len(collapses) else math.nan


# Of diagnoses -------------------------------------------------------------------------


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The rank correlation of two series; NaN for fewer than three, or equal, values.

    Spearman 1904: Pearson's correlation of the ranks, ties at their mean rank.
    """
    pairs = np.array([p for p in zip(x, y, strict=True) if np.isfinite(p).all()])
    if len(pairs) < 3:
        return math.nan
    x_ranks, y_ranks = (_ranks(column) for column in pairs.T)
    if x_ranks.std() == 0 or y_ranks.std() == 0:
        return math.nan
    return float(np.corrcoef(x_ranks, y_ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _with_success(run: RunRecord, part: str, name: str) -> float:
    """Spearman's correlation of a number with success over a run's checkpoints."""
    diagnoses = [d for d in run.diagnoses if name in d.get(part, {})]
    pairs = [(d[part][name], d["text"]["success"]) for d in diagnoses]
    return spearman(*np.array(pairs, float).reshape(-1, 2).T)  # None becomes NaN.


# The table ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a run."""

    meaning: str  # with the unit
    read: Callable[[RunRecord, str], float]  # NaN: this run has none
    is_share: bool = False  # shown in percent
    is_change: bool = False  # of a share: shown in percentage points
    by_environment: bool = False  # NAME/LABEL takes it of one environment


def _curve(name: str) -> Callable[[RunRecord, str], float]:
    return lambda run, _: _last_tenth(run, name)


def _share(meaning: str, read: Callable[[RunRecord], float]) -> Measure:
    return Measure(meaning, lambda run, _: read(run), is_share=True)


def _lost(meaning: str, read: Callable[[RunRecord], float]) -> Measure:
    return dataclasses.replace(_share(meaning, read), is_change=True)


def _number(meaning: str, read: Callable[[RunRecord], float]) -> Measure:
    return Measure(meaning, lambda run, _: read(run))


def _of_test(meaning: str, read: Callable, *, is_change: bool = False) -> Measure:
    return Measure(
        meaning,
        lambda run, environment: _test(run, environment, read),
        is_share=True,
        is_change=is_change,
        by_environment=True,
    )


MEASURES: dict[str, Measure] = {
    "test_success": _of_test(
        "share of unseen levels solved at the end",
        lambda test: test["after"].get("success"),
    ),
    "test_before": _of_test(
        "that share before training", lambda test: test.get("before", {}).get("success")
    ),
    "test_gain": _of_test(
        "change of that share from before training to after",
        lambda test: test.get("gain"),
        is_change=True,
    ),
    "best_validation": _share(
        "highest validation success", lambda run: _validation(run, np.max)
    ),
    "last_validation": _share(
        "validation success of the last evaluation",
        lambda run: _validation(run, lambda x: x[-1]),
    ),
    "drop": _lost(
        "highest minus last validation success",
        lambda run: _validation(run, lambda x: x.max() - x[-1]),
    ),
    "peak_success": _share(
        "training success, highest mean of five iterations running",
        lambda run: _peak(run, "train/success"),
    ),
    "last_success": _share(
        "training success, mean of the last tenth",
        lambda run: _last_tenth(run, "train/success"),
    ),
    "lost_success": _lost(
        "training success, highest tenth of the run minus the last; which tenth is the"
        " highest is read from every second iteration, how high it is from the others",
        lambda run: fall(run.series("train/success")[1]),
    ),
    "lost_validation": _lost(
        "validation success, highest tenth of the evaluations (two at least) minus the"
        " last, read as lost_success is: one evaluation chooses, another measures",
        lambda run: fall(run.series("validation/success")[1]),
    ),
    "collapsed": _share(
        "runs whose last_success is below half of their peak_success", _collapsed
    ),
    "last_return": Measure(
        "task return of training episodes, mean of the last tenth",
        _curve("train/return"),
    ),
    "last_entropy": Measure(
        "nats a reply token, mean of the last tenth", _curve("rollout/entropy")
    ),
    "last_reply_tokens": Measure(
        "tokens a reply, mean of the last tenth", _curve("rollout/reply_tokens")
    ),
    "last_reward_std": Measure(
        "in-group standard deviation, mean of the last tenth",
        _curve("filter/reward_std"),
    ),
    "kept_groups": _share(
        "share of the groups that the filter kept, of the episodes where it drops"
        " single ones; mean over the run",
        lambda run: _chosen(run, "filter/kept_fraction", np.mean),
    ),
    "last_valid": _share(
        "valid replies, mean of the last tenth",
        lambda run: _last_tenth(run, "rollout/valid_reply_rate"),
    ),
    "last_grounded": _share(
        "places that thoughts name correctly, mean of the last tenth",
        lambda run: _last_tenth(run, "rollout/grounded"),
    ),
    "last_distinct_thoughts": _share(
        "different thoughts among thoughts, mean of the last tenth",
        lambda run: _last_tenth(run, "health/distinct_thoughts"),
    ),
    "last_grad_norm": Measure(
        "norm of the actor's gradient before clipping, mean of the last tenth",
        _curve("update/actor_grad_norm"),
    ),
    "success_onset": _number(
        "iteration at which training success, a mean of five, is first below half of"
        " its peak; runs where it never is are left out",
        lambda run: onset(run, "train/success"),
    ),
    "std_lead": _number(
        "iterations from the same point of the in-group standard deviation to that of"
        " training success (success_onset); runs without both are left out",
        _lead(lambda run: onset(run, "filter/reward_std")),
    ),
    "entropy_lead": _number(
        "the same from where the entropy, a mean of five, is first below half or above"
        " twice of its beginning",
        _lead(lambda run: departure(run, "rollout/entropy", 1 / 2, 2)),
    ),
    "gradient_lead": _number(
        "the same from where the actor's gradient norm is first above three times its"
        " median so far",
        _lead(lambda run: spike(run, "update/actor_grad_norm")),
    ),
    "thoughts_lead": _number(
        "the same from where the share of different thoughts, a mean of five, is first"
        " below half of its beginning",
        _lead(lambda run: departure(run, "health/distinct_thoughts", 1 / 2, math.inf)),
    ),
    "alarm_at": _number(
        "iteration of the alarm's first collapse, one that was gone back over too; runs"
        " without one are left out",
        _first_collapse,
    ),
    "mutual_correlation": _number(
        "Spearman's correlation over a run's checkpoints of the mutual information of"
        " prompts and thoughts (trajectories, a token) with success",
        lambda run: _with_success(run, "information", "trajectory/token/mutual"),
    ),
    "zscore_correlation": _number(
        "the same of the mutual information's z-score",
        lambda run: _with_success(run, "information", "trajectory/token/zscore"),
    ),
    "entropy_correlation": _number(
        "the same of the entropy of thoughts given their prompts",
        lambda run: _with_success(
            run, "information", "trajectory/token/conditional_entropy"
        ),
    ),
    "seconds": _number(
        "of an iteration, median",
        lambda run: _chosen(run, "time/iteration_seconds", np.median),
    ),
}


def parse(name: str) -> tuple[Measure | None, str]:
    """(measure, environment) of NAME or NAME/LABEL; (None, "") if it is unknown."""
    base, slash, environment = name.partition("/")
    measure = MEASURES.get(base)
    if measure is None or (slash and not (measure.by_environment and environment)):
        return None, ""
    return measure, environment


def value(run: RunRecord, name: str) -> float:
    """One measure of a run; NaN if the run does not have it."""
    measure, environment = parse(name)
    assert measure is not None, name
    return measure.read(run, environment)


def by_level(run: RunRecord, name: str) -> np.ndarray | None:
    """float[levels], the measure of each test level; None if it has no levels."""
    base, _, environment = name.partition("/")
    tests = run.tests(environment)
    if not MEASURES[base].by_environment or len(tests) != 1:
        return None
    return _levels(tests[0], base)
