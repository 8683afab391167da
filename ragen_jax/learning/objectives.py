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
    surrogate: jax.Array  # float32[R, T], the policy's loss in it
    # float32[R, T], 1 where that has no gradient, else 0; of CISPO: where the ratio is
    # clipped.
    is_clipped: jax.Array
    divergence: jax.Array  # float32[R, T], nats, from the reference; 0 without one


def token_losses(
    settings: Settings, scores: TokenScores, microbatch: Batch, iteration: jax.Array
) -> TokenLosses:
    """The policy's loss, less the entropy bonus, with a KL term that is in the loss.

    Args:
      settings: of the run.
      scores: of the rows under the policy that is being trained.
      microbatch: R rows.
      iteration: int32[], by which coefficients may move.
    """
    options = settings.loss
    surrogate, is_clipped = _surrogate(settings, scores.logprobs, microbatch)
    bonus = scores.entropy
    if microbatch.has_bonus is not None:
        bonus = jnp.where(microbatch.has_bonus, bonus, 0.0)
    entropy = over_the_run(settings, options.entropy, options.entropy_end, iteration)
    total = surrogate - entropy * bonus
    divergence = jnp.zeros_like(surrogate)
    if settings.has_reference:
        divergence = losses.kl(
            scores.logprobs, microbatch.ref_logprobs, options.kl_kind
        )
        if options.kl_in == "loss":
            weight = over_the_run(settings, options.kl, options.kl_end, iteration)
            total += weight * losses.bounded_kl(divergence, options.kl_kind)
    return TokenLosses(total, surrogate, is_clipped, divergence)


def _surrogate(settings: Settings, logprobs: jax.Array, microbatch: Batch):
    """The policy's loss of each token and where it is clipped, float32[R, T] each."""
    options, old_logprobs = settings.loss, microbatch.old_logprobs
    clips: dict[str, Any] = dict(clip_low=options.clip_low, clip_high=options.clip_high)
    compared = logprobs  # whose ratio to the old ones is clipped
    if options.ratio == "sequence":
        compared = losses.sequence_logprobs(
            logprobs, old_logprobs, microbatch.policy_tokens
        )
    inputs = (compared, old_logprobs, microbatch.advantages)
    if options.surrogate == "cispo":
        loss = losses.cispo_loss(logprobs, *inputs, **clips)
    else:
        clips["dual_clip"] = options.dual_clip
        loss = losses.clipped_policy_loss(*inputs, **clips)
    if options.sampler_correction:
        loss *= losses.sampler_weights(
            old_logprobs, sampler_logprobs(microbatch), options.sampler_correction
        )
    if options.surrogate == "cispo":
        return loss, losses.outside_clip(*inputs, **clips)
    return loss, losses.clip_fraction(*inputs, **clips)


def sampler_logprobs(microbatch: Batch) -> jax.Array:
    """float32[R, T], nats, as recorded while sampling."""
    recorded = microbatch.sampler_logprobs
    return microbatch.old_logprobs if recorded is None else recorded


def aggregate(settings: Settings, total: jax.Array, microbatch: Batch) -> Mean:
    """The mean that the settings choose, of the loss of each token.

    Args:
      settings: of the run.
      total: float32[R, T].
      microbatch: R rows.
    """
    name, rollout = settings.loss.aggregation, settings.rollout
    options: dict[str, Any] = {}
    if name == "sequence_mean_token_sum_norm":
        turns = 1 if rollout.window_turns else settings.most_turns()
        options = dict(most_tokens=turns * rollout.reply_tokens)
    mean = aggregation.AGGREGATIONS[name]
    return mean(total, microbatch.policy_tokens, microbatch.weight, **options)


def value_loss(settings: Settings, values: jax.Array, microbatch: Batch) -> Mean:
    """The critic's loss, the mean over the tokens that it learns at.

    Whatever loss.cut_replies is, those of cut replies are among them: what the episode
    earned from there on is known, and the tokens before are judged by these values.

    Args:
      settings: of the run.
      values: float32[R, T], units of reward, of the critic that is being trained.
      microbatch: R rows.
    """
    loss = losses.clipped_value_loss(
        values, microbatch.old_values, microbatch.returns, settings.loss.value_clip
    )
    return aggregation.token_mean(loss, microbatch.critic_tokens, microbatch.weight)
