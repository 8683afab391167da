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
    iteration: int = 0, sampled=None, has_bonus=None, reference=REFERENCE, **changes
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
    piece = piece.replace(is_reply=jnp.ones((2, 3), bool), weight=jnp.ones(2))
    norm = dict(loss__aggregation="sequence_mean_token_sum_norm")
    sizes = dict(rollout__turns=4, rollout__reply_tokens=5)
    for history, most in (("full", 4 * 5), ("single", 5)):
        chosen = updates.settings(**BARE | norm | sizes, rollout__history=history)
        mean = objectives.aggregate(chosen, jnp.ones((2, 3)), piece)
        assert (mean.sum, mean.count) == (6, 2 * most)
