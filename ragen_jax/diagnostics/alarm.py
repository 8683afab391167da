"""The Echo Trap alarm: an online change detector over a run's indicators.

Each series has a direction in which it is unhealthy (Signal). A one-sided CUSUM (Page
1954, Biometrika 41) adds up how far the series lies in that direction from what its own
recent past predicts, in robust standard deviations, and rings above a threshold:
  z_t = sign * (x_t - expected_t) / spread
  S_t = max(0, S_{t-1} + clip(z_t, -CLIP, CLIP) - slack), at most twice the threshold
The reasons: training changes its series slowly all the time, so the reference is not
the run's beginning but the WINDOW values before the newest LAG. It is their median,
continued by their Theil-Sen slope if that points in the unhealthy direction: a steady
drift is expected to go on, and only what is faster counts. Outcomes (success, return)
get no slope: any fall of them is unhealthy. Medians ignore outliers in the reference,
the clip bounds new ones. For a lasting shift CUSUM is the quickest test at a given rate
of false alarms (Lorden 1971, Ann. Math. Stat. 42); a threshold on single values would
wait for a large one. While a signal is in doubt its reference is held, so that a slow
collapse does not become the new normal; after HOLD iterations the signal starts afresh.

One ringing signal means WATCH. COLLAPSE needs two things that the Echo Trap shows
together (RAGEN, arXiv:2504.20073, section 3: in-group std falls first, then the return,
with spikes of the gradient): an outcome rings, and one of the other signals is at least
half-way to ringing, or was within the last MEMORY iterations.

A run that falls from its first iterations on has no past to compare with. So it is also
a COLLAPSE if an outcome and the in-group spread have both stayed below half of their
initial values in each of the RECENT newest iterations. (Their mean would do so by
chance when a batch has few prompts, each of which wins much or nothing.) A third kind,
a decline of validation success, is in validation_decline.py.

Host side, plain numbers: the state is frozen, and `update` returns the next one;
`to_json` and `from_json` carry it through checkpoints. health.py calls this.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from ragen_jax.diagnostics import validation_decline
from ragen_jax.utils.words import listed

WINDOW, LAG = 20, 4  # iterations: values of a reference, and between it and now
LEAST = 10  # values that a reference needs before its signal is looked at
HOLD = 40  # iterations for which a reference is held at most
CLIP = 4.0  # most that one iteration adds, in standard deviations
MEMORY = 20  # iterations for which an early sign stays on record
START, RECENT = 3, 5  # first and newest iterations, where these are compared
SPREAD = "filter/reward_std"
_MAD_TO_STD = 1.4826  # of a normal distribution
_KEPT = WINDOW + LAG
_LONGEST_DRIFT = 15.0  # iterations for which a drift is expected to go on
_VALIDATION = "validation"  # the key of its record in JSON, beside the metrics'
_SUSPECT = 1 / 2  # of the threshold: counts as a sign beside an outcome that rings

HEALTHY, WATCH, COLLAPSE = "healthy", "watch", "collapse"


@dataclasses.dataclass(frozen=True)
class Signal:
    """One series and what is unhealthy about it."""

    metric: str
    sign: int  # +1: rising is unhealthy; -1: falling; 0: either
    floor: float  # least spread, in the metric's unit: smaller changes do not matter
    relative_floor: float = 0.0  # the same as a share of the reference's median
    is_outcome: bool = False  # what a collapse costs, not an early sign of it
    slack: float = 1.0  # standard deviations of each iteration that do not count
    threshold: float = 15.0  # standard deviations summed up


SIGNALS = (
    Signal("train/return_with_penalty", -1, 0.02, 0.05, is_outcome=True),
    Signal("train/success", -1, 0.03, 0.05, is_outcome=True),
    Signal(SPREAD, -1, 0.02, 0.1),
    Signal("rollout/entropy", 0, 0.02, 0.1),
    Signal("rollout/reply_tokens", 0, 1.0, 0.1),
    Signal("update/actor_grad_norm", 1, 0.05, 0.25),
    Signal("rollout/valid_reply_rate", -1, 0.02),
    Signal("health/distinct_thoughts", -1, 0.02, 0.05),
    Signal("health/overlap_across", 1, 0.02, 0.05),
    Signal("health/first_action_entropy", -1, 0.05, 0.05),
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The prediction from the values of a window."""

    median: float  # in the metric's unit
    spread: float  # robust standard deviation about the line; 0: too few values yet
    slope: float  # Theil-Sen, per iteration
    distance: float  # iterations from the window's middle to the value looked at

    def z(self, value: float, sign: int) -> float:
        """Standard deviations of `value` in the direction `sign`, beyond the drift."""
        drift = max(0.0, sign * self.slope) * min(self.distance, _LONGEST_DRIFT)
        return (sign * (value - self.median) - drift) / self.spread


