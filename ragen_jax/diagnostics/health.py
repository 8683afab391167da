"""Decisions on a run's health: the alarm, and RAGEN's early stops.

`observe` is pure: it maps a state and an iteration's metrics to the next state and a
Decision, which the trainer carries out. Checkpoints hold the state as JSON.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ragen_jax.diagnostics import alarm
from ragen_jax.diagnostics.alarm import (
    COLLAPSE,
    HEALTHY,
    MEMORY,
    START,
    AlarmState,
    Verdict,
)
from ragen_jax.settings import update_counts
from ragen_jax.settings.choices import EARLY_STOPS, EarlyStops
from ragen_jax.settings.schema import FilterSettings, HealthSettings, Settings

CONTINUE, WARN, STOP, ROLLBACK = "continue", "warn", "stop", "rollback"
_REMEDY_FACTOR = 0.5  # of the learning rate, or of the share of prompts kept
# Strategies of a filter that keep fewer prompts the smaller its fraction is.
_KEEP_A_SHARE = ("top_fraction", "top_p", "top_p_softmax", "within_group")
_MOST_ROLLBACKS = 3  # then the run stops


@dataclasses.dataclass(frozen=True)
class StopCounts:
    """What the early stops have counted."""

    baseline: tuple[float, ...] = ()  # in-group std of the first iterations
    low_spread: int = 0  # iterations in a row
    low_validation: int = 0  # validations in a row
    empty: int = 0  # iterations in a row whose filter kept no group
    skipped: float = 0.0  # `update/skipped_empty` of the iteration before


@dataclasses.dataclass(frozen=True)
class HealthState:
    """Everything that is remembered about a run's health."""

    alarm: AlarmState = AlarmState()
    stops: StopCounts = StopCounts()
    # Last iteration with no signal that rang within MEMORY iterations; at a collapse,
    # the last one before its first sign, if that is earlier.
    healthy_until: int = 0
    rollbacks: int = 0
    warned: bool = False  # of the present collapse


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after an iteration."""

    action: str  # CONTINUE, WARN, STOP or ROLLBACK
    sentence: str  # why, for a person; "" to CONTINUE
    verdict: Verdict
    # ROLLBACK returns to the latest checkpoint that is no later than this.
    healthy_until: int = 0

    def metrics(self) -> dict[str, float]:
        """The verdict as numbers: `health/level` 0 healthy, 1 watch, 2 collapse."""
        level = {HEALTHY: 0.0, COLLAPSE: 2.0}.get(self.verdict.level, 1.0)
        return {"health/level": level, "health/signs": float(len(self.verdict.ringing))}


def observe(
    state: HealthState,
    iteration: int,
    metrics: Mapping[str, float | None],
    asked: HealthSettings,
) -> tuple[HealthState, Decision]:
    """Takes in one iteration's metrics; returns the next state and what to do.

    Args:
      state: after the iteration before; `HealthState()` at first.
      iteration: finished iterations.
      metrics: by name; `validation/success` only where it was measured.
      asked: the section `health` of the settings.
    """
    watched, verdict = alarm.update(state.alarm, iteration, metrics)
    stops, reason = _count_stops(state.stops, metrics, EARLY_STOPS[asked.early_stops])
    rang = [track.rang_at for _, track in watched.tracks if track.rang_at >= 0]
    healthy_until = verdict.healthy_until or state.healthy_until
    is_known = verdict.healthy_until > 0
    if not is_known and not any(iteration - at <= MEMORY for at in rang):
        # A collapse without a signal is a fall since the beginning of the run.
        healthy_until = START if verdict.level == COLLAPSE else iteration
    began = watched.calm_before_signs(iteration)
    if not is_known and verdict.level == COLLAPSE and began is not None:
        healthy_until = min(healthy_until, began)
    state = dataclasses.replace(
        state, alarm=watched, stops=stops, healthy_until=healthy_until
    )
    if reason:
        sentence = (
            f"{reason} (health.early_stops = {asked.early_stops}): training stops, the"
            " state saved; begin another run with a lower optimizer.actor_lr, or with"
            " health.early_stops = none"
        )
        return state, Decision(STOP, sentence, verdict)
    if verdict.level != COLLAPSE:
        is_over = verdict.level == HEALTHY
        state = dataclasses.replace(state, warned=state.warned and not is_over)
        return state, Decision(CONTINUE, "", verdict)
    action, sentence = _react(state, verdict, asked.on_collapse)
    state = dataclasses.replace(state, warned=True)
    return state, Decision(action, sentence, verdict, state.healthy_until)


def _react(state: HealthState, verdict: Verdict, on_collapse: str) -> tuple[str, str]:
    """(action, sentence) at a collapse."""
    if on_collapse == "watch" or (on_collapse == "warn" and state.warned):
        return CONTINUE, ""
    if on_collapse == "warn":
        return WARN, f"{verdict.sentence} (health.on_collapse = warn)"
    if on_collapse == "stop":
        return STOP, f"{verdict.sentence}: training stops (health.on_collapse = stop)"
    if state.rollbacks >= _MOST_ROLLBACKS:
        return STOP, (
            f"{verdict.sentence}, after {state.rollbacks} rollbacks: training stops;"
            " begin another run with a lower optimizer.actor_lr"
        )
    return ROLLBACK, verdict.sentence


def with_rollbacks(state: HealthState, rollbacks: int) -> HealthState:
    """A checkpoint's state, in a run that has rolled back `rollbacks` times."""
    return dataclasses.replace(state, rollbacks=rollbacks, warned=False)


def without_validations(state: HealthState) -> HealthState:
    """The state as if the run had not been validated yet."""
    return dataclasses.replace(
        state,
        alarm=dataclasses.replace(state.alarm, validation=AlarmState().validation),
        stops=dataclasses.replace(state.stops, low_validation=0),
    )


