"""The losses of policy and critic as the settings choose them, from their scores."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import aggregation, losses
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.schedules import over_the_run
from ragen_jax.learning.vocabulary_scores import TokenScores
from ragen_jax.settings import Settings


@struct.dataclass
class TokenLosses:
    """Losses of R rows; off the replies the numbers mean nothing."""

    total: jax.Array  # float32[R, T], what is minimized
    surrogate: jax.Array  # float32[R, T], the clipped policy loss in it
    is_clipped: jax.Array  # float32[R, T], 1 where that has no gradient, else 0
    divergence: jax.Array  # float32[R, T], nats, from the reference; 0 without one


def token_losses(
    settings: Settings, scores: TokenScores, piece: Batch, iteration: jax.Array
) -> TokenLosses:
    """The clipped loss, less the entropy bonus, with a KL term that is in the loss.

    Args:
      settings: of the run.
      scores: of the rows under the policy that is being trained.
      piece: R rows.
      iteration: int32[], by which coefficients may move.
    """
    chosen = settings.loss
    surrogate, is_clipped = _surrogate(settings, scores.logprobs, piece)
    bonus = scores.entropy
    if piece.has_bonus is not None:
        bonus = jnp.where(piece.has_bonus, bonus, 0.0)
    entropy = over_the_run(settings, chosen.entropy, chosen.entropy_end, iteration)
    total = surrogate - entropy * bonus
    divergence = jnp.zeros_like(surrogate)
    if settings.has_reference:
        divergence = losses.kl(scores.logprobs, piece.ref_logprobs, chosen.kl_kind)
        if chosen.kl_in == "loss":
            weight = over_the_run(settings, chosen.kl, chosen.kl_end, iteration)
            total += weight * divergence
    return TokenLosses(total, surrogate, is_clipped, divergence)


def _surrogate(settings: Settings, logprobs: jax.Array, piece: Batch):
    """The clipped loss of each token and where it is clipped, float32[R, T] each."""
    chosen, old = settings.loss, piece.old_logprobs
    clips: dict[str, Any] = dict(
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        dual_clip=chosen.dual_clip,
    )
    if chosen.ratio == "sequence":
        logprobs = losses.sequence_logprobs(logprobs, old, piece.is_reply)
    inputs = (logprobs, old, piece.advantages)
    loss = losses.clipped_policy_loss(*inputs, **clips)
    if chosen.sampler_correction:
        loss *= losses.sampler_weights(
            old, sampler_logprobs(piece), chosen.sampler_correction
        )
    return loss, losses.clip_fraction(*inputs, **clips)


def sampler_logprobs(piece: Batch) -> jax.Array:
    """float32[R, T], nats, as recorded while sampling."""
    recorded = piece.sampler_logprobs
    return piece.old_logprobs if recorded is None else recorded


def aggregate(settings: Settings, total: jax.Array, piece: Batch) -> Mean:
    """The mean that the settings choose, of the loss of each token.

    Args:
      settings: of the run.
      total: float32[R, T].
      piece: R rows.
    """
    name, rollout = settings.loss.aggregation, settings.rollout
    options: dict[str, Any] = {}
    if name == "sequence_mean_token_sum_norm":
        turns = 1 if rollout.window_turns else settings.most_turns()
        options = dict(most_tokens=turns * rollout.reply_tokens)
    mean = aggregation.AGGREGATIONS[name]
    return mean(total, piece.is_reply, piece.weight, **options)


def value_loss(settings: Settings, values: jax.Array, piece: Batch) -> Mean:
    """The critic's loss, the mean over the tokens that it learns at.

    Args:
      settings: of the run.
      values: float32[R, T], units of reward, of the critic that is being trained.
      piece: R rows.
    """
    loss = losses.clipped_value_loss(
        values, piece.old_values, piece.returns, settings.loss.value_clip
    )
    is_target = piece.is_reply if piece.is_target is None else piece.is_target
    return aggregation.token_mean(loss, is_target, piece.weight)