@dataclasses.dataclass(frozen=True)
class Track:
    """The history of one signal."""

    values: tuple[float, ...] = ()  # the last WINDOW + LAG, the newest last
    sums: tuple[float, float] = (0.0, 0.0)  # CUSUM upward and downward
    held: "Reference | None" = None  # kept while in doubt
    rang_at: int = -1  # the last iteration at which it rang; -1: never
    suspect_at: int = -1  # the last at which it was half-way to that
    first: tuple[float, ...] = ()  # the first START values
    calm_at: int = -1  # the last iteration at which its sums were 0; -1: not known
    calm_before: int = -1  # `calm_at` when it was last suspect: it changed later

    def has_halved(self, floor: float) -> bool:
        """Whether it began well above `floor` and now stays below half of that."""
        if len(self.first) < START or len(self.values) < START + RECENT:
            return False
        began = statistics.median(self.first)
        return began > 2 * floor and max(self.values[-RECENT:]) < began / 2

    def is_on_record(self, iteration: int) -> bool:
        """Whether it was suspect within the last MEMORY iterations."""
        return self.suspect_at >= 0 and iteration - self.suspect_at <= MEMORY


@dataclasses.dataclass(frozen=True)
class AlarmState:
    """Everything that the alarm remembers."""

    tracks: tuple[tuple[str, Track], ...] = ()  # by metric, in the order of SIGNALS
    validation: validation_decline.Record = validation_decline.Record()

    def calm_before_signs(self, iteration: int) -> int | None:
        """The last iteration before the first sign on record began; None without one.

        A sign is only seen when enough deviations have added up. It began when its sum
        last left 0 (Page's estimate of the change point).
        """
        began = [
            track.calm_before
            for _, track in self.tracks
            if track.is_on_record(iteration) and track.calm_before >= 0
        ]
        return min(began, default=None)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one iteration's metrics say."""

    level: str  # HEALTHY, WATCH or COLLAPSE
    ringing: tuple[str, ...]  # metrics that ring now, or that a collapse is read from
    sentence: str  # for a person; "" when healthy
    healthy_until: int = 0  # last iteration known to be healthy; 0: not known


def update(
    state: AlarmState,
    iteration: int,
    metrics: Mapping[str, float | None],
    signals: tuple[Signal, ...] = SIGNALS,
) -> tuple[AlarmState, Verdict]:
    """Takes in one iteration's metrics; returns the next state and a verdict.

    Args:
      state: after the iteration before; `AlarmState()` at first.
      iteration: finished iterations, rising from call to call.
      metrics: by name. A signal whose metric is absent, None or not finite is kept.
      signals: which series, and what is unhealthy about each.
    """
    tracks = dict(state.tracks)
    ringing = []
    for signal in signals:
        value = metrics.get(signal.metric)
        track = tracks.get(signal.metric, Track())
        if value is None or not math.isfinite(value):
            tracks[signal.metric] = track
            continue
        track, rings = _follow(track, signal, iteration, float(value))
        tracks[signal.metric] = track
        if rings:
            ringing.append(signal)
    new = AlarmState(
        tracks=tuple((s.metric, tracks[s.metric]) for s in signals),
        validation=validation_decline.update(state.validation, iteration, metrics),
    )
    return new, _judge(new, iteration, ringing, signals)


def _follow(
    track: Track, signal: Signal, iteration: int, value: float
) -> tuple[Track, bool]:
    """The next Track after one value, and whether its signal rings."""
    reference = track.held or _reference(track.values, signal)
    if track.held:
        reference = dataclasses.replace(reference, distance=reference.distance + 1)
    up, down = track.sums
    if reference.spread > 0:
        up = _add(up, reference.z(value, 1), signal) if signal.sign >= 0 else 0.0
        down = _add(down, reference.z(value, -1), signal) if signal.sign <= 0 else 0.0
    rings = max(up, down) > signal.threshold
    is_suspect = max(up, down) > _SUSPECT * signal.threshold
    in_doubt = max(up, down) > signal.threshold / 3
    held = reference if in_doubt else None
    calm_before = track.calm_at if is_suspect else track.calm_before
    if held and held.distance > HOLD + LAG + WINDOW / 2:
        # These values are the new normal; no collapse began with them.
        held, up, down, calm_before = None, 0.0, 0.0, -1
    return (
        Track(
            values=(*track.values, value)[-_KEPT:],
            sums=(up, down),
            held=held,
            rang_at=iteration if rings else track.rang_at,
            suspect_at=iteration if is_suspect else track.suspect_at,
            first=(*track.first, value)[:START],
            calm_at=track.calm_at if max(up, down) else iteration,
            calm_before=calm_before,
        ),
        rings,
    )