def remedied(settings: Settings, rollbacks: int) -> Settings:
    """The settings that a run continues with after `rollbacks` rollbacks.

    Each rollback halves the share of prompts that the filter keeps, if `health.remedy`
    is "filter" and the filter can keep fewer; otherwise the actor's learning rate. With
    neither changed the run would repeat the same collapse. Resuming calls this too.

    Args:
      settings: at the beginning of the run.
      rollbacks: 0 leaves the settings as they are.
    """
    for _ in range(rollbacks):
        tighter = _tighter(settings)
        if settings.health.remedy == "filter" and _keeps_fewer(settings, tighter):
            # Fewer groups make fewer updates. The length of schedules stays that of the
            # run as it was: a shorter one would be over at once, with rates of 0.
            total = settings.optimizer.schedule_updates
            total = total or update_counts.updates_expected(settings)
            settings = dataclasses.replace(settings, filter=tighter)
            # One that is all warm-up would be refused as a setting.
            total = max(total, update_counts.least_schedule(settings))
            changes: dict[str, Any] = dict(schedule_updates=total)
        else:
            changes = dict(actor_lr=settings.optimizer.actor_lr * _REMEDY_FACTOR)
        optimizer = dataclasses.replace(settings.optimizer, **changes)
        settings = dataclasses.replace(settings, optimizer=optimizer)
    return settings


def _tighter(settings: Settings) -> FilterSettings:
    """The filter with half its share; within a group, of at least two members."""
    chosen, least = settings.filter, 0.0
    if chosen.strategy == "within_group":
        least = 2 / settings.rollout.group_size
    end = chosen.fraction_end
    return dataclasses.replace(
        chosen,
        fraction=max(chosen.fraction * _REMEDY_FACTOR, least),
        fraction_end=end if end == -1 else end * _REMEDY_FACTOR,
    )


def _keeps_fewer(settings: Settings, tighter: FilterSettings) -> bool:
    """Whether the tighter filter keeps fewer; assumed if that depends on scores."""
    filter_settings = settings.filter
    if filter_settings.strategy in ("top_fraction", "within_group"):
        after = dataclasses.replace(settings, filter=tighter)
        room = update_counts.room_for_episodes
        return room(after) < room(settings)
    return filter_settings.strategy in _KEEP_A_SHARE


def remedy_sentence(settings: Settings, step: int) -> str:
    """What one more rollback, to iteration `step`, changes, in words.

    Args:
      settings: in force now, with the remedies of earlier rollbacks.
      step: of the checkpoint; 0 for the beginning.
    """
    changed = remedied(settings, 1)
    if changed.filter != settings.filter:
        what = f"filter.fraction = {changed.filter.fraction:.3g}"
    else:
        what = f"optimizer.actor_lr = {changed.optimizer.actor_lr:.3g}"
    where = f"the checkpoint after iteration {step}" if step else "the beginning"
    return f"back to {where}, from now on with {what}"


# RAGEN's early stops -----------------------------------------------------------------


def _count_stops(
    counts: StopCounts, metrics: Mapping[str, float | None], rules: EarlyStops
) -> tuple[StopCounts, str]:
    """The next counts, and why the run has to stop; "" if it need not."""
    skipped = metrics.get("update/skipped_empty") or 0.0
    is_empty = skipped > counts.skipped
    spread = metrics.get("filter/reward_std")
    baseline, low = counts.baseline, counts.low_spread
    if spread is not None and math.isfinite(spread) and not is_empty:
        if len(baseline) < rules.spread_baseline:
            baseline = (*baseline, spread)
        else:
            limit = rules.spread_share * sum(baseline) / len(baseline)
            low = low + 1 if spread < limit else 0
    success, few = metrics.get("validation/success"), counts.low_validation
    if success is not None and math.isfinite(success):
        few = few + 1 if success < rules.validation_success else 0
    new = StopCounts(
        baseline=baseline,
        low_spread=low,
        low_validation=few,
        empty=counts.empty + 1 if is_empty else 0,
        skipped=skipped,
    )
    return new, _reason(new, rules)


def _reason(counts: StopCounts, rules: EarlyStops) -> str:
    if 0 < rules.spread_iterations <= counts.low_spread:
        return (
            f"the in-group std of the return lay below {rules.spread_share:.0%} of its"
            f" first {rules.spread_baseline} iterations' mean for"
            f" {counts.low_spread} iterations"
        )
    if 0 < rules.validation_times <= counts.low_validation:
        return (
            f"validation success lay below {rules.validation_success:.0%}"
            f" {counts.low_validation} times running"
        )
    if 0 < rules.empty_iterations <= counts.empty:
        return f"the filter kept no group in {counts.empty} iterations running"
    return ""


# Through checkpoints -----------------------------------------------------------------


def to_json(state: HealthState) -> dict[str, Any]:
    """The state, ready for JSON."""
    return {
        "alarm": alarm.to_json(state.alarm),
        "stops": dataclasses.asdict(state.stops),
        "healthy_until": state.healthy_until,
        "rollbacks": state.rollbacks,
        "warned": state.warned,
    }


def from_json(saved: Mapping[str, Any] | None) -> HealthState:
    """The state of `to_json`; None or {}: nothing seen yet."""
    if not saved:
        return HealthState()
    stops = dict(saved["stops"])
    return HealthState(
        alarm=alarm.from_json(saved["alarm"]),
        stops=StopCounts(**stops | {"baseline": tuple(stops["baseline"])}),
        healthy_until=saved["healthy_until"],
        rollbacks=saved["rollbacks"],
        warned=saved["warned"],
    )
