"""What a checkpoint holds besides arrays, and what a resumed run reads of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ragen_jax import settings as settings_lib
from ragen_jax.diagnostics import health
from ragen_jax.diagnostics.health import HealthState
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.run import Run

# Keys of `evaluation` that change a validation's success.
_DECISIVE = ("prompts", "rollouts", "temperature")
# What the remedy of a rollback changes (health.remedied).
_REMEDIED = {
    "optimizer": ("actor_lr", "schedule_updates"),
    "filter": ("fraction", "fraction_end"),
}


def info(
    settings: Settings,
    iteration: int,
    score: float | None,
    gaps: list[float],
    health_now: HealthState,
) -> dict[str, Any]:
    """The part of a checkpoint's info that the functions below read.

    Args:
      settings: of the run.
      iteration: iterations finished.
      score: validation success; None where it was not measured.
      gaps: nats, `update/logprob_gap` of the last iterations.
      health_now: the state of the health monitor.
    """
    return {
        "settings": settings_lib.to_dict(settings),
        "iteration": iteration,
        "validation": score,
        "logprob_gaps": gaps,
        "health": health.to_json(health_now),
    }


def best_score(saved: Checkpoints) -> float:
    """The highest validation success of the kept checkpoints; -1 without any."""
    step = saved.best_step()
    score = None if step is None else saved.read_info(step).get("validation")
    return -1.0 if score is None else score


def gaps(saved: Checkpoints, iteration: int) -> list[float]:
    """The last iterations' `update/logprob_gap` as saved after that iteration, nats."""
    if not iteration:
        return []
    return list(saved.read_info(iteration).get("logprob_gaps", []))


def health_state(
    saved: Checkpoints, iteration: int, rollbacks: int, settings: Settings
) -> HealthState:
    """The state of the health monitor as saved after that iteration.

    Without the validations so far if the settings now validate in another way: their
    success is not comparable, and a fall might be due to the settings alone.
    """
    if not iteration:
        return health.with_rollbacks(HealthState(), rollbacks)
    saved_info = saved.read_info(iteration)
    state = health.from_json(saved_info.get("health"))
    if changed_evaluation(settings, saved_info.get("settings", {})):
        state = health.without_validations(state)
    return health.with_rollbacks(state, rollbacks) if rollbacks else state


def remedied_run(run: Run, rollbacks: int) -> Run:
    """`run` with the settings that it continues with after that many rollbacks."""
    if not rollbacks:
        return run
    settings = health.remedied(run.settings, rollbacks)
    model = dataclasses.replace(run.model, settings=settings)
    return dataclasses.replace(run, model=model)


def changed_evaluation(settings: Settings, saved_settings: Mapping[str, Any]) -> str:
    """A warning if the settings of validations have changed; else "".

    Args:
      settings: of the run as it is resumed.
      saved_settings: those that the checkpoint was saved with, as `settings.to_dict`.
    """
    now = settings_lib.to_dict(settings)["evaluation"]
    old = saved_settings.get("evaluation", {})
    changed = [
        f"evaluation.{key} was {old[key]!r} and is {now[key]!r}"
        for key in _DECISIVE
        if old.get(key, now[key]) != now[key]
    ]
    if not changed or not settings.every.evaluate:
        return ""
    return (
        f"warning: {', '.join(changed)}: the alarm compares validations from here on"
        " with one another alone; the best checkpoint is still the one of the highest"
        " success, of whatever validation"
    )


def check_settings(
    settings: Settings, saved_info: Mapping[str, Any], where: str
) -> None:
    """Raises SettingsError for a checkpoint of a run with other settings.

    Such as one that was copied from another workdir.

    Args:
      settings: of the run as it is resumed, before any rollback's remedy.
      saved_info: of the checkpoint.
      where: the checkpoint, for the message.
    """
    if "settings" not in saved_info:
        return
    now, was = settings_lib.to_dict(settings), dict(saved_info["settings"])
    if saved_info.get("health", {}).get("rollbacks"):
        # A remedy's values depend also on settings that may differ, as `iterations`.
        for section, names in _REMEDIED.items():
            was[section] = was.get(section, {}) | {
                name: now[section][name] for name in names
            }
    remedy = "Delete that step's folder, if it was copied here,"
    settings_lib.check_same_run(was, now, where, remedy)


def check_health(saved_info: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a state of the health monitor that cannot be read.

    Args:
      saved_info: of the checkpoint.
      where: the checkpoint, for the message.
    """
    try:
        health.from_json(saved_info.get("health"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where} holds a state of the health monitor that this version cannot read"
            " (health in its info.json): take the version that saved it, or delete that"
            " folder to resume from an older step"
        ) from error


def changed_dtype(dtype: str, saved_dtype: str | None) -> str:
    """A warning if the forward pass is of another dtype than it was; else "".

    Args:
      dtype: that `model.compute_dtype` means on these devices.
      saved_dtype: the same when the checkpoint was saved; None: not known.
    """
    if saved_dtype in (None, dtype):
        return ""
    return (
        f"warning: the checkpoint was computed in {saved_dtype} and the run continues"
        f" in {dtype}, as model.compute_dtype = 'auto' means on these devices: the"
        " result will differ from that of a run in either alone"
    )


def changed_code(code: Mapping[str, str], saved_code: Mapping[str, str]) -> str:
    """What is to be said where the user's files are not as they were; "" if they are.

    Args:
      code: digest of each Python file that the settings name.
      saved_code: the same when the checkpoint was saved.
    """
    changed = [name for name in code if saved_code.get(name, code[name]) != code[name]]
    if not changed:
        return ""
    have = "has" if len(changed) == 1 else "have"
    return (
        f"warning: {', '.join(changed)} {have} changed since the checkpoint was saved:"
        " the result will differ from that of a run with either version alone"
    )
