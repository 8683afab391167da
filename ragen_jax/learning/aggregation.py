"""Means over tokens and rows, as (sum, count) until the last moment.

The sums of two microbatches or shards add up to the sums of the whole, so how a batch
was cut cannot change its mean.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Mean:
    """A weighted mean that is not divided out yet."""

    sum: jax.Array  # float32[], the weighted sum, in the unit of the values
    count: jax.Array  # float32[], the sum of the weights

    def value(self) -> jax.Array:
        """float32[], sum / count; 0 where nothing was counted."""
        is_empty = self.count == 0
        return jnp.where(is_empty, 0.0, self.sum / jnp.where(is_empty, 1.0, self.count))

    @classmethod
    def zero(cls) -> "Mean":
        """Nothing counted yet."""
        return cls(sum=jnp.zeros(()), count=jnp.zeros(()))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)


def token_mean(
    values: jax.Array, mask: jax.Array, weight: jax.Array | None = None
) -> Mean:
    """The mean over all counted tokens: long rows weigh more than short ones.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.3 ("token-mean").

    Args:
      values: float[R, T]. What stands at masked positions and in rows of weight 0,
        NaN included, reaches neither the result nor its gradient.
      mask: bool[R, T], True on the tokens to count.
      weight: float[R], of each row, >= 0; 0 marks padding rows. None: 1 everywhere.
    """
    masked, mask, weight = _counted(values, mask, weight)
    return Mean(
        sum=(weight * masked.sum(axis=1)).sum(),
        count=(weight * mask.sum(axis=1)).sum(),
    )


def sequence_mean_token_mean(
    values: jax.Array, mask: jax.Array, weight: jax.Array | None = None
) -> Mean:
    """The mean over rows of each row's token mean: every row weighs the same.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3. A row without a counted
    token has no mean and is left out of the count.

    Args: as for `token_mean`.
    """
    masked, mask, weight = _counted(values, mask, weight)
    tokens = mask.sum(axis=1)
    return Mean(
        sum=(weight * masked.sum(axis=1) / jnp.maximum(tokens, 1)).sum(),
        count=(weight * (tokens > 0)).sum(),
    )


def sequence_mean_token_sum(
    values: jax.Array, mask: jax.Array, weight: jax.Array | None = None
) -> Mean:
    """The mean over rows of each row's token sum: no bias towards a length.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, which divides by
    a constant besides. A row without a counted token is left out of the count.

    Args: as for `token_mean`.
    """
    masked, mask, weight = _counted(values, mask, weight)
    return Mean(
        sum=(weight * masked.sum(axis=1)).sum(),
        count=(weight * mask.any(axis=1)).sum(),
    )


def sequence_mean_token_sum_norm(
    values: jax.Array,
    mask: jax.Array,
    weight: jax.Array | None = None,
    *,
    most_tokens: int,
) -> Mean:
    """`sequence_mean_token_sum` over a constant: the most reply tokens of a row.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, whose losses are divided by the
    generation budget. verl divides by the padded width and not by the number of rows.

    Args: as for `token_mean`, and
      most_tokens: reply tokens that a row can hold.
    """
    mean = sequence_mean_token_sum(values, mask, weight)
    return Mean(sum=mean.sum, count=mean.count * most_tokens)


AGGREGATIONS: dict[str, Callable[..., Mean]] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}


def _counted(
    values: jax.Array, mask: jax.Array, weight: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(values float32[R, T], mask bool[R, T], weight float32[R]), cleared for sums."""
    chex.assert_rank([values, mask], 2)
    chex.assert_equal_shape([values, mask])
    chex.assert_type([values, mask], [float, bool])
    if weight is None:
        weight = jnp.ones(values.shape[0], jnp.float32)
    chex.assert_shape(weight, (values.shape[0],))
    weight = weight.astype(jnp.float32)
    mask = mask & (weight > 0)[:, None]
    # Selected, not multiplied: 0 * NaN would be NaN, in the sum and in the gradient.
    return jnp.where(mask, values.astype(jnp.float32), 0.0), mask, weight
