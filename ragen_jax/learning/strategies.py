"""The filter's strategies: which groups to keep, by their scores.

Shapes never depend on what is kept. RAGEN's rules are those of arXiv:2604.06268 and its
code; each departure is a setting (docs/algorithms.md).
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.settings import FILTER_STRATEGIES, FilterSettings
from ragen_jax.settings.update_counts import FRACTION_ROUNDING, rounded_count

_RATIO_SLACK = 1e-10  # of min_p, as RAGEN

Fraction = float | jax.Array  # one that changes over the run is float32[]


@struct.dataclass
class Ranked:
    """P groups in order of preference, candidates first."""

    score: jax.Array  # float32[P], 0 where a group is not a candidate
    is_candidate: jax.Array  # bool[P]


def keep_groups(
    score: jax.Array,
    options: FilterSettings,
    fraction: Fraction,
    among: jax.Array | None = None,
    size: int | None = None,
) -> jax.Array:
    """Marks the groups to train on.

    Ties go to the lower index. A score that is not a number is never kept, nor one
    whose absolute value is below `filter.zero` unless `filter.keep_zero`: such groups
    give no advantage, and RAGEN's fraction fills up with them.

    Args:
      score: float[P], in the metric's unit.
      options: strategy, zeros, preference; `fraction` is not read from here.
      fraction: in (0, 1], of groups, scores or the best score.
      among: bool[P], the groups to choose from; None: all.
      size: how many those are; static.

    Returns:
      bool[P]; all False is possible, and then there is nothing to update on.
    """
    chex.assert_rank(score, 1)
    eligible = jnp.ones(score.shape, bool) if among is None else among
    if options.strategy == "none":
        return eligible & ~jnp.isnan(score)
    score = score.astype(jnp.float32)
    is_zero = jnp.abs(score) < options.zero
    score = jnp.where(is_zero, 0.0, score)
    is_candidate = eligible & ~jnp.isnan(score)
    if not options.keep_zero:
        is_candidate &= ~is_zero
    largest = options.prefer == "largest"
    last = -jnp.inf if largest else jnp.inf
    sort_key = jnp.where(is_candidate, score, last)
    order = jnp.argsort(sort_key, descending=largest, stable=True)
    ranked = Ranked(jnp.where(is_candidate, score, 0.0)[order], is_candidate[order])
    size = score.shape[0] if size is None else size
    keep_ranked = STRATEGIES[options.strategy](ranked, options, fraction, size)
    kept = jnp.zeros(score.shape, bool).at[order].set(keep_ranked, unique_indices=True)
    return kept & is_candidate


def _rounded_count(size: int, options: FilterSettings, fraction: Fraction):
    """`rounded_count`, also of a fraction that moves."""
    if isinstance(fraction, float):
        return rounded_count(size, options, fraction)
    half = 0.5 if options.rounding == "nearest" else 0.0
    fraction = jnp.minimum(fraction + FRACTION_ROUNDING, 1.0)
    return jnp.maximum(1, jnp.floor(fraction * size + half).astype(jnp.int32))


# Each takes (ranked, options, fraction, size) and gives bool[P] in ranked's order.


def _all(ranked: Ranked, options: FilterSettings, fraction: Fraction, size: int):
    return ranked.is_candidate


def _top_fraction(ranked, options, fraction, size):
    """max(1, fraction * size) groups (StarPO-S, arXiv:2504.20073, default 0.25)."""
    return jnp.arange(ranked.score.shape[0]) < _rounded_count(size, options, fraction)


def _top_count(ranked, options, fraction, size):
    return jnp.arange(ranked.score.shape[0]) < options.count


def _top_p(ranked, options, fraction, size):
    """Until the kept scores' sum reaches fraction * total - margin (RAGEN-2, linear).

    A total so small that this is not positive keeps nothing, and nor do scores that
    begin at 0 or below; a fraction of 1 keeps every candidate.
    """
    reached = jnp.cumsum(ranked.score)
    enough = fraction * reached[-1] - options.margin
    is_positive = jnp.cumsum(~(ranked.score > 0)) == 0  # and all before it
    before = jnp.concatenate([jnp.zeros(1), reached[:-1]])
    return (is_positive & (before < enough)) | (fraction >= 1)


def _top_p_softmax(ranked, options, fraction, size):
    """The fewest best groups whose softmax holds the fraction (RAGEN-2); never none."""
    sign = 1 if options.prefer == "largest" else -1
    logits = jnp.where(ranked.is_candidate, sign * ranked.score, -jnp.inf)
    reached = jnp.cumsum(jax.nn.softmax(logits))
    before = jnp.concatenate([jnp.zeros(1), reached[:-1]])
    return (before < fraction) | (fraction >= 1)


def _min_p(ranked, options, fraction, size):
    """At least fraction * largest, or at most smallest / fraction (RAGEN-2)."""
    best = ranked.score[0]
    if options.prefer == "largest":
        return ranked.score >= fraction * best - _RATIO_SLACK
    return ranked.score <= best / (fraction + _RATIO_SLACK) + _RATIO_SLACK


def _percentile_range(ranked, options, fraction, size):
    """Ranks round(low * n) up to round(high * n) of n candidates, at least one."""
    count = ranked.is_candidate.sum()
    low = jnp.round(options.low * count).astype(jnp.int32)
    low = jnp.minimum(low, jnp.maximum(count - 1, 0))
    high = jnp.round(options.high * count).astype(jnp.int32)
    rank = jnp.arange(ranked.score.shape[0])
    return (rank >= low) & (rank < jnp.maximum(high, low + 1))


STRATEGIES: dict[str, Callable] = {
    "none": _all,
    "top_fraction": _top_fraction,
    "top_count": _top_count,
    "top_p": _top_p,
    "top_p_softmax": _top_p_softmax,
    "min_p": _min_p,
    "percentile_range": _percentile_range,
    "within_group": _all,  # `keep_members` follows.
}
assert STRATEGIES.keys() == FILTER_STRATEGIES.keys()


def keep_members(values: jax.Array, group: jax.Array, groups: int, count: int):
    """Marks the `count` members of each group whose values vary most.

    The set of largest variance is the lowest j and the highest count - j for some j, so
    those are tried; the first wins a tie.

    Source: Xu et al. 2025, arXiv:2504.13818 (max-variance down-sampling); RAGEN's
    within_group.

    Args:
      values: float[B], one number an episode.
      group: int32[B], 0-based; N episodes in each group.
      groups: P; static.
      count: k, from 2 to N; static.

    Returns:
      bool[B].
    """
    members = values.shape[0] // groups
    by_value = jnp.argsort(values, stable=True)
    order = by_value[jnp.argsort(group[by_value], stable=True)]  # rising in each group
    rising = values.astype(jnp.float32)[order].reshape(groups, members)
    rising = rising - rising[:, :1]  # Equal values become exact zeros.
    lowest = jnp.arange(count + 1)[:, None]
    place = jnp.arange(members)[None]
    sets = (place < lowest) | (place >= members - (count - lowest))  # bool[k + 1, N]
    members_of_sets = rising[:, None]  # float32[P, 1, N], beside bool[1, k + 1, N]
    mean = jnp.where(sets[None], members_of_sets, 0.0).sum(-1, keepdims=True) / count
    squares = jnp.where(sets[None], jnp.square(members_of_sets - mean), 0.0).sum(-1)
    keep = sets[jnp.argmax(squares, axis=1)]  # bool[P, N]
    kept = jnp.zeros(values.shape, bool).at[order]
    return kept.set(keep.reshape(-1), unique_indices=True)
