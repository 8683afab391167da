"""The numbers that are logged: of a batch of episodes, and of learning from it."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import aggregation, rewards
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.batch import Batch, explained_variance
from ragen_jax.learning.filters import Selection
from ragen_jax.learning.optimize import Steps
from ragen_jax.learning.schedules import learning_rate
from ragen_jax.learning.shaping import bonuses, shaped_rewards
from ragen_jax.learning.token_sums import TokenSums, merge
from ragen_jax.learning.train_state import TrainState, UpdateCounts, actor_steps
from ragen_jax.settings import RewardSettings, Settings
from ragen_jax.trajectory import (
    REPLY_BUDGET,
    Episodes,
    Rows,
    is_played,
    row_lengths,
)


@struct.dataclass
class Summaries:
    """What is reported of an iteration's episodes."""

    means: dict[str, jax.Array]  # over all episodes, by `summarize`
    by_task: dict[str, jax.Array]  # by `summarize_tasks`; {} for one environment
    # int32[] of each environment, messages that were too long and so were cut.
    too_long: tuple[jax.Array, ...]


def summarize(
    rows: Rows, episodes: Episodes, reward: RewardSettings
) -> dict[str, jax.Array]:
    """Means over episodes, turns or reply tokens, each float32[].

    Args:
      rows: all rows of the episodes.
      episodes: the B episodes.
      reward: how it is shaped.
    """
    played = is_played(episodes)
    turns = played.sum()

    def per_turn(values: jax.Array) -> jax.Array:
        return jnp.where(played, values, 0).sum() / turns

    by_turn = {
        "reply_tokens": per_turn(episodes.reply_tokens),
        "thought_tokens": per_turn(episodes.thought_tokens),
        "grounded": per_turn(episodes.grounded),
        "valid_reply_rate": per_turn(episodes.is_valid.astype(jnp.float32)),
        "cut_replies": per_turn(episodes.reply_end == REPLY_BUDGET),
    }
    return by_turn | {
        "success": episodes.success.mean(dtype=jnp.float32),
        "return": rewards.returns(episodes).mean(),
        "return_with_penalty": rewards.returns(episodes, reward.format_penalty).mean(),
        "return_shaped": shaped_rewards(reward, episodes).sum(axis=1).mean(),
        "entropy": aggregation.token_mean(rows.entropy, rows.is_reply).value(),
        "turns": episodes.turns.mean(dtype=jnp.float32),
        "actions": episodes.actions.sum(axis=1).mean(dtype=jnp.float32),
        # Of all rows of an episode: what windows share counts in each of them.
        "episode_tokens": row_lengths(rows).sum(dtype=jnp.float32)
        / episodes.turns.shape[0],
        "sampled_tokens": episodes.reply_tokens.sum().astype(jnp.float32),
    }


def summarize_tasks(episodes: Episodes, environments: int) -> dict[str, jax.Array]:
    """Means over each environment's episodes, or the turns played in them.

    Each float32[environments]; NaN of none.
    """

    def total(values: jax.Array) -> jax.Array:
        values = values.astype(jnp.float32)
        return jax.ops.segment_sum(values, episodes.environment, environments)

    count, turns = total(jnp.ones_like(episodes.turns)), total(episodes.turns)
    return {
        "success": total(episodes.success) / count,
        "return": total(rewards.returns(episodes)) / count,
        "valid_reply_rate": total(episodes.is_valid.sum(axis=1)) / turns,
        "reply_tokens": total(episodes.reply_tokens.sum(axis=1)) / turns,
        "turns": turns / count,
    }


@struct.dataclass
class UpdateMetrics:
    """Means over the updates of one use of the episodes."""

    sums: TokenSums
    actor_grad_norm: jax.Array  # float32[], mean over updates, before clipping
    critic_grad_norm: jax.Array  # float32[]
    reward_std: jax.Array  # float32[], mean of `Selection.std`
    kept_fraction: jax.Array  # float32[], of groups (within_group: of episodes)
    explained_variance: jax.Array  # float32[], of the returns by the old values
    counts: UpdateCounts  # of one use of the episodes; after `over_uses` of all


def update_metrics(selection: Selection, batch: Batch, steps: Steps) -> UpdateMetrics:
    """What an update reports.

    Args:
      selection: by the filter.
      batch: that was learned from.
      steps: the sums over minibatches.
    """
    divisor = jnp.maximum(steps.counts.attempted, 1)
    return UpdateMetrics(
        sums=steps.sums,
        actor_grad_norm=steps.norms[0] / divisor,
        critic_grad_norm=steps.norms[1] / divisor,
        reward_std=selection.std.mean(),
        kept_fraction=selection.kept_fraction,
        explained_variance=explained_variance(batch),
        counts=steps.counts,
    )


