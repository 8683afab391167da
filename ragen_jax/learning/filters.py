"""StarPO-S filtering: the groups, or members of them, that teach enough."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import rewards, strategies
from ragen_jax.learning.groups import Grouping, GroupStatistics, group_statistics
from ragen_jax.learning.schedules import over_the_run
from ragen_jax.settings import FILTER_METRICS, Settings, update_counts
from ragen_jax.trajectory import Episodes, Rows

_EQUAL = 1e3  # a score that no strategy drops if all have it


@struct.dataclass
class Selection:
    """What the filter chose of B episodes in P groups."""

    keep: jax.Array  # bool[B], to train on
    # float32[], fraction kept of the groups, or of the episodes within_group.
    kept_fraction: jax.Array
    # float32[P], in-group std of the return, units of reward: of the task's, or with
    # the format penalty if filter.with_penalty; NaN where a return is not finite.
    std: jax.Array
    kept_groups: jax.Array  # bool[P], with an episode to train on


def uncertainty_filter(
    settings: Settings,
    rows: Rows,
    episodes: Episodes,
    iteration: jax.Array,
    turn_rewards: jax.Array,
) -> Selection:
    """Chooses the groups whose outcome is uncertain (StarPO-S, arXiv:2504.20073, 4.1).

    A group with a return that is not finite is left out whatever its score, unless none
    is left then: it would spoil every advantage through the whitening.

    Args:
      settings: of the run.
      rows, episodes: the record of B episodes of P groups.
      iteration: int32[], iterations finished.
      turn_rewards: float32[B, K], units of reward, all that is trained on, bonuses and
        hook included.
    """
    options, groups = settings.filter, settings.rollout.prompts
    grouping = Grouping(episodes.group, groups)
    within_groups = lambda values: group_statistics(values, grouping)
    std = within_groups(rewards.returns(episodes, counted_penalty(settings))).std
    is_sound = _finite_groups(episodes, turn_rewards, groups)
    std = jnp.where(is_sound, std, jnp.nan)
    measure, statistic = METRICS[options.metric]
    values = measure(settings, rows, episodes)
    fraction = over_the_run(settings, options.fraction, options.fraction_end, iteration)
    score = statistic(within_groups(values))
    if options.strategy == "within_group":  # Drops only groups of equal members.
        score = within_groups(values).std
    # If no group is sound the update shows it: its gradients are not finite. Then all
    # scores are equal, as their own may be no numbers.
    score = jnp.where(is_sound, score, jnp.nan)
    score = jnp.where(is_sound.any(), score, _EQUAL * (1 + options.zero))
    kept_groups = _keep_by_scope(settings, score, episodes, fraction)
    keep = kept_groups[episodes.group]
    kept_fraction = kept_groups.mean(dtype=jnp.float32)
    if options.strategy == "within_group":
        count = update_counts.members_kept(settings.rollout.group_size, options)
        keep &= strategies.keep_members(values, episodes.group, groups, count)
        kept_fraction = keep.mean(dtype=jnp.float32)
    return Selection(keep, kept_fraction, std, kept_groups)


def counted_penalty(settings: Settings) -> float:
    """Reward of an invalid reply in the returns that filter and diagnostics compare."""
    return settings.reward.format_penalty if settings.filter.with_penalty else 0.0


def sets_of_groups(settings: Settings, episodes: Episodes) -> jax.Array:
    """int32[P], the set that each group is compared in: its environment, or 0 for all.

    Args:
      settings: of the run; `filter.scope` decides.
      episodes: B episodes of P groups.
    """
    groups = settings.rollout.prompts
    if len(update_counts.scopes(settings)) == 1:
        return jnp.zeros(groups, jnp.int32)
    return jax.ops.segment_max(episodes.environment, episodes.group, groups)


def _finite_groups(
    episodes: Episodes, turn_rewards: jax.Array, groups: int
) -> jax.Array:
    """bool[P], whether all returns of a group are finite; True of an empty one."""
    is_bad = (~jnp.isfinite(turn_rewards.sum(axis=1))).astype(jnp.int32)
    return jax.ops.segment_sum(is_bad, episodes.group, groups) == 0


def _keep_by_scope(settings: Settings, score, episodes: Episodes, fraction):
    """bool[P], chosen in the whole batch or among the groups of each environment."""
    options, sizes = settings.filter, update_counts.scopes(settings)
    if len(sizes) == 1:
        return strategies.keep_groups(score, options, fraction)
    ranked_in = sets_of_groups(settings, episodes)
    keep = jnp.zeros(score.shape, bool)
    for index, size in enumerate(sizes):
        among = ranked_in == index
        keep |= strategies.keep_groups(score, options, fraction, among, size)
    return keep


# Values of episodes, float32[B] -------------------------------------------------------


def _returns(settings: Settings, rows: Rows, episodes: Episodes) -> jax.Array:
    return rewards.returns(episodes, counted_penalty(settings))


def _length(settings: Settings, rows: Rows, episodes: Episodes) -> jax.Array:
    return episodes.reply_tokens.sum(axis=1).astype(jnp.float32)


def _entropy(settings: Settings, rows: Rows, episodes: Episodes) -> jax.Array:
    """Mean over an episode's reply tokens of their entropy as sampled, nats."""
    count = episodes.turns.shape[0]
    is_reply = rows.real_replies
    owner = jnp.where(is_reply, rows.episode, count).reshape(-1)

    def total(x: jax.Array) -> jax.Array:
        masked = jnp.where(is_reply, x, 0.0).reshape(-1)
        return jax.ops.segment_sum(masked, owner, count + 1)[:count]

    return total(rows.entropy) / jnp.maximum(total(jnp.ones(rows.entropy.shape)), 1.0)


# Metric -> (a value of each episode, the statistic of a group's values: its score).
METRICS: dict[str, tuple[Callable, Callable[[GroupStatistics], jax.Array]]] = {
    "return_std": (_returns, lambda group: group.std),
    "return_variance": (_returns, lambda group: jnp.square(group.std)),
    "return_mean": (_returns, lambda group: group.mean),
    "return_sum": (_returns, lambda group: group.mean * group.count),
    "length": (_length, lambda group: group.mean),
    "entropy": (_entropy, lambda group: group.mean),
    "entropy_std": (_entropy, lambda group: group.std),
}
assert METRICS.keys() == FILTER_METRICS.keys()
