"""StarPO-S filtering: which groups teach enough to be trained on, and their rows.

Shapes never depend on what is kept: a filter marks groups, and a counted gather moves
the marked rows to the front of a buffer of fixed capacity.
"""

import math

import chex
import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.trajectory import PADDING, Episodes, Rows

ZERO_SCORE = 1e-6  # A lower score counts as zero: rounding, not uncertainty.
_TOP_P_MARGIN = 0.01  # eps of RAGEN-2, in the unit of the score

STRATEGIES = ("none", "top_fraction", "top_p")


@struct.dataclass
class GroupStatistics:
    """Of the values of each of P groups."""

    mean: jax.Array  # float32[P], in the unit of the values; 0 for an empty group
    std: jax.Array  # float32[P], sample (n - 1); 0 for fewer than two members
    count: jax.Array  # int32[P], members


def group_statistics(
    values: jax.Array, group: jax.Array, groups: int
) -> GroupStatistics:
    """Mean and sample standard deviation within each group, whatever its order.

    The std has n - 1 below the line, as in RAGEN, verl and TRL; it is exactly 0 where
    all members are equal.

    Args:
      values: float[B], one number an episode, such as its return.
      group: int32[B], 0-based group of each episode.
      groups: P, groups there are; static.
    """
    chex.assert_rank([values, group], 1)
    chex.assert_equal_shape([values, group])
    values = values.astype(jnp.float32)

    def total(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, group, groups)

    count = total(jnp.ones_like(group))
    members = jnp.maximum(count, 1).astype(jnp.float32)
    # Two passes, both measured from the group's minimum: equal values leave exact
    # zeros, where a mean of them would round.
    lowest = jax.ops.segment_min(values, group, groups)
    lowest = jnp.where(count > 0, lowest, 0.0)
    above_lowest = values - lowest[group]
    mean_above = total(above_lowest) / members
    squares = total(jnp.square(above_lowest - mean_above[group]))
    std = jnp.sqrt(squares / jnp.maximum(members - 1, 1))
    return GroupStatistics(mean=lowest + mean_above, std=std, count=count)


def keep_groups(
    score: jax.Array, *, strategy: str, fraction: float, keep_zero: bool
) -> jax.Array:
    """Marks the groups to train on.

    none: every group, whatever its score.
    top_fraction: the `most_kept` groups of highest score (StarPO-S, arXiv:2504.20073,
      uncertainty filtering, default 0.25).
    top_p: from the highest score down, until the sum of the kept scores reaches
      fraction * total - 0.01 (RAGEN-2, arXiv:2604.06268, linear). A total so small
      that this is not positive keeps nothing; a fraction of 1 keeps every candidate.

    Ties go to the lower index. Groups of zero score (below 1e-6) are no candidates
    unless `keep_zero`: they give no advantage, and RAGEN's fraction fills up with them.

    Args:
      score: float[P], >= 0, such as the in-group std of returns.
      strategy: one of STRATEGIES.
      fraction: in (0, 1]; of the groups, or of the sum of scores. Unused by none.
      keep_zero: whether groups of zero score may be kept. top_p reaches them only at a
        fraction of 1, as they add nothing to the sum.

    Returns:
      bool[P]; all False is possible, and then there is nothing to update on.

    Raises:
      ValueError: for an unknown strategy or a fraction outside its range.
    """
    chex.assert_rank(score, 1)
    most = most_kept(score.shape[0], strategy=strategy, fraction=fraction)
    if strategy == "none":
        return jnp.ones(score.shape, bool)

    score = score.astype(jnp.float32)
    is_candidate = score >= (0.0 if keep_zero else ZERO_SCORE)  # Never a NaN.
    counted = jnp.where(score >= ZERO_SCORE, score, 0.0)
    order = jnp.argsort(counted, descending=True, stable=True)
    if strategy == "top_fraction":
        is_within = jnp.arange(score.shape[0]) < most
    elif fraction >= 1:
        is_within = jnp.ones(score.shape, bool)
    else:
        reached = jnp.cumsum(counted[order])
        before = jnp.concatenate([jnp.zeros(1), reached[:-1]])
        is_within = before < fraction * reached[-1] - _TOP_P_MARGIN
    return jnp.zeros(score.shape, bool).at[order].set(is_within) & is_candidate


def most_kept(groups: int, *, strategy: str, fraction: float) -> int:
    """The most groups of P that `keep_groups` can keep: how much room to make.

    For top_fraction max(1, round(fraction * P)), a half rounded up.

    Args: as for `keep_groups`.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"unknown filter strategy {strategy!r}; choose one of {STRATEGIES}"
        )
    if strategy != "none" and not 0 < fraction <= 1:
        raise ValueError(f"need 0 < fraction <= 1 for {strategy!r}, got {fraction}")
    if strategy != "top_fraction":
        return groups
    return max(1, math.floor(fraction * groups + 0.5))


def kept_rows(rows: Rows, episodes: Episodes, keep: jax.Array) -> jax.Array:
    """Marks the rows with a token of a kept group's episode.

    Args:
      rows: R rows, each of episodes of one group.
      episodes: the B episodes that `rows.episode` points into.
      keep: bool[P], by group.

    Returns:
      bool[R]; False for a row that is all padding.
    """
    chex.assert_type(keep, bool)
    is_kept_episode = keep[episodes.group]
    is_kept_token = is_kept_episode[jnp.maximum(rows.episode, 0)]
    return (is_kept_token & (rows.episode != PADDING)).any(axis=1)


def gather_rows(
    rows: Rows, is_kept: jax.Array, capacity: int
) -> tuple[Rows, jax.Array]:
    """Moves the kept rows, in their order, to the front of a buffer of fixed size.

    Args:
      rows: R rows of T tokens.
      is_kept: bool[R].
      capacity: C, rows of the result; static. If more are kept, the last are lost, so
        make room for all: `most_kept` groups times the most rows of a group.

    Returns:
      (Rows of C rows, weight float32[C]): weight 1 for the kept rows; behind them
      padding of weight 0, without an episode, a reply or a turn end.
    """
    chex.assert_shape(is_kept, (rows.tokens.shape[0],))
    chex.assert_type(is_kept, bool)
    (source,) = jnp.nonzero(is_kept, size=capacity, fill_value=0)
    is_real = jnp.arange(capacity) < is_kept.sum()
    gathered = jax.tree.map(lambda field: field[source], rows)

    def blank(field: jax.Array, padding: bool | int | float) -> jax.Array:
        return jnp.where(is_real[:, None], field, jnp.asarray(padding, field.dtype))

    padded = gathered.replace(
        tokens=blank(gathered.tokens, 0),
        is_reply=blank(gathered.is_reply, False),
        logprobs=blank(gathered.logprobs, 0),
        entropy=blank(gathered.entropy, 0),
        episode=blank(gathered.episode, PADDING),
        turn=blank(gathered.turn, PADDING),
        turn_end=blank(gathered.turn_end, False),
    )
    return padded, is_real.astype(jnp.float32)