def over_uses(uses: Sequence[UpdateMetrics]) -> UpdateMetrics:
    """Metrics over all uses of one batch of episodes: their means, and total counts."""
    if len(uses) == 1:
        return uses[0]
    total = jax.tree.map(lambda *x: sum(x[1:], x[0]), *uses)
    mean = jax.tree.map(lambda x: x / len(uses), total)
    sums = functools.reduce(merge, [use.sums for use in uses])
    # Of the first use alone: after it the policy has moved.
    first = uses[0].sums
    sums = sums.replace(
        logprob_gap=first.logprob_gap, logprob_gap_max=first.logprob_gap_max
    )
    return mean.replace(sums=sums, counts=total.counts)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the two halves of an iteration."""

    rollout: float
    update: float


def counts_so_far(state: TrainState) -> dict[str, jax.Array]:
    """What `iteration_values` reports of a state, each int32[]."""
    return {
        "iteration": state.iteration,
        "updates": state.updates,
        "actor_steps": actor_steps(state),
        "skipped_bad": state.skipped_bad,
        "skipped_empty": state.skipped_empty,
    }


def iteration_values(
    settings: Settings,
    counts: dict[str, jax.Array],
    uses: Sequence[UpdateMetrics],
    means: dict[str, jax.Array],
    slot_passes: jax.Array,
    actor_lr: jax.Array,
) -> dict[str, jax.Array]:
    """What an iteration did, by the names in reporting/metrics.py, each a scalar.

    To be jitted: run op by op these would be some seventy tiny programs.

    Args:
      settings: of the run; of its rate only the schedule is used.
      counts: `counts_so_far` after the iteration.
      uses: what each update from the episodes reported.
      means: over all episodes, by `summarize`.
      slot_passes: int32[], passes of the sampling loop times its slots.
      actor_lr: float32[], the highest of the actor's schedule.
    """
    update, optimizer = over_uses(uses), settings.optimizer
    rate, steps = learning_rate(settings, actor_lr), counts["actor_steps"]
    values = {
        "train/success": means["success"],
        "train/return": means["return"],
        "train/return_with_penalty": means["return_with_penalty"],
        "rollout/entropy": means["entropy"],
        "rollout/reply_tokens": means["reply_tokens"],
        "rollout/thought_tokens": means["thought_tokens"],
        "rollout/valid_reply_rate": means["valid_reply_rate"],
        "rollout/cut_replies": means["cut_replies"],
        "rollout/turns": means["turns"],
        "rollout/actions": means["actions"],
        "rollout/episode_tokens": means["episode_tokens"],
        "rollout/utilization": means["sampled_tokens"] / slot_passes,
        "filter/reward_std": update.reward_std,
        "filter/kept_fraction": update.kept_fraction,
        "update/actor_lr": jnp.where(steps > 0, rate(jnp.maximum(steps - 1, 0)), 0.0),
        "update/count": counts["updates"],
        "update/skipped_nonfinite": counts["skipped_bad"],
        "update/skipped_empty": counts["skipped_empty"],
    }
    if bonuses(settings.reward):
        values["train/return_shaped"] = means["return_shaped"]
    if settings.reward.grounding > 0:
        values["rollout/grounded"] = means["grounded"]
    repeats = optimizer.epochs * optimizer.reuse > 1
    is_measured = {
        ("value_loss", "explained_variance", "critic_grad_norm"): settings.has_critic,
        ("kl",): settings.has_reference,
        ("ratio", "ratio_max"): repeats,
    }
    left_out = {n for names, known in is_measured.items() if not known for n in names}
    values |= {
        f"update/{name}": mean
        for name, mean in _means_of_updates(update).items()
        if name not in left_out
    }
    if repeats:
        # While the critic warms up, the policy stays.
        moves = counts["iteration"] > optimizer.critic_warmup
        values["update/policy_lag"] = jnp.maximum(update.counts.real - 1, 0) * moves
    return values


def _means_of_updates(update: UpdateMetrics) -> dict[str, jax.Array]:
    """float32[] each; NaN where nothing was learned from."""
    means = {
        name: value.value() if isinstance(value, Mean) else value
        for name, value in vars(update.sums).items()
    }
    means["explained_variance"] = update.explained_variance
    means["actor_grad_norm"] = update.actor_grad_norm
    means["critic_grad_norm"] = update.critic_grad_norm
    nothing = update.counts.attempted == 0
    return {name: jnp.where(nothing, jnp.nan, mean) for name, mean in means.items()}


def iteration_metrics(
    values: dict[str, jax.Array],
    seen: Summaries,
    labels: Sequence[str],
    times: Times,
) -> dict[str, float]:
    """Everything that an iteration reports, by the names in reporting/metrics.py.

    Args:
      values: `iteration_values`.
      seen: of the episodes.
      labels: of the environments, in the order of `summarize_tasks`.
      times: seconds.
    """
    values, seen = jax.device_get((values, seen))
    metrics = {name: float(value) for name, value in values.items()}
    for name, numbers in seen.by_task.items():
        for label, value in zip(labels, numbers.tolist(), strict=True):
            metrics[f"train/{label}/{name}"] = value
    metrics["time/rollout_seconds"] = times.rollout
    metrics["time/update_seconds"] = times.update
    metrics["rollout/tokens_per_second"] = (
        float(seen.means["sampled_tokens"]) / times.rollout
    )
    return metrics
