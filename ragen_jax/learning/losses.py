"""Per-token losses of StarPO. Each returns float32[R, T]; reduce.py averages them.

At tokens the policy did not write the results are numbers without meaning: mask them
with `reduce`.
"""

import chex
import jax
import jax.numpy as jnp

# exp of this is 5e8. Beyond it exp would overflow to infinity, and its gradient to NaN
# even where the other branch of a minimum was taken.
_LARGEST_LOG_RATIO = 20.0

KL_KINDS = ("k1", "k2", "k3")


def clipped_policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """PPO's clipped surrogate, with its own bound for rising probabilities.

    With r = exp(logprobs - old_logprobs), the loss of one token is
      -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; the asymmetric bound
    ("clip-higher") is DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.1. The log of
    r is held to at most 20, as in verl.

    Args:
      logprobs: float[R, T], nats, under the policy being trained.
      old_logprobs: float[R, T], nats, under the policy that sampled the tokens.
      advantages: float[R, T], in units of reward (or of its standard deviation when
        normalized); held constant under differentiation.
      clip_low: how far r may fall below 1 before its gradient stops, in [0, 1).
      clip_high: how far r may rise above 1 before its gradient stops, >= 0.

    Returns:
      float32[R, T].

    Raises:
      AssertionError: while tracing, if the three arrays are not float[R, T] of one
        shape.
      ValueError: if a clip bound lies outside its range.
    """
    _check_clip(clip_low, clip_high)
    ratio = _ratio(logprobs, old_logprobs, advantages)
    advantages = jax.lax.stop_gradient(advantages.astype(jnp.float32))
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped_ratio * advantages)


def clip_fraction(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """1 where `clipped_policy_loss` has stopped the gradient of a token, else 0.

    That is where a gain overshoots: r > 1 + clip_high with A > 0, or r < 1 - clip_low
    with A < 0. Its token mean is the clip fraction.

    Args: as for `clipped_policy_loss`.

    Returns:
      float32[R, T], 0 or 1.
    """
    _check_clip(clip_low, clip_high)
    ratio = _ratio(logprobs, old_logprobs, advantages)
    rose = (ratio > 1 + clip_high) & (advantages > 0)
    fell = (ratio < 1 - clip_low) & (advantages < 0)
    return (rose | fell).astype(jnp.float32)


def clipped_value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float | None
) -> jax.Array:
    """Squared error of the critic, pessimistic about steps longer than `clip`.

    With c = old + clip(value - old, -clip, clip), the loss of one token is
      0.5 * max((value - return)^2, (c - return)^2).

    Source: OpenAI Baselines, ppo2/model.py; Engstrom et al. 2020, arXiv:2005.12729,
    section 3, item 1.

    Args:
      values: float[R, T], units of reward, of the critic being trained.
      old_values: float[R, T], units of reward, of the critic when the rows were
        sampled; held constant under differentiation.
      returns: float[R, T], units of reward, the target; held constant likewise.
      clip: how far a value may move from its old one before its gradient stops, in
        units of reward; None or <= 0 turns clipping off.

    Returns:
      float32[R, T], squared units of reward.
    """
    chex.assert_rank([values, old_values, returns], 2)
    chex.assert_equal_shape([values, old_values, returns])
    chex.assert_type([values, old_values, returns], float)
    values = values.astype(jnp.float32)
    old_values = jax.lax.stop_gradient(old_values.astype(jnp.float32))
    returns = jax.lax.stop_gradient(returns.astype(jnp.float32))
    error = jnp.square(values - returns)
    if clip is None or clip <= 0:
        return 0.5 * error
    clipped_values = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum(error, jnp.square(clipped_values - returns))


def kl(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str) -> jax.Array:
    """Estimates KL(policy || reference) from one sampled token, in nats.

    With d = ref_logprobs - logprobs of a token that the policy sampled:
      k1 = -d                 unbiased; may be negative
      k2 = d^2 / 2            biased; its gradient is that of the true KL on average
      k3 = exp(d) - 1 - d     unbiased; never negative

    Only k2 and k3 push towards the reference when they are minimized: the gradient of
    k1 is 1 for every token, so k1 belongs in the reward (`rewards.penalize_kl`).

    Source: Schulman 2020, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html. d is held to at most 20 in k3, as in verl.

    Args:
      logprobs: float[R, T], nats, under the policy.
      ref_logprobs: float[R, T], nats, under the frozen reference; held constant under
        differentiation.
      kind: one of KL_KINDS.

    Returns:
      float32[R, T], nats.

    Raises:
      ValueError: if `kind` is none of KL_KINDS.
    """
    chex.assert_rank([logprobs, ref_logprobs], 2)
    chex.assert_equal_shape([logprobs, ref_logprobs])
    chex.assert_type([logprobs, ref_logprobs], float)
    reference = jax.lax.stop_gradient(ref_logprobs.astype(jnp.float32))
    difference = reference - logprobs.astype(jnp.float32)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        difference = jnp.minimum(difference, _LARGEST_LOG_RATIO)
        # expm1: exp(d) - 1 loses every digit where the two policies nearly agree.
        return jnp.expm1(difference) - difference
    raise ValueError(f"unknown KL estimator {kind!r}; choose one of {KL_KINDS}")


def _ratio(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """float32[R, T], new over old probability of each token."""
    chex.assert_rank([logprobs, old_logprobs, advantages], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages])
    chex.assert_type([logprobs, old_logprobs, advantages], float)
    old_logprobs = jax.lax.stop_gradient(old_logprobs.astype(jnp.float32))
    log_ratio = logprobs.astype(jnp.float32) - old_logprobs
    return jnp.exp(jnp.minimum(log_ratio, _LARGEST_LOG_RATIO))


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ValueError(
            f"need 0 <= clip_low < 1 and clip_high >= 0, got {clip_low=}, {clip_high=}"
        )
