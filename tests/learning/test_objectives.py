"""The losses of policy and critic under the settings, worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates

from ragen_jax.learning import objectives
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.vocabulary_scores import TokenScores

# Three reply tokens of ratios 1, 1.5 and 0.5 with advantages 2, -2 and 1; clip bounds
# 0.2 and 0.3.
NEW = jnp.log(jnp.array([[0.5, 0.375, 0.2]]))
OLD = jnp.log(jnp.array([[0.5, 0.25, 0.4]]))
GAIN = jnp.array([[2.0, -2.0, 1.0]])
SURROGATE = np.array([[-2.0, 3.0, -0.5]])
ENTROPY = jnp.array([[1.0, 0.5, 2.0]])
# d = 0.1, -0.2, 0.3: k2 = d^2 / 2.
REFERENCE = NEW + jnp.array([[0.1, -0.2, 0.3]])
K2 = np.array([[0.005, 0.02, 0.045]])
BARE = dict(estimator="grpo", loss__clip_low=0.2, loss__clip_high=0.3, iterations=3)


def losses_of(
    iteration: int = 0,
    sampled=None,
    has_bonus=None,
    has_loss=None,
    reference=REFERENCE,
    **changes,
):
    """`token_losses` of those tokens; without an entropy bonus unless asked for."""
    chosen = updates.settings(**BARE | dict(loss__entropy=0.0) | changes)
    nothing = jnp.zeros((1, 3))
    piece = Batch(
        tokens=nothing,
        is_reply=nothing == 0,
        old_logprobs=OLD,
        ref_logprobs=reference,
        old_values=nothing,
        advantages=GAIN,
        returns=nothing,
        weight=jnp.ones(1),
        sampler_logprobs=sampled,
        has_bonus=has_bonus,
        has_loss=has_loss,
    )
    scores = TokenScores(NEW, ENTROPY)
    return objectives.token_losses(chosen, scores, piece, jnp.int32(iteration))


def test_the_entropy_is_a_bonus_of_the_iterations_coefficient_where_it_is_given():
    ends = dict(loss__entropy=0.1, loss__entropy_end=0.3)
    found = losses_of(1, **ends)
    np.testing.assert_allclose(found.surrogate, SURROGATE, rtol=1e-5)
    np.testing.assert_allclose(found.total, SURROGATE - 0.2 * ENTROPY, rtol=1e-5)
    found = losses_of(2, has_bonus=jnp.array([[True, False, False]]), **ends)
    np.testing.assert_allclose(found.total, SURROGATE - [[0.3, 0, 0]], rtol=1e-5)


@pytest.mark.parametrize(("kl_in", "weight"), [("loss", 0.1), ("reward", 0.0)])
def test_the_kl_term_is_in_the_loss_only_where_it_is_asked_for(kl_in, weight):
    kl = dict(loss__kl=0.5, loss__kl_end=0.1, loss__kl_kind="k2", loss__kl_in=kl_in)
    found = losses_of(2, **kl)
    np.testing.assert_allclose(found.divergence, K2, rtol=1e-4)
    np.testing.assert_allclose(found.total, SURROGATE + weight * K2, rtol=1e-5)


def test_the_kl_term_is_bounded_and_recorded_without_the_bound():
    reference = NEW + jnp.array([[0.1, 3.0, -12.0]])
    kl = dict(loss__kl=0.5, loss__kl_kind="k3", loss__kl_in="loss")
    found = losses_of(reference=reference, **kl)
    k3 = np.array([[np.exp(0.1) - 1.1, np.exp(3) - 4, np.exp(-12) + 11]])
    assert k3[0, 1] > 16
    np.testing.assert_allclose(found.divergence, k3, rtol=1e-4)
    np.testing.assert_allclose(
        found.total, SURROGATE + 0.5 * np.minimum(k3, 10), rtol=1e-5
    )


def test_the_second_bound_holds_what_did_worse():
    found = losses_of(loss__dual_clip=1.25)
    np.testing.assert_allclose(found.total, [[-2.0, 2.5, -0.5]], rtol=1e-5)
    np.testing.assert_array_equal(found.is_clipped, [[0, 1, 0]])


def test_the_sampler_is_corrected_for_up_to_the_bound():
    # The update finds the tokens 2, 1/2 and 1 times as likely as the sampler did.
    sampled = OLD - jnp.log(jnp.array([[2.0, 0.5, 1.0]]))
    found = losses_of(sampled=sampled, loss__sampler_correction=1.5)
    np.testing.assert_allclose(found.total, [[-3.0, 1.5, -0.5]], rtol=1e-5)
    np.testing.assert_allclose(losses_of(sampled=sampled).total, SURROGATE, rtol=1e-5)


def test_a_sequences_tokens_share_its_ratio():
    found = losses_of(loss__ratio="sequence")
    np.testing.assert_allclose(found.total, -(0.75 ** (1 / 3)) * GAIN, rtol=1e-5)


def test_a_sequence_without_its_masked_tokens_has_the_ratio_of_the_others():
    masked = jnp.array([[True, False, True]])
    found = losses_of(loss__ratio="sequence", has_loss=masked)
    np.testing.assert_allclose(found.total[masked], -(0.5**0.5) * GAIN[masked], 1e-5)


# Ratios 1, 1.5 and 0.5, held from 0.8 to 1.3, times advantages 2, -2 and 1.
HELD = np.array([[2.0, -2.6, 0.8]])


def test_cispo_has_its_own_loss_and_counts_what_lies_outside_its_clip():
    found = losses_of(loss__surrogate="cispo")
    np.testing.assert_allclose(found.surrogate, -HELD * NEW, rtol=1e-5)
    np.testing.assert_allclose(found.total, found.surrogate)
    np.testing.assert_array_equal(found.is_clipped, [[0, 1, 1]])


def test_cispo_is_corrected_for_the_sampler_as_the_clipped_loss_is():
    sampled = OLD - jnp.log(jnp.array([[2.0, 0.5, 1.0]]))
    found = losses_of(
        sampled=sampled, loss__surrogate="cispo", loss__sampler_correction=1.5
    )
    wanted = -HELD * NEW * np.array([[1.5, 0.5, 1.0]])
    np.testing.assert_allclose(found.total, wanted, rtol=1e-5)


def test_cispo_weighs_a_sequences_tokens_by_its_ratio_and_keeps_their_log_probs():
    found = losses_of(loss__surrogate="cispo", loss__ratio="sequence")
    np.testing.assert_allclose(found.total, -(0.75 ** (1 / 3)) * GAIN * NEW, rtol=1e-5)
    np.testing.assert_array_equal(found.is_clipped, [[0, 0, 0]])
    low = dict(loss__clip_low=0.05)
    found = losses_of(loss__surrogate="cispo", loss__ratio="sequence", **low)
    np.testing.assert_allclose(found.total, -0.95 * GAIN * NEW, rtol=1e-5)
    np.testing.assert_array_equal(found.is_clipped, [[1, 1, 1]])


MEANS_WITHOUT_THE_MASKED = {
    # Rows of losses 1, 2, 4 and 8, 16, 32, without 2, 8, 16 and 32.
    "token_mean": (5.0, 2),
    "sequence_mean_token_mean": (2.5, 1),
    "sequence_mean_token_sum": (5.0, 1),
}


@pytest.mark.parametrize("name", MEANS_WITHOUT_THE_MASKED)
def test_masked_tokens_are_neither_in_a_mean_nor_in_its_count(name):
    nothing = jnp.zeros((2, 3))
    piece = Batch(*(nothing,) * 7, weight=jnp.ones(2))
    piece = piece.replace(
        is_reply=nothing == 0,
        has_loss=jnp.array([[True, False, True], [False, False, False]]),
    )
    chosen = updates.settings(**BARE, loss__aggregation=name)
    by_token = jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mean = objectives.aggregate(chosen, by_token, piece)
    assert (mean.sum, mean.count) == MEANS_WITHOUT_THE_MASKED[name]


def test_the_critic_learns_at_masked_tokens_too():
    chosen = updates.settings(estimator="ppo", loss__value_clip=0.0)
    piece = Batch(*(jnp.zeros((1, 3)),) * 7, weight=jnp.ones(1))
    piece = piece.replace(
        is_reply=jnp.ones((1, 3), bool), has_loss=jnp.zeros((1, 3), bool)
    )
    mean = objectives.value_loss(chosen, jnp.array([[2.0, 4.0, 6.0]]), piece)
    assert (mean.sum, mean.count) == (0.5 * (4 + 16 + 36), 3)


def test_the_critic_learns_at_its_tokens_alone_and_no_further_than_its_clip():
    chosen = updates.settings(estimator="ppo", loss__value_clip=0.5)
    piece = Batch(**dict.fromkeys(Batch.__dataclass_fields__, jnp.zeros((1, 3))))
    piece = piece.replace(
        is_reply=jnp.ones((1, 3), bool),
        is_target=jnp.array([[True, False, True]]),
        returns=jnp.array([[3.0, 9.0, -1.0]]),
        weight=jnp.ones(1),
    )
    values = jnp.array([[2.0, 0.0, 0.25]])
    mean = objectives.value_loss(chosen, values, piece)
    # 0.5 * 2.5^2, for 0.5 lies further from 3 than 2 does; 0.5 * 1.25^2.
    assert (mean.sum, mean.count) == (0.5 * 2.5**2 + 0.5 * 1.25**2, 2)
    other = dict(loss__aggregation="sequence_mean_token_sum")  # Of the actor alone.
    chosen = updates.settings(estimator="ppo", loss__value_clip=0.5, **other)
    everywhere = objectives.value_loss(chosen, values, piece.replace(is_target=None))
    assert (everywhere.sum, everywhere.count) == (mean.sum + 0.5 * 81, 3)


def test_sums_are_over_the_most_reply_tokens_that_a_row_can_hold():
    """Of two rows: those of all turns, and in windows those of one."""
    piece = Batch(**dict.fromkeys(Batch.__dataclass_fields__, jnp.ones((2, 3))))
    piece = piece.replace(
        is_reply=jnp.ones((2, 3), bool), weight=jnp.ones(2), has_loss=None
    )
    norm = dict(loss__aggregation="sequence_mean_token_sum_norm")
    sizes = dict(rollout__turns=4, rollout__reply_tokens=5)
    for history, most in (("full", 4 * 5), ("single", 5)):
        chosen = updates.settings(**BARE | norm | sizes, rollout__history=history)
        mean = objectives.aggregate(chosen, jnp.ones((2, 3)), piece)
        assert (mean.sum, mean.count) == (6, 2 * most)
