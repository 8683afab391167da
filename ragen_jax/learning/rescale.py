"""Post-processing of estimated advantages: whitening, weights and scales.

In RAGEN's order: whiten, reweight by the group's spread, scale by the kept fraction,
divide by the row's length, and blank for control runs.
"""

import jax
import jax.numpy as jnp

from ragen_jax.learning import advantages
from ragen_jax.learning.batch import KeptRows
from ragen_jax.learning.filters import Selection, sets_of_groups
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes

_SMALLEST = 1e-6  # added to the largest spread, as RAGEN

LOSS_SCALES = {"linear": lambda fraction: fraction, "sqrt": jnp.sqrt}


def rescale(
    settings: Settings,
    estimate: advantages.Estimate,
    kept: KeptRows,
    episodes: Episodes,
    selection: Selection,
) -> jax.Array:
    """float32[C, T], the advantages as the losses read them.

    Args:
      settings: of the run.
      estimate: of C rows of T tokens.
      kept: those rows.
      episodes: all B.
      selection: what the filter kept of them.
    """
    result, rows = estimate.advantages, kept.rows
    if settings.advantage.whiten:
        result = advantages.whiten(
            result, rows.is_reply, kept.weight, estimate.is_target
        )
    if settings.filter.reweight:
        sets = sets_of_groups(settings, episodes)
        weight = spread_weight(selection.std, selection.kept_groups, sets)
        result *= advantages.broadcast_to_tokens(weight[episodes.group], rows)
    if settings.filter.loss_scale != "none":
        result *= LOSS_SCALES[settings.filter.loss_scale](selection.kept_fraction)
    if settings.advantage.length_weight:
        result /= relative_length(rows.is_reply, kept.weight)[:, None]
    if settings.advantage.zero_task:
        result = jnp.zeros_like(result)
    return result


def spread_weight(spread: jax.Array, kept: jax.Array, sets: jax.Array) -> jax.Array:
    """Soft filtering: std / (largest std of the set's kept groups + 1e-6).

    Source: RAGEN's soft_advantage_reweight, there for GRPO alone.

    Args:
      spread: float32[P], in-group std of returns, units of reward.
      kept: bool[P].
      sets: int32[P], 0 to P - 1: the groups that are compared with one another.

    Returns:
      float32[P], 0 to 1; 0 where not kept.
    """
    spread = jnp.where(kept, spread, 0.0)
    largest = jax.ops.segment_max(spread, sets, spread.shape[0])
    return spread / (largest[sets] + _SMALLEST)


def relative_length(is_reply: jax.Array, weight: jax.Array) -> jax.Array:
    """float32[C], each row's reply tokens over their mean; 1 for padding rows.

    Source: RAGEN's grpo_advantage_length_weight.
    """
    length = is_reply.sum(axis=1).astype(jnp.float32)
    counted = (weight > 0) & (length > 0)
    mean = jnp.where(counted, length, 0.0).sum() / jnp.maximum(counted.sum(), 1)
    return jnp.where(counted, length / jnp.maximum(mean, 1.0), 1.0)