def _add(total: float, z: float, signal: Signal) -> float:
    """The next CUSUM; held at twice the threshold, so that recovery is seen soon."""
    step = max(-CLIP, min(CLIP, z)) - signal.slack
    return min(max(0.0, total + step), 2 * signal.threshold)


def _reference(values: tuple[float, ...], signal: Signal) -> Reference:
    """The reference from the values before the newest LAG.

    The spread is the MAD about the line, scaled to the standard deviation of a normal
    distribution, and no smaller than the signal's floors.
    """
    past = values[:-LAG]
    distance = (len(past) - 1) / 2 + LAG + 1
    if len(past) < LEAST:
        return Reference(0.0, 0.0, 0.0, distance)
    median = statistics.median(past)
    slope = 0.0 if signal.is_outcome else _theil_sen(past)
    middle = (len(past) - 1) / 2
    residuals = [x - slope * (i - middle) for i, x in enumerate(past)]
    center = statistics.median(residuals)
    mad = _MAD_TO_STD * statistics.median(abs(x - center) for x in residuals)
    floor = max(signal.floor, signal.relative_floor * abs(median))
    return Reference(center, max(mad, floor), slope, distance)


def _theil_sen(values: tuple[float, ...]) -> float:
    """The median slope of all pairs, in values per step (Sen 1968, JASA 63)."""
    return statistics.median(
        (values[j] - values[i]) / (j - i)
        for i in range(len(values))
        for j in range(i + 1, len(values))
    )


def _judge(state: AlarmState, iteration: int, ringing, signals) -> Verdict:
    """The verdict by the state after `iteration`, of signals that ring in it."""
    by_name = dict(state.tracks)
    outcomes = [s.metric for s in ringing if s.is_outcome]
    recent = [
        s.metric
        for s in signals
        if not s.is_outcome and by_name[s.metric].is_on_record(iteration)
    ]
    names = tuple(s.metric for s in ringing)
    if outcomes and recent:
        sentence = (
            f"collapse at iteration {iteration}: {listed(outcomes)} fell, and"
            f" {listed(recent)} left the usual range within {MEMORY} iterations"
        )
        return Verdict(COLLAPSE, names, sentence)
    halved = [s.metric for s in signals if by_name[s.metric].has_halved(s.floor)]
    lost = [s.metric for s in signals if s.is_outcome and s.metric in halved]
    if lost and SPREAD in halved:
        lost = [*lost, SPREAD]
        sentence = (
            f"collapse at iteration {iteration}: {listed(lost)} are less than half of"
            " what they were when the run began"
        )
        return Verdict(COLLAPSE, tuple(lost), sentence)
    if state.validation.is_decline:
        return Verdict(
            COLLAPSE,
            (*names, validation_decline.SUCCESS),
            f"collapse at iteration {iteration}: {state.validation.sentence}",
            state.validation.best_at,
        )
    if names:
        sentence = (
            f"watch at iteration {iteration}: {listed(names)} left the usual range of"
            f" the last {WINDOW} iterations"
        )
        return Verdict(WATCH, names, sentence)
    return Verdict(HEALTHY, (), "")


def to_json(state: AlarmState) -> dict[str, Any]:
    """The state, ready for JSON."""
    tracks = {name: dataclasses.asdict(track) for name, track in state.tracks}
    return tracks | {_VALIDATION: dataclasses.asdict(state.validation)}


def from_json(saved: Mapping[str, Any] | None) -> AlarmState:
    """The state of `to_json`; None or {}: nothing seen yet."""
    tracks = []
    saved = dict(saved or {})
    validated = saved.pop(_VALIDATION, {})  # Older checkpoints have none.
    for name, fields in saved.items():
        held = fields["held"]
        track = Track(
            values=tuple(fields["values"]),
            sums=tuple(fields["sums"]),
            held=None if held is None else Reference(**held),
            rang_at=fields["rang_at"],
            suspect_at=fields["suspect_at"],
            # Older checkpoints have none of these.
            first=tuple(fields.get("first", ())),
            calm_at=fields.get("calm_at", -1),
            calm_before=fields.get("calm_before", -1),
        )
        tracks.append((name, track))
    return AlarmState(tuple(tracks), validation_decline.Record(**validated))


def replay(records) -> list[Verdict]:
    """The verdicts on a whole run, one for each of its records in metrics.jsonl."""
    state, verdicts = AlarmState(), []
    for record in records:
        state, verdict = update(state, int(record["iteration"]), record)
        verdicts.append(verdict)
    return verdicts
