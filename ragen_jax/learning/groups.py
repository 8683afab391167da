"""Statistics within groups: of the episodes that began in one state."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

# Relative difference, about 1e-6, that adding the same terms in another order can make.
_ROUNDING = 8 * float(jnp.finfo(jnp.float32).eps)
# Below it the values of a group or of a batch count as equal: no division by their std.
SMALLEST_STD = 1e-6


@struct.dataclass
class Grouping:
    """Which group each of B values is in, and which of them count."""

    group: jax.Array  # int32[B], 0-based
    count: int = struct.field(pytree_node=False)  # P, groups there are
    members: jax.Array | None = None  # bool[B], the values that count; None: all


@struct.dataclass
class GroupStatistics:
    """Of the values of each of P groups."""

    mean: jax.Array  # float32[P], in the unit of the values; 0 for an empty group
    std: jax.Array  # float32[P], sample (n - 1); 0 for fewer than two members
    count: jax.Array  # int32[P], members


def group_statistics(
    values: jax.Array, grouping: Grouping, terms: jax.Array | None = None
) -> GroupStatistics:
    """Mean and sample standard deviation within each group, whatever its order.

    The std divides by n - 1, as in RAGEN, verl and TRL. It is exactly 0 where members
    are equal or differ by rounding alone, as sums of the same rewards in another order
    do. A std of at most 1e-6 of the largest of the group's `terms` is taken for that.

    Args:
      values: float[B], one number an episode, such as its return.
      grouping: the P groups of the episodes, and the episodes that count.
      terms: float[B], in the unit of the values: for each value the sum of |x| over the
        numbers x that it is a sum of, which scales its rounding even where they cancel.
        None: the absolute values.
    """
    group, groups, members = grouping.group, grouping.count, grouping.members
    terms = jnp.abs(values) if terms is None else terms
    chex.assert_rank([values, group, terms], 1)
    chex.assert_equal_shape([values, group, terms])
    values = values.astype(jnp.float32)
    if members is not None:  # The others go to a group of their own.
        statistics = group_statistics(
            jnp.where(members, values, 0.0),
            Grouping(jnp.where(members, group, groups), groups + 1),
            terms,
        )
        return jax.tree.map(lambda x: x[:groups], statistics)

    def total(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, group, groups)

    count = total(jnp.ones_like(group))
    counted = jnp.maximum(count, 1).astype(jnp.float32)
    # Mean, then squares, both relative to the group's minimum: equal values give exact
    # zeros, where their mean would round.
    lowest = jax.ops.segment_min(values, group, groups)
    lowest = jnp.where(count > 0, lowest, 0.0)
    above_lowest = values - lowest[group]
    mean_above = total(above_lowest) / counted
    squares = total(jnp.square(above_lowest - mean_above[group]))
    std = jnp.sqrt(squares / jnp.maximum(counted - 1, 1))
    largest = jax.ops.segment_max(terms.astype(jnp.float32), group, groups)
    std = jnp.where(std <= _ROUNDING * largest, 0.0, std)
    return GroupStatistics(mean=lowest + mean_above, std=std, count=count)


def deviations(
    values: jax.Array, grouping: Grouping, statistics: GroupStatistics
) -> jax.Array:
    """float32[B], each value minus its group's mean; exactly 0 where the std is 0.

    Args:
      values, grouping: as for `group_statistics`.
      statistics: of them.
    """
    group = grouping.group
    centred = values.astype(jnp.float32) - statistics.mean[group]
    return jnp.where(statistics.std[group] == 0, 0.0, centred)
