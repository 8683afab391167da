"""A run's health metrics, and the few episodes that it records.

Called by the trainer after each iteration, and around the final test.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

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
from ragen_jax.settings import Settings
from ragen_jax.starpo import Programs, Run
from ragen_jax.trajectory import Episodes, Rows

_AGREEMENT = "thought_answer_agreement"


@dataclasses.dataclass(frozen=True)
class Monitor:
    """The programs of a run's instruments; each compiles at its first call."""

    measure: Callable[..., dict[str, jax.Array]]  # of (rows, episodes, tables)
    score: Callable[..., ScoredRecord]  # see `make_scoring`
    readers: tuple[Reader, ...]  # one per environment of a batch
    labels: tuple[str, ...]  # names of these environments


def make_monitor(
    run: Run, tokenizer: PreTrainedTokenizerFast, plan: UpdatePlan
) -> Monitor:
    """The monitor of a run. Compiles nothing yet.

    Args:
      run: settings, environments and sizes.
      tokenizer: of its model.
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
        readers=readers_of(tokenizer, run.tasks),
        labels=tuple(task.label for task in run.tasks),
    )


def readers_of(
    tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task]
) -> tuple[Reader, ...]:
    """One reader per environment, which decodes its recorded tokens to text."""
    return tuple(
        transcripts.make_reader(tokenizer, task.env, task.dialogue) for task in tasks
    )


def tables(run: Run) -> tuple:
    """The reply parser's tables, one per environment, for `Monitor.measure`."""
    return tuple(tokens.replies for tokens in run.tokens)


def batch_indicators(monitor: Monitor, run: Run, rollout: Rollout) -> dict[str, float]:
    """The indicators of a batch, and how far its thoughts agree with its answers.

    The agreement is NaN where no valid reply has a thought. Several processes leave it
    out, as none of them holds whole rows.
    """
    measured = jax.device_get(
        monitor.measure(rollout.rows, rollout.episodes, tables(run))
    )
    values = {name: float(value) for name, value in measured.items()}
    if jax.process_count() == 1:
        record = jax.device_get((rollout.rows, rollout.episodes))
        values[_AGREEMENT] = thought_agreement(monitor.readers, *record)
    return values


def measure(monitor: Monitor, run: Run, rollout: Rollout) -> dict[str, float]:
    """The `health/` metrics of a batch; {} if `health.indicators` is off."""
    if not run.settings.health.indicators:
        return {}
    values = batch_indicators(monitor, run, rollout)
    if math.isnan(values.get(_AGREEMENT, 0.0)):
        del values[_AGREEMENT]
    return {f"health/{name}": value for name, value in values.items()}


def record(
    monitor: Monitor,
    run: Run,
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
    kept_rows = kept.rows.episode[batch.weight > 0]
    chosen = episode_log.choose_episodes(
        episodes.reward.sum(axis=1),
        episodes.group,
        episodes.environment,
        np.isin(np.arange(len(episodes.group)), kept_rows),
        options.record_episodes,
    )
    described = episode_log.describe(
        monitor.readers,
        monitor.labels,
        rows,
        episodes,
        chosen,
        iteration=iteration,
        phase="train",
        numbers=TokenNumbers(kept.rows, batch.advantages, values),
    )
    episode_log.append(workdir, described)


def recorder(
    settings: Settings,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[Task],
    workdir: Path,
    phase: str,
    iteration: int,
) -> Callable:
    """An `on_batch` for `evaluator.evaluate` that records the first test episodes.

    It takes (label, first level, rows, episodes). Before and after training these are
    episodes of the same levels.

    Args:
      settings: of the run.
      tokenizer: of its model.
      tasks: the environments that are evaluated.
      workdir: where the log is.
      phase: "before" or "after".
      iteration: finished iterations of the policy that plays.
    """
    labels = [task.label for task in tasks]
    readers = dict(zip(labels, readers_of(tokenizer, tasks), strict=True))
    count = settings.health.record_episodes

    def on_batch(label: str, first: int, rows: Rows, episodes: Episodes) -> None:
        is_off = settings.health.record_every == 0 or jax.process_count() > 1
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
