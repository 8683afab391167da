"""Per-token losses of StarPO. Each returns float32[R, T]; aggregation.py averages them.

At tokens the policy did not write the results are numbers without meaning: mask them
with `aggregation`.
"""

import chex
import jax
import jax.numpy as jnp

# exp of this is 5e8. Beyond it exp would overflow to infinity, and its gradient to NaN
# even where the other branch of a minimum was taken.
_LARGEST_LOG_RATIO = 20.0
_LARGEST_K3 = 10.0  # nats, of a token's KL term


def clipped_policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> jax.Array:
    """PPO's clipped surrogate, with its own bound for rising probabilities.

    With r = exp(logprobs - old_logprobs), the loss of one token is
      -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),
    and with `dual_clip` c, where A < 0, at most -c * A.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; the asymmetric bound
    ("clip-higher") is DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.1; the second
    bound is Ye et al. 2020, arXiv:1912.09729, eq. 5. The log of r is held to at most
    20, as in verl.

    Args:
      logprobs: float[R, T], nats, under the policy being trained.
      old_logprobs: float[R, T], nats, under the policy that sampled the tokens.
      advantages: float[R, T], in units of reward (or of its standard deviation when
        normalized); held constant under differentiation.
      clip_low: how far r may fall below 1 before its gradient stops, in [0, 1).
      clip_high: how far r may rise above 1 before its gradient stops, >= 0.
      dual_clip: c > 1, above which r stops counting where A < 0; 0: no such bound.

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
    # Not jnp.clip, which halves the gradient at a bound: there r = 1 is if that is 0.
    clipped_ratio = jnp.where(ratio > 1 + clip_high, 1 + clip_high, ratio)
    clipped_ratio = jnp.where(ratio < 1 - clip_low, 1 - clip_low, clipped_ratio)
    loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    if not dual_clip:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def cispo_loss(
    logprobs: jax.Array,
    compared_logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """CISPO: log-probs weighted by the clipped ratio, which is held constant.

    With r = exp(compared_logprobs - old_logprobs), the loss of one token is
      -stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprobs.
    Unlike `clipped_policy_loss` no token loses its gradient: r beyond a bound weighs as
    much as at it.

    Source: MiniMax-M1, Chen et al. 2025, arXiv:2506.13585, eqs. 4 and 5, which sets no
    lower bound: clip_low near 1.

    Args:
      logprobs: float[R, T], nats, under the policy being trained.
      compared_logprobs: float[R, T], nats, the same, or by `sequence_logprobs`.
      old_logprobs, advantages, clip_low, clip_high: as for `clipped_policy_loss`.

    Returns:
      float32[R, T].

    Raises: as `clipped_policy_loss`.
    """
    _check_clip(clip_low, clip_high)
    chex.assert_equal_shape([logprobs, compared_logprobs])
    ratio = _ratio(compared_logprobs, old_logprobs, advantages)
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    gain = jax.lax.stop_gradient(weight * advantages.astype(jnp.float32))
    return -gain * logprobs.astype(jnp.float32)


def sequence_logprobs(
    logprobs: jax.Array, old_logprobs: jax.Array, is_reply: jax.Array
) -> jax.Array:
    """Log-probs whose ratio to the old ones is that of the whole row (GSPO).

    log s = mean over the row's reply tokens of (logprobs - old_logprobs), and the
    gradient of log s_t is that of the token's own log-prob:
      old + stop(log s) + logprobs - stop(logprobs).
    With one advantage a row and the mean over rows of token means this is GSPO's
    gradient; with advantages by token it is GSPO-token.

    Source: Zheng et al. 2025, arXiv:2507.18071, eqs. 7 and 13.

    Args:
      logprobs, old_logprobs: float[R, T], nats.
      is_reply: bool[R, T], the tokens of the sequence; elsewhere nothing is read.

    Returns:
      float32[R, T], nats.
    """
    chex.assert_equal_shape([logprobs, old_logprobs, is_reply])
    logprobs = logprobs.astype(jnp.float32)
    old_logprobs = jax.lax.stop_gradient(old_logprobs.astype(jnp.float32))
    constant = jax.lax.stop_gradient(logprobs)
    log_ratios = jnp.where(is_reply, constant - old_logprobs, 0.0)
    total, length = (x.sum(axis=1, keepdims=True) for x in (log_ratios, is_reply))
    return old_logprobs + total / jnp.maximum(length, 1) + (logprobs - constant)


def sampler_weights(
    old_logprobs: jax.Array, sampler_logprobs: jax.Array, bound: float
) -> jax.Array:
    """Truncated importance weights between the update's policy and the sampler's.

    min(exp(old_logprobs - sampler_logprobs), bound), constant under differentiation.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (truncated importance sampling); Ionides 2008.

    Args:
      old_logprobs: float[R, T], nats, by the update's own forward pass.
      sampler_logprobs: float[R, T], nats, as recorded while sampling.
      bound: largest weight, above 0.

    Returns:
      float32[R, T].
    """
    log_ratio = (old_logprobs - sampler_logprobs).astype(jnp.float32)
    weight = jnp.exp(jnp.minimum(log_ratio, _LARGEST_LOG_RATIO))
    return jax.lax.stop_gradient(jnp.minimum(weight, bound))


def clip_fraction(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> jax.Array:
    """1 where `clipped_policy_loss` has stopped the gradient of a token, else 0.

    That is where a gain overshoots: r > 1 + clip_high with A > 0, or r < 1 - clip_low
    with A < 0; and with `dual_clip` c where r > c with A < 0. Its token mean is the
    clip fraction.

    Args: as for `clipped_policy_loss`.

    Returns:
      float32[R, T], 0 or 1.
    """
    _check_clip(clip_low, clip_high)
    ratio = _ratio(logprobs, old_logprobs, advantages)
    rose = (ratio > 1 + clip_high) & (advantages > 0)
    fell = (ratio < 1 - clip_low) & (advantages < 0)
    if dual_clip:
        fell |= (ratio > dual_clip) & (advantages < 0)
    return (rose | fell).astype(jnp.float32)


def outside_clip(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """1 where `cispo_loss` clips a token's ratio, whatever its advantage, else 0.

    Args: `logprobs` are its `compared_logprobs`; the others as there.

    Returns:
      float32[R, T], 0 or 1.
    """
    _check_clip(clip_low, clip_high)
    ratio = _ratio(logprobs, old_logprobs, advantages)
    return ((ratio > 1 + clip_high) | (ratio < 1 - clip_low)).astype(jnp.float32)


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
      k1+, k3+                the value of k1 or k3, the gradient of k2

    Only k2, k3 and those with a plus push towards the reference when they are
    minimized: the gradient of k1 is 1 for every token, so k1 belongs in the reward
    (`rewards.penalize_kl`).

    Source: Schulman 2020, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html; the plus (straight-through) as in verl. d is held
    to at most 20 in k3, as in verl; `bounded_kl` has verl's bound of k3 itself.

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
    if kind not in KL_KINDS:
        known = tuple(KL_KINDS)
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {known}")
    return KL_KINDS[kind](difference)


def bounded_kl(divergence: jax.Array, kind: str) -> jax.Array:
    """What a token's KL adds to the loss, or takes from the reward: k3 up to 10 nats.

    Beyond, at d > 2.61 or d < -11 in `kl`, a token has no gradient by k3; by k3+ it has
    that of k2 all the same. The other kinds have no bound.

    Source: verl, trainer/ppo/core_algos.py, `kl_penalty`, whose `low_var_kl` clamps its
    value to 10.

    Args:
      divergence: float32[R, T], nats, as `kl` gives it.
      kind: one of KL_KINDS.

    Returns:
      float32[R, T], nats.
    """
    if kind == "k3":
        return jnp.minimum(divergence, _LARGEST_K3)
    if kind == "k3+":
        constant = jax.lax.stop_gradient(divergence)
        # The difference is exactly 0 and has the gradient.
        return jnp.minimum(constant, _LARGEST_K3) + (divergence - constant)
    return divergence


def _k3(difference: jax.Array) -> jax.Array:
    difference = jnp.minimum(difference, _LARGEST_LOG_RATIO)
    # expm1: exp(d) - 1 loses every digit where the two policies nearly agree.
    return jnp.expm1(difference) - difference


def _straight_through(value: jax.Array, difference: jax.Array) -> jax.Array:
    """`value`, with the gradient of k2."""
    slope = 0.5 * jnp.square(difference)
    return jax.lax.stop_gradient(value - slope) + slope


# Of d = ref_logprobs - logprobs. Described in settings' table of the same title.
KL_KINDS = {
    "k1": lambda difference: -difference,
    "k2": lambda difference: 0.5 * jnp.square(difference),
    "k3": _k3,
    "k1+": lambda difference: _straight_through(-difference, difference),
    "k3+": lambda difference: _straight_through(_k3(difference), difference),
}


def probability_ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    """float32[R, T], new over old probability of each token, at most exp(20)."""
    old_logprobs = jax.lax.stop_gradient(old_logprobs.astype(jnp.float32))
    log_ratio = logprobs.astype(jnp.float32) - old_logprobs
    return jnp.exp(jnp.minimum(log_ratio, _LARGEST_LOG_RATIO))


def _ratio(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """`probability_ratio` of arrays that were checked."""
    chex.assert_rank([logprobs, old_logprobs, advantages], 2)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages])
    chex.assert_type([logprobs, old_logprobs, advantages], float)
    return probability_ratio(logprobs, old_logprobs)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ValueError(
            f"need 0 <= clip_low < 1 and clip_high >= 0, got {clip_low=}, {clip_high=}"
        )
