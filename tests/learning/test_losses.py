"""Per-token losses against numbers worked out by hand and finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.learning import losses

RATIO = jnp.array([[1.0, 1.5, 0.5, 1.5, 0.5]])
ADVANTAGE = jnp.array([[2.0, 2.0, 2.0, -2.0, -2.0]])
# Clip bounds 0.2 and 0.3. Only a gain that overshoots is cut: tokens 1 and 4.
EXPECTED = np.array([[-2.0, -2.6, -1.0, 3.0, 1.6]])
IS_CLIPPED = np.array([[0.0, 1.0, 0.0, 0.0, 1.0]])
ZEROS = jnp.zeros((1, 5))


def test_policy_loss_equals_the_numbers_worked_out_by_hand():
    loss = jax.jit(_policy_loss)
    np.testing.assert_allclose(loss(jnp.log(RATIO)), EXPECTED, rtol=1e-5)


def test_policy_gradient_stops_exactly_where_the_clip_fraction_says():
    gradient = jax.grad(lambda x: _policy_loss(x).sum())(jnp.log(RATIO))
    clipped = losses.clip_fraction(
        jnp.log(RATIO), ZEROS, ADVANTAGE, clip_low=0.2, clip_high=0.3
    )
    np.testing.assert_array_equal(clipped, IS_CLIPPED)
    np.testing.assert_array_equal(np.asarray(gradient) == 0, IS_CLIPPED == 1)


def test_on_policy_the_gradient_is_whole_also_where_a_clip_bound_is_zero():
    advantages = jnp.array([[2.0, -2.0]])
    for low, high in ((0.2, 0.28), (0.0, 0.28), (0.2, 0.0), (0.0, 0.0)):
        gradient = jax.grad(
            lambda x, low=low, high=high: losses.clipped_policy_loss(
                x, advantages * 0, advantages, clip_low=low, clip_high=high
            ).sum()
        )(advantages * 0)
        np.testing.assert_array_equal(gradient, -advantages)


@pytest.mark.parametrize(
    ("clip_high", "is_clipped"), [(0.3, [[0, 1, 0, 1, 1]]), (0.6, [[0, 0, 0, 1, 1]])]
)
def test_the_clip_fraction_counts_what_the_second_bound_stops(clip_high, is_clipped):
    """r = 1.5 with A < 0 is the fourth token; with A > 0, the second, it may pass."""
    bounds = dict(clip_low=0.2, clip_high=clip_high, dual_clip=1.4)
    given = (jnp.log(RATIO), ZEROS, ADVANTAGE)
    gradient = jax.grad(
        lambda x: losses.clipped_policy_loss(x, *given[1:], **bounds).sum()
    )(given[0])
    np.testing.assert_array_equal(losses.clip_fraction(*given, **bounds), is_clipped)
    np.testing.assert_array_equal(np.asarray(gradient) == 0, is_clipped)


def test_policy_gradient_before_any_step_is_minus_the_advantage():
    gradient = jax.grad(lambda x: _policy_loss(x).sum())(ZEROS)
    np.testing.assert_allclose(gradient, -ADVANTAGE, rtol=1e-6)


def test_a_step_down_the_gradient_raises_what_did_better_and_lowers_what_did_worse():
    gradient = jax.grad(lambda x: _policy_loss(x).sum())(ZEROS)
    np.testing.assert_array_equal(np.sign(-gradient), np.sign(ADVANTAGE))


@pytest.mark.parametrize("seed", range(3))
def test_policy_gradient_equals_finite_differences(seed):
    random = np.random.default_rng(seed)
    logprobs = jnp.asarray(random.normal(size=(1, 5)) * 0.3, jnp.float32)
    gradient = jax.grad(lambda x: _policy_loss(x).sum())(logprobs)
    _assert_slope(_policy_loss, logprobs, gradient)


def test_policy_loss_equals_a_loop_over_tokens():
    random = np.random.default_rng(0)
    new, old = -random.random((2, 4, 9)).astype(np.float32)
    advantages = random.normal(size=(4, 9)).astype(np.float32)
    loss = losses.clipped_policy_loss(
        jnp.asarray(new),
        jnp.asarray(old),
        jnp.asarray(advantages),
        clip_low=0.2,
        clip_high=0.28,
    )
    for place in np.ndindex(4, 9):
        ratio = np.exp(np.float64(new[place]) - np.float64(old[place]))
        held = min(max(ratio, 0.8), 1.28)
        expected = -min(ratio * advantages[place], held * advantages[place])
        np.testing.assert_allclose(loss[place], expected, rtol=1e-5, atol=1e-6)


def test_nothing_flows_into_old_logprobs_or_advantages():
    def loss(old_logprobs, advantages):
        return losses.clipped_policy_loss(
            jnp.log(RATIO), old_logprobs, advantages, clip_low=0.2, clip_high=0.3
        ).sum()

    for gradient in jax.grad(loss, argnums=(0, 1))(ZEROS, ADVANTAGE):
        np.testing.assert_array_equal(gradient, np.zeros((1, 5)))


def test_a_ratio_that_would_overflow_leaves_loss_and_gradient_finite():
    logprobs = jnp.array([[0.0, 0.0, 0.0]])
    old_logprobs = jnp.full((1, 3), -500.0)
    advantages = jnp.array([[1.0, 0.0, -1.0]])

    def loss(logprobs):
        return losses.clipped_policy_loss(
            logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.3
        )

    np.testing.assert_allclose(loss(logprobs)[0, :2], [-1.3, 0.0], rtol=1e-6)
    assert np.isfinite(loss(logprobs)).all()
    assert np.isfinite(jax.grad(lambda x: loss(x).sum())(logprobs)).all()


def _cispo(logprobs, compared=None):
    return losses.cispo_loss(
        logprobs,
        logprobs if compared is None else compared,
        OLD,
        ADVANTAGE,
        clip_low=0.2,
        clip_high=0.3,
    )


# Log-probs of tokens whose ratios are RATIO, and these held from 0.8 to 1.3.
OLD = jnp.log(jnp.array([[0.5, 0.4, 0.25, 0.2, 0.8]]))
HELD = np.array([[1.0, 1.3, 0.8, 1.3, 0.8]])


def test_cispo_weighs_log_probs_by_the_clipped_ratio_and_no_token_loses_its_gradient():
    new = OLD + jnp.log(RATIO)
    weighted = -HELD * np.array([[2, 2, 2, -2, -2]])
    wanted = weighted * np.log([[0.5, 0.6, 0.125, 0.3, 0.4]])
    np.testing.assert_allclose(jax.jit(_cispo)(new), wanted, rtol=1e-5)
    gradient = jax.grad(lambda x: _cispo(x).sum())(new)
    np.testing.assert_allclose(gradient, weighted, rtol=1e-5)


def test_the_ratio_and_the_advantage_are_constants_to_cispo():
    new = OLD + jnp.log(RATIO)

    def loss(compared, old, advantages):
        given = (new, compared, old, advantages)
        return losses.cispo_loss(*given, clip_low=0.9, clip_high=9.0).sum()

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(new, OLD, ADVANTAGE):
        np.testing.assert_array_equal(gradient, np.zeros((1, 5)))


def test_cispo_counts_as_clipped_what_lies_outside_whatever_the_advantage():
    given = (jnp.log(RATIO), ZEROS, ADVANTAGE)
    found = losses.outside_clip(*given, clip_low=0.2, clip_high=0.3)
    np.testing.assert_array_equal(found, [[0, 1, 1, 1, 1]])
    found = losses.outside_clip(*given, clip_low=0.9, clip_high=0.3)
    np.testing.assert_array_equal(found, [[0, 1, 0, 1, 0]])


@pytest.mark.parametrize(
    "function",
    [
        losses.clipped_policy_loss,
        losses.clip_fraction,
        losses.outside_clip,
        functools.partial(losses.cispo_loss, RATIO),
    ],
)
@pytest.mark.parametrize("bounds", [(1.5, 0.2), (-0.1, 0.2), (0.2, -0.1)])
def test_rejects_a_clip_bound_outside_its_range(function, bounds):
    with pytest.raises(ValueError, match=f"clip_low={bounds[0]}"):
        function(RATIO, RATIO, RATIO, clip_low=bounds[0], clip_high=bounds[1])


def test_policy_loss_rejects_arrays_of_different_shapes():
    with pytest.raises(AssertionError):
        losses.clipped_policy_loss(
            RATIO, RATIO[:, :1], RATIO, clip_low=0.2, clip_high=0.2
        )


# value, old, return with clip 0.5: inside; moved past the clip towards the target
# (held at 0.5: 0.5 * 1.5^2); past it away from the target (its own, larger, error).
VALUE = jnp.array([[0.25, 1.0, 1.0]])
OLD_VALUE = jnp.array([[0.0, 0.0, 0.0]])
RETURN = jnp.array([[1.0, 2.0, -1.0]])


def test_value_loss_equals_the_numbers_worked_out_by_hand():
    loss = jax.jit(functools.partial(losses.clipped_value_loss, clip=0.5))
    np.testing.assert_allclose(
        loss(VALUE, OLD_VALUE, RETURN), [[0.28125, 1.125, 2.0]], rtol=1e-6
    )


@pytest.mark.parametrize("clip", [None, 0, 0.0, -1.0])
def test_value_loss_without_a_clip_is_half_the_squared_error(clip):
    loss = losses.clipped_value_loss(VALUE, OLD_VALUE, RETURN, clip)
    np.testing.assert_allclose(loss, [[0.28125, 0.5, 2.0]], rtol=1e-6)


def test_value_gradient_points_to_the_return_unless_the_clip_holds_it():
    def loss(values, old_values, returns):
        return losses.clipped_value_loss(values, old_values, returns, 0.5).sum()

    into_value, into_old, into_return = jax.grad(loss, argnums=(0, 1, 2))(
        VALUE, OLD_VALUE, RETURN
    )
    np.testing.assert_allclose(into_value, [[-0.75, 0.0, 2.0]], rtol=1e-6)
    np.testing.assert_array_equal(into_old, np.zeros((1, 3)))
    np.testing.assert_array_equal(into_return, np.zeros((1, 3)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [[np.log(2), -np.log(2), 0.0]]),
        ("k2", [[np.log(2) ** 2 / 2, np.log(2) ** 2 / 2, 0.0]]),
        # d = -log 2: 1/2 - 1 + log 2; d = log 2: 2 - 1 - log 2.
        ("k3", [[np.log(2) - 0.5, 1 - np.log(2), 0.0]]),
    ],
)
def test_kl_equals_the_numbers_worked_out_by_hand(kind, expected):
    estimate = jax.jit(functools.partial(losses.kl, kind=kind))
    logprobs = jnp.log(jnp.array([[0.5, 0.25, 0.1]]))
    reference = jnp.log(jnp.array([[0.25, 0.5, 0.1]]))
    np.testing.assert_allclose(estimate(logprobs, reference), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_true_kl(kind):
    policy, reference = _two_distributions()
    estimate = losses.kl(jnp.log(policy), jnp.log(reference), kind)
    true_kl = (policy * jnp.log(policy / reference)).sum()
    np.testing.assert_allclose((policy * estimate).sum(), true_kl, rtol=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_minimizing_the_kl_moves_every_token_towards_the_reference(kind):
    logprobs = jnp.array([[-3.0, -1.0, -0.5, -2.0]])
    reference = jnp.array([[-1.0, -3.0, -0.6, -2.0]])

    def estimate(x):
        return losses.kl(x, reference, kind)

    gradient = jax.grad(lambda x: estimate(x).sum())(logprobs)
    np.testing.assert_array_equal(np.sign(-gradient), np.sign(reference - logprobs))
    _assert_slope(estimate, logprobs, gradient)


def test_the_expected_gradient_of_k2_is_that_of_the_true_kl():
    policy, reference = _two_distributions()
    logits = jnp.log(policy)

    def true_kl(logits):
        logprobs = jax.nn.log_softmax(logits)
        return (jnp.exp(logprobs) * (logprobs - jnp.log(reference))).sum()

    def sampled_k2(logits):  # The sampling probabilities are not differentiated.
        estimate = losses.kl(jax.nn.log_softmax(logits), jnp.log(reference), "k2")
        return (policy * estimate).sum()

    np.testing.assert_allclose(
        jax.grad(sampled_k2)(logits), jax.grad(true_kl)(logits), atol=1e-6
    )


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    difference = 1e-4
    estimate = losses.kl(jnp.array([[0.0]]), jnp.array([[difference]]), "k3")
    # exp(d) - 1 in float32 would be off by 6e-8, ten times the answer, 5e-9.
    np.testing.assert_allclose(estimate, [[difference**2 / 2]], rtol=2e-3)


def test_k3_of_a_reply_the_policy_gave_up_stays_finite():
    logprobs = jnp.array([[-500.0]])
    value, gradient = jax.value_and_grad(
        lambda x: losses.kl(x, jnp.zeros((1, 1)), "k3").sum()
    )(logprobs)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


# e^d - 1 - d is 9.989 at d = 2.61, 10.116 at 2.62, 9.900 at -10.9, 10.100 at -11.1.
DIFFERENCE = jnp.array([[0.5, 2.61, 2.62, 20.0, -10.9, -11.1]])
K3_GRADIENT = [[1 - np.exp(0.5), 1 - np.exp(2.61), 0.0, 0.0, 1 - np.exp(-10.9), 0.0]]


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k3", K3_GRADIENT), ("k3+", -DIFFERENCE)]
)
def test_the_kl_term_of_a_token_is_at_most_ten_nats(kind, gradient):
    @jax.jit
    def term(logprobs):
        return losses.bounded_kl(losses.kl(logprobs, DIFFERENCE, kind), kind)

    slope = jax.jit(jax.grad(lambda x: term(x).sum()))
    logprobs = jnp.zeros((1, 6))
    expected = [[0.148721, 9.989051, 10.0, 10.0, 9.900018, 10.0]]
    np.testing.assert_allclose(term(logprobs), expected, rtol=1e-5)
    np.testing.assert_allclose(slope(logprobs), gradient, rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k1+"])
def test_other_kl_terms_have_no_bound(kind):
    divergence = losses.kl(jnp.zeros((1, 6)), -DIFFERENCE, kind)
    assert np.abs(divergence).max() > 10
    np.testing.assert_array_equal(losses.bounded_kl(divergence, kind), divergence)


@pytest.mark.parametrize("kind", losses.KL_KINDS)
def test_nothing_flows_into_the_reference(kind):
    gradient = jax.grad(lambda r: losses.kl(jnp.log(RATIO), r, kind).sum())(ZEROS)
    np.testing.assert_array_equal(gradient, np.zeros((1, 5)))


def test_kl_rejects_a_kind_it_does_not_know():
    with pytest.raises(ValueError, match="'k4'; choose one of"):
        losses.kl(ZEROS, ZEROS, "k4")


def _policy_loss(logprobs):
    return losses.clipped_policy_loss(
        logprobs, ZEROS, ADVANTAGE, clip_low=0.2, clip_high=0.3
    )


def _two_distributions():
    return jnp.array([[0.5, 0.3, 0.2]]), jnp.array([[0.2, 0.2, 0.6]])


def _assert_slope(function, x, gradient, step=1e-3):
    """The losses are elementwise, so one shift of all elements gives every slope."""
    slope = (function(x + step) - function(x - step)) / (2 * step)
    np.testing.assert_allclose(gradient, slope, rtol=2e-3, atol=2e-3)


# Other bounds, ratios and gradients ---------------------------------------------------


def test_the_dual_clip_bounds_the_loss_of_what_did_worse():
    # Ratio 5 with A = -2 costs 10, at most 3 * 2; with A = 2 the clip holds 1.3 * 2.
    ratio, advantage = jnp.array([[5.0, 5.0, 2.0]]), jnp.array([[-2.0, 2.0, -2.0]])
    loss = functools.partial(
        losses.clipped_policy_loss,
        old_logprobs=jnp.zeros((1, 3)),
        advantages=advantage,
        clip_low=0.2,
        clip_high=0.3,
    )
    np.testing.assert_allclose(loss(jnp.log(ratio)), [[10, -2.6, 4]], rtol=1e-5)
    bounded = functools.partial(loss, dual_clip=3.0)
    np.testing.assert_allclose(bounded(jnp.log(ratio)), [[6, -2.6, 4]], rtol=1e-5)
    gradient = jax.grad(lambda x: bounded(x).sum())(jnp.log(ratio))
    np.testing.assert_array_equal(np.asarray(gradient) == 0, [[True, True, False]])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    rng = np.random.default_rng(0)
    new, reference = (jnp.asarray(rng.normal(size=(2, 5)), jnp.float32) for _ in "ab")
    plus = functools.partial(losses.kl, ref_logprobs=reference, kind=f"{kind}+")
    np.testing.assert_allclose(
        plus(new), losses.kl(new, reference, kind), rtol=1e-5, atol=1e-6
    )
    gradient = jax.grad(lambda x: plus(x).sum())(new)
    np.testing.assert_allclose(gradient, new - reference, rtol=1e-5)


SEQUENCE = jnp.array([[True, True, False, True], [True, False, False, False]])


def _sequence_loss(logprobs, old, gain, *, is_stopped=True):
    """Mean over rows of the token means; without stops GSPO's eq. 5, written out."""
    if is_stopped:
        held = losses.sequence_logprobs(logprobs, old, SEQUENCE)
    else:
        moved = jnp.where(SEQUENCE, logprobs - old, 0).sum(1) / SEQUENCE.sum(1)
        held = old + moved[:, None]
    loss = losses.clipped_policy_loss(held, old, gain, clip_low=0.2, clip_high=0.3)
    return (jnp.where(SEQUENCE, loss, 0).sum(1) / SEQUENCE.sum(1)).mean()


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    old = jnp.zeros((2, 4))
    logprobs = jnp.log(jnp.array([[2.0, 1.0, 7.0, 4.0], [3.0, 7.0, 7.0, 7.0]]))
    held = np.exp(losses.sequence_logprobs(logprobs, old, SEQUENCE))
    np.testing.assert_allclose(held[0, [0, 1, 3]], 2.0, rtol=1e-5)
    np.testing.assert_allclose(held[1, 0], 3.0, rtol=1e-5)
    padding = losses.sequence_logprobs(logprobs, old, jnp.zeros((2, 4), bool))
    np.testing.assert_array_equal(padding, old)  # A NaN would reach the gradient.


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_sequences_ratio_is_that_of_gspo_and_of_differences(seed):
    rng = np.random.default_rng(seed)
    old, step = (rng.normal(size=(2, 4)).astype(np.float32) * 0.2 for _ in "ab")
    new = jnp.asarray(old + step)
    gain = jnp.broadcast_to(jnp.asarray(rng.normal(size=(2, 1)), jnp.float32), (2, 4))
    found = jax.grad(_sequence_loss)(new, old, gain)
    plain = functools.partial(_sequence_loss, old=old, gain=gain, is_stopped=False)
    np.testing.assert_allclose(found, jax.grad(plain)(new), rtol=1e-4, atol=1e-6)
    for place in [(0, 0), (0, 3), (1, 0)]:
        up, down = new.at[place].add(1e-2), new.at[place].add(-1e-2)
        slope = (plain(up) - plain(down)) / 2e-2
        np.testing.assert_allclose(found[place], slope, rtol=5e-2, atol=1e-4)


def test_a_sequences_gradient_at_ratio_one_is_the_policy_gradient():
    rng = np.random.default_rng(1)
    logprobs, gain = (jnp.asarray(rng.normal(size=(2, 4)), jnp.float32) for _ in "ab")
    found = jax.grad(_sequence_loss)(logprobs, logprobs, gain)
    expected = np.where(SEQUENCE, -gain / SEQUENCE.sum(1, keepdims=True), 0) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_sampler_weights_are_the_ratio_up_to_their_bound_and_constant():
    own = jnp.log(jnp.array([[1.0, 4.0, 0.5]]))
    found = losses.sampler_weights(own, jnp.zeros((1, 3)), 2.0)
    np.testing.assert_allclose(found, [[1.0, 2.0, 0.5]], rtol=1e-6)
    gradient = jax.grad(lambda x: losses.sampler_weights(x, own, 2.0).sum())(own)
    assert not np.asarray(gradient).any()
