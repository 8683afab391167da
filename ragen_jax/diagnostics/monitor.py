"""A run's health metrics, and the few episodes that it records.

Called by the trainer after each iteration, and around the final test.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ragen_jax.diagnostics import episode_log, indicators, scored_batch
from ragen_jax.diagnostics.agreement import thought_agreement
from ragen_jax.diagnostics.episode_log import TokenNumbers
from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.transcripts import Reader
from ragen_jax.learning.batch import ScoredRecord
from ragen_jax.learning.filters import counted_penalty
from ragen_jax.learning.train_state import TrainState
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.rollout.rollout import Rollout
from ragen_jax.rollout.tasks import Task
from ragen_jax.starpo import Programs
from ragen_jax.trajectory import Episodes, Rows


@dataclasses.dataclass(frozen=True)
class Monitor:
    """The programs of a run's instruments; each compiles at its first call."""

    measure: Callable[..., dict[str, jax.Array]]  # of (rows, episodes, tables)
    score: Callable[..., ScoredRecord]  # see `make_scoring`
    readers: tuple[Reader, ...]  # one per environment of a batch
    labels: tuple[str, ...]  # names of these environments


def make_monitor(run: Any, plan: UpdatePlan) -> Monitor:
    """The monitor of a run. Compiles nothing yet.

    Args:
      run: `training.run.Run`.
      plan: of its update.
    """
    rollout = run.settings.rollout
    actions = tuple(
        0 if task.env.read_action else len(task.env.action_names) for task in run.tasks
    )
    measure = functools.partial(
        indicators.indicators,
        actions=actions,
        groups=rollout.prompts,
        reply_tokens=run.plan.reply_tokens,
        format_penalty=counted_penalty(run.settings),
    )
    return Monitor(
        measure=jax.jit(measure),
        score=scored_batch.make_scoring(plan, keep_all=False),
        readers=readers_of(run, run.tasks),
        labels=tuple(task.label for task in run.tasks),
    )


def readers_of(run: Any, tasks: Sequence[Task]) -> tuple[Reader, ...]:
    """One reader per environment, which decodes its recorded tokens to text."""
    model = run.model
    return tuple(
        transcripts.make_reader(model.tokenizer, task.env, task.dialogue)
        for task in tasks
    )


def tables(run: Any) -> tuple:
    """The reply parser's tables, one per environment, for `Monitor.measure`."""
    return tuple(tokens.replies for tokens in run.tokens)


def measure(monitor: Monitor, run: Any, rollout: Rollout) -> dict[str, float]:
    """The `health/` metrics of a batch; {} if `health.indicators` is off."""
    if not run.settings.health.indicators:
        return {}
    measured = jax.device_get(
        monitor.measure(rollout.rows, rollout.episodes, tables(run))
    )
    values = {f"health/{name}": float(value) for name, value in measured.items()}
    if jax.process_count() == 1:  # Of several processes none holds whole rows.
        record = jax.device_get((rollout.rows, rollout.episodes))
        agreement = thought_agreement(monitor.readers, *record)
        if not math.isnan(agreement):
            values["health/thought_answer_agreement"] = agreement
    return values


def record(
    monitor: Monitor,
    run: Any,
    programs: Programs,
    state: TrainState,
    rollout: Rollout,
    workdir: Path,
    iteration: int,
) -> None:
    """Adds some of an iteration's episodes to the log, every `health.record_every`.

    Values, and the advantages computed from them, come from the critic after the
    update. A run of several processes records nothing, as none holds whole rows.

    Args:
      monitor, run: of the run.
      programs: with the frozen weights and the reference.
      state: after the iteration.
      rollout: of the iteration.
      workdir: where the log is.
      iteration: finished iterations.
    """
    options = run.settings.health
    is_due = options.record_every > 0 and iteration % options.record_every == 0
    if not is_due or jax.process_count() > 1:
        return
    # Filter and coefficients may follow schedules: those of this iteration's update.
    as_trained = state.replace(iteration=state.iteration - 1)
    scored = monitor.score(
        as_trained, programs.frozen, programs.reference, rollout.rows, rollout.episodes
    )
    rows, episodes, kept, batch = jax.device_get(
        (rollout.rows, rollout.episodes, scored.kept, scored.batch)
    )
    values = batch.old_values if run.settings.has_critic else None
    described = episode_log.describe(
        monitor.readers,
        monitor.labels,
        rows,
        episodes,
        episode_log.choose_episodes(
            episodes.reward.sum(axis=1),
            episodes.group,
            episodes.environment,
            options.record_episodes,
        ),
        iteration=iteration,
        phase="train",
        numbers=TokenNumbers(kept.rows, batch.advantages, values),
    )
    episode_log.append(workdir, described)


def recorder(run: Any, workdir: Path, phase: str, iteration: int) -> Callable:
    """An `on_batch` for `evaluator.evaluate` that records the first test episodes.

    It takes (label, first level, rows, episodes). Before and after training these are
    episodes of the same levels.

    Args:
      run: with `evaluated` environments.
      workdir: where the log is.
      phase: "before" or "after".
      iteration: finished iterations of the policy that plays.
    """
    tasks = [task for task, _ in run.evaluated]
    readers = dict(
        zip([task.label for task in tasks], readers_of(run, tasks), strict=True)
    )
    count = run.settings.health.record_episodes

    def on_batch(label: str, first: int, rows: Rows, episodes: Episodes) -> None:
        is_off = run.settings.health.record_every == 0 or jax.process_count() > 1
        if first or is_off:
            return
        described = episode_log.describe(
            [readers[label]],
            [label],
            rows,
            # Played alone, an environment is the only one of its batch.
            episodes.replace(environment=np.zeros_like(episodes.environment)),
            range(min(count, len(episodes.group))),
            iteration=iteration,
            phase=phase,
        )
        episode_log.append(workdir, described)

    return on_batch
