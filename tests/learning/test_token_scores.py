"""Scores of a record's tokens against a plain log_softmax over whole logits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.learning import token_scores, vocabulary_scores
from ragen_jax.models import parameters, transformer

CONFIG = models.small_config(40)
WEIGHTS = models.random_parameters(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 40, (3, 12)).astype(np.int32)
WEIGHT = np.random.default_rng(1).normal(size=(2, 3, 12)).astype(np.float32)


def _plain(weights, temperature):
    """Log-probability and entropy by the formulas, [R, T, V] at once."""
    hidden = transformer.hidden_states(weights, TOKENS, CONFIG)
    logits = transformer.vocabulary_logits(weights, hidden) / temperature
    log_policy = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    logprobs = jnp.take_along_axis(log_policy, TOKENS[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1)
    first = ((0, 0), (1, 0))
    return token_scores.TokenScores(jnp.pad(logprobs, first), jnp.pad(entropy, first))


def _score(weights, temperature, **options):
    return token_scores.score_tokens(weights, TOKENS, CONFIG, temperature, **options)


def _with_gradient(score, temperature):
    """Scores, and the gradient of a weighted sum of both of them."""

    def weighted(weights):
        scores = score(weights, temperature)
        total = (WEIGHT[0] * scores.logprobs + WEIGHT[1] * scores.entropy).sum()
        return total, scores

    (_, scores), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(WEIGHTS)
    return scores, gradient


@pytest.fixture(scope="module")
def plain():
    return _with_gradient(_plain, 0.7)


# 4 + 4 + 3 positions, so that the last chunk is padded; one by one.
@pytest.mark.parametrize(
    "most_logits", [4 * 3 * 40, pytest.param(1, marks=pytest.mark.slow)]
)
def test_scores_in_chunks_equal_whole_ones_and_so_do_their_gradients(
    monkeypatch, plain, most_logits
):
    monkeypatch.setattr(vocabulary_scores, "_MOST_LOGITS", most_logits)
    found = _with_gradient(_score, 0.7)
    assert found[0].logprobs.dtype == jnp.float32
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_the_whole_logits_never_exist_in_the_program(monkeypatch):
    monkeypatch.setattr(vocabulary_scores, "_MOST_LOGITS", 2 * 3 * 40)
    program = str(jax.make_jaxpr(lambda w: _with_gradient(_score, 1.0))(WEIGHTS))
    assert "[6,40]" in program
    assert "[33,40]" not in program and "[3,11,40]" not in program


def test_a_high_temperature_flattens_the_policy():
    scores = jax.jit(_score)(WEIGHTS, 1e6)
    np.testing.assert_allclose(scores.logprobs[:, 1:], -np.log(40), atol=1e-3)
    np.testing.assert_allclose(scores.entropy[:, 1:], np.log(40), atol=1e-3)


def test_the_first_token_of_a_row_has_no_score():
    scores = jax.jit(_score)(WEIGHTS, 1.0)
    np.testing.assert_array_equal(scores.logprobs[:, 0], 0)
    np.testing.assert_array_equal(scores.entropy[:, 0], 0)
    assert (scores.logprobs[:, 1:] < 0).all()


def test_logprobs_do_not_depend_on_whether_entropy_is_asked_for():
    with_entropy = jax.jit(_score)(WEIGHTS, 0.9)
    without = jax.jit(lambda w: _score(w, 0.9, with_entropy=False))(WEIGHTS)
    np.testing.assert_allclose(with_entropy.logprobs, without.logprobs, atol=1e-6)
    np.testing.assert_array_equal(without.entropy, 0)


def test_tokens_of_no_probability_leave_entropy_and_gradients_finite():
    scores, gradient = _with_gradient(_score, 1e-3)
    assert scores.logprobs.min() < -200  # whose probability is 0 in float32
    # float32 holds logits in the thousands to 2e-4.
    assert scores.entropy.min() > -2e-4 and scores.entropy.mean() < 0.1
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_values_are_those_of_the_position_before():
    critic = models.random_parameters(CONFIG)
    del critic["head"]
    critic["value_head"] = jnp.asarray(WEIGHT[0].ravel()[:32])
    assert critic.keys() == parameters.declare(CONFIG, value_head=True).keys()
    values = jax.jit(lambda w: token_scores.value_tokens(w, TOKENS, CONFIG))(critic)
    hidden = transformer.hidden_states(critic, TOKENS, CONFIG)
    np.testing.assert_array_equal(values[:, 0], 0)
    np.testing.assert_allclose(
        values[:, 1:], (hidden @ critic["value_head"])[:, :-1], atol=1e-5
    )


@pytest.mark.slow
def test_a_shared_prefix_computed_once_changes_no_score_and_no_gradient():
    prefix, tokens = jnp.asarray(TOKENS[0, :5]), jnp.asarray(TOKENS)
    tokens = tokens.at[:, :5].set(prefix)
    is_reply = jnp.asarray(WEIGHT[0] > 0.3).at[:, :6].set(False)
    critic = {**WEIGHTS, "value_head": jnp.asarray(WEIGHT[0].ravel()[:32])}

    def total(weights, prefix):
        if len(prefix):
            prefix = transformer.prefix_keys_and_values(weights, prefix, CONFIG)
        scores = token_scores.score_tokens(
            weights, tokens, CONFIG, 0.7, is_reply=is_reply, prefix=prefix
        )
        values = token_scores.value_tokens(weights, tokens, CONFIG, prefix=prefix)
        values = jnp.where(is_reply, values, 0)
        sums = WEIGHT[0] * scores.logprobs + WEIGHT[1] * scores.entropy + values**2
        return (is_reply * sums).sum(), (scores, values)

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, whole), whole_gradient = run(critic, ())
    (_, once), once_gradient = run(critic, prefix)
    assert is_reply.sum() > 5 and not is_reply.all(axis=1).any()
    np.testing.assert_array_equal(whole[0].logprobs != 0, is_reply)
    chex.assert_trees_all_close(once, whole, atol=1e-5)
    # Gradients reach 50, and sums are taken in another order.
    chex.assert_trees_all_close(once_gradient, whole_gradient, atol=5e-4, rtol=1e-4)
