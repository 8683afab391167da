"""StarPO: the whole method.

`iterate` samples episodes from the current policy and learns from them. `update` is how
it learns, one traced program: `score` (filter, log-probabilities, rewards, advantages),
then optimize.

State-Thinking-Actions-Reward Policy Optimization: RAGEN, arXiv:2504.20073.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ragen_jax.learning import forward, shaping, summary, train_state
from ragen_jax.learning.batch import ScoredRecord, gather_kept_rows, make_batch
from ragen_jax.learning.estimators import ESTIMATORS, Evidence
from ragen_jax.learning.filters import uncertainty_filter
from ragen_jax.learning.optimize import optimize
from ragen_jax.learning.rescale import rescale
from ragen_jax.learning.summary import Summaries, Times, UpdateMetrics
from ragen_jax.learning.train_state import TrainState, UpdateArgs
from ragen_jax.learning.update_plan import UpdatePlan, check_record, shard_rows
from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout.rollout import Rollout, training_rollout_args
from ragen_jax.rollout.tasks import Task, TaskTokens, refuse_cut_messages
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


class Run(Protocol):
    """What is static about a run, as far as the method asks."""

    settings: Settings
    tasks: tuple[Task, ...]  # the environments of a batch, with their texts
    tokens: TaskTokens  # those texts' tokens


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of an iteration; each compiles at its first call."""

    rollout: Callable[..., Rollout]
    update: Callable[..., tuple[TrainState, UpdateMetrics]]
    summarize: Callable[[Rollout], Summaries]
    report: Callable[..., dict[str, jax.Array]]  # the iteration's metrics
    merge: Callable[[Any, Any], Parameters]  # (trainable, frozen) -> sampler's weights
    frozen: Parameters  # the base model under adapters; {} where all is trained
    reference: Parameters  # {} without a KL term


def iterate(
    run: Run, programs: Programs, state: TrainState
) -> tuple[TrainState, dict[str, float], Rollout]:
    """One iteration: episodes from the current policy, then learning.

    Args:
      run, programs: what is static.
      state: donated; its buffers are reused.

    Returns:
      The next state, the iteration's metrics by the names in reporting/metrics.py, and
      the episodes that it learned from.

    Raises:
      UserError: before learning, if an environment showed longer observations than its
        `longest_observation` allows.
    """
    started = time.perf_counter()
    rollout_args = training_rollout_args(run.settings, state.iteration, state.updates)
    with jax.profiler.TraceAnnotation("rollout"):
        actor = programs.merge(state.actor, programs.frozen)
        rollout = programs.rollout(actor, run.tokens, rollout_args)
        seen = programs.summarize(rollout)
        jax.block_until_ready(seen.means)
    del actor  # Merged adapters would be a second model in memory during the update.
    labels = [task.label for task in run.tasks]
    refuse_cut_messages(labels, jax.device_get(seen.too_long))
    sampled = time.perf_counter()

    record = (programs.frozen, programs.reference, rollout.rows, rollout.episodes)
    uses: list[UpdateMetrics] = []  # one for each use of the episodes
    with jax.profiler.TraceAnnotation("update"):
        while len(uses) < run.settings.optimizer.reuse:  # 1: on-policy.
            update_args = train_state.update_arguments(
                run.settings, [use.counts for use in uses]
            )
            state, use = programs.update(state, *record, update_args)
            uses.append(use)
        jax.block_until_ready(state.updates)
    times = Times(sampled - started, time.perf_counter() - sampled)
    metrics = report_iteration(run, programs, state, rollout, seen, uses, times)
    return state, metrics, rollout


def report_iteration(
    run: Run,
    programs: Programs,
    state: TrainState,
    rollout: Rollout,
    seen: Summaries,
    uses: Sequence[UpdateMetrics],
    times: Times,
) -> dict[str, float]:
    """The iteration's metrics, by the names in reporting/metrics.py.

    Args:
      run, programs: what is static.
      state: after the iteration.
      rollout, seen: its episodes, and what is said of them.
      uses: the metrics of each update from them.
      times: seconds of its halves.
    """
    values = programs.report(
        summary.counts_so_far(state),
        uses,
        seen.means,
        rollout.passes,
        np.float32(run.settings.optimizer.actor_lr),
    )
    labels = [task.label for task in run.tasks]
    return summary.iteration_metrics(values, seen, labels, times)


def make_update(plan: UpdatePlan) -> Callable:
    """Compiles `update` for a plan; the old state's memory is reused for the new one.

    (state, frozen, reference, rows, episodes, UpdateArgs) -> (state, UpdateMetrics).
    """
    learn = functools.partial(update, plan)
    return jax.jit(learn, donate_argnums=(0,), out_shardings=(plan.shardings, None))


def update(
    plan: UpdatePlan,
    old: TrainState,
    frozen: Parameters,
    reference: Parameters,
    rows: Rows,
    episodes: Episodes,
    update_args: UpdateArgs,
) -> tuple[TrainState, UpdateMetrics]:
    """Scores a record and takes the optimizer steps on its kept rows.

    Args:
      plan: what is static.
      old: the state before.
      frozen, reference: as in `Programs`.
      rows, episodes: the record of B episodes.
      update_args: seed, learning rate, and which use of the record this is.

    Returns:
      The next state, and the metrics of the update.
    """
    scored = score(plan, old, frozen, reference, rows, episodes)
    new, steps = optimize(plan, frozen, old, scored.batch, update_args)
    new = train_state.update_counters(
        plan.settings, old, new, steps.counts, update_args
    )
    return new, summary.update_metrics(scored.selection, scored.batch, steps)


def score(
    plan: UpdatePlan,
    state: TrainState,
    frozen: Parameters,
    reference: Parameters,
    rows: Rows,
    episodes: Episodes,
) -> ScoredRecord:
    """`update`'s first half: which rows to learn from, and each token's advantage.

    Args: as for `update`; `state` is the one before.

    Raises:
      ValueError: while tracing, for a record of other sizes than the plan's.
    """
    check_record(plan, rows, episodes)
    settings, iteration = plan.settings, state.iteration
    groups = settings.rollout.prompts
    turn_rewards = shaping.turn_rewards(settings.reward, episodes, groups)
    selection = uncertainty_filter(settings, rows, episodes, iteration, turn_rewards)
    kept = gather_kept_rows(settings, rows, episodes, selection.keep)
    kept = kept.replace(rows=shard_rows(plan, kept.rows))
    scores = forward.old_scores(plan, state, frozen, reference, kept)
    token_rewards = shaping.token_rewards(
        settings, kept.rows, turn_rewards, scores, iteration
    )
    evidence = Evidence(
        rows=kept.rows,
        episodes=episodes,
        keep=selection.keep,
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        old_values=scores.old_values,
    )
    estimate = ESTIMATORS[settings.estimator](settings, evidence)
    advantages = rescale(settings, estimate, kept, episodes, selection)
    batch = make_batch(settings, kept, episodes, scores, estimate, advantages)
    return ScoredRecord(selection, kept, batch)
