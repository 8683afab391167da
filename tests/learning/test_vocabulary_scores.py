"""Chunked scores equal plain ones, and so do their written-out gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.learning import vocabulary_scores
from ragen_jax.learning.vocabulary_scores import chunk_tokens, score_vocabulary

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 7, 4, 11


def _inputs(seed: int, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    token = jnp.asarray(rng.integers(VOCABULARY, size=(ROWS, LENGTH)), jnp.int32)
    wanted = jnp.asarray(rng.random((ROWS, LENGTH)) < 0.5)
    upstream = jnp.asarray(rng.normal(size=(2, ROWS, LENGTH)), jnp.float32)
    return weight, hidden, token, wanted, upstream


def _plain(weight, hidden, token, wanted, temperature):
    logits = jnp.einsum("rtd,vd->rtv", hidden, weight) / temperature
    log_policy = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_policy, token[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_policy) * log_policy).sum(-1)
    return jnp.where(wanted, chosen, 0), jnp.where(wanted, entropy, 0)


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("is_tied", [True, False])
def test_scores_and_gradients_equal_those_of_a_plain_softmax(chunk, is_tied):
    weight, hidden, token, wanted, upstream = _inputs(chunk)

    def ours(weight, hidden):
        scores = score_vocabulary(
            weight if is_tied else weight.T,
            hidden,
            token,
            wanted,
            temperature=0.7,
            is_tied=is_tied,
            chunk=chunk,
        )
        return scores.logprobs, scores.entropy

    def plain(weight, hidden):
        return _plain(weight, hidden, token, wanted, 0.7)

    def both(score):
        values, pull = jax.vjp(score, weight, hidden)
        return *values, *pull((upstream[0], upstream[1]))

    for found, expected in zip(jax.jit(lambda: both(ours))(), both(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_wanted_costs_no_chunk_and_has_no_gradient():
    weight, hidden, token, _, upstream = _inputs(0)
    wanted = jnp.zeros((ROWS, LENGTH), bool).at[1, 3].set(True)
    poisoned = jnp.where(wanted[..., None], hidden, jnp.nan)

    def loss(weight, hidden):
        # One chunk holds the wanted token alone: no other hidden state is read.
        scores = score_vocabulary(
            weight, hidden, token, wanted, temperature=1.0, is_tied=True, chunk=1
        )
        return (upstream[0] * scores.logprobs + upstream[1] * scores.entropy).sum()

    by_weight, by_hidden = jax.grad(loss, (0, 1))(weight, poisoned)
    assert jnp.isfinite(by_weight).all() and jnp.isfinite(by_hidden).all()
    assert (jnp.abs(by_hidden).sum(-1) > 0).sum() == 1


def test_without_entropy_its_gradient_is_nothing_and_log_probabilities_are_the_same():
    weight, hidden, token, wanted, _ = _inputs(5)
    options = dict(temperature=1.3, is_tied=True, chunk=4)
    bare = score_vocabulary(
        weight, hidden, token, wanted, with_entropy=False, **options
    )
    full = score_vocabulary(weight, hidden, token, wanted, **options)
    np.testing.assert_array_equal(bare.logprobs, full.logprobs)
    assert not bare.entropy.any() and (full.entropy[wanted] > 0).all()


def test_the_weights_gradient_is_added_up_in_float32():
    weight, _, _, _, _ = _inputs(6)
    hidden = jnp.ones((1, 1000, WIDTH), jnp.bfloat16)
    token = jnp.zeros((1, 1000), jnp.int32)
    wanted = jnp.ones((1, 1000), bool)

    def loss(weight):
        scores = score_vocabulary(
            weight, hidden, token, wanted, temperature=1.0, is_tied=True, chunk=1
        )
        return scores.logprobs.sum()

    found = jax.jit(jax.grad(loss))(jnp.zeros_like(weight))
    # A thousand equal terms of 1 - 1 / V; bfloat16 would stop adding at 256.
    np.testing.assert_allclose(found[0], 1000 * (1 - 1 / VOCABULARY), rtol=1e-2)


def test_chunks_fit_the_memory_that_a_backend_has():
    assert chunk_tokens(1024, 10_000, on_cpu=True) == 128
    assert chunk_tokens(151_936, 10_000, on_cpu=True) == 110
    assert chunk_tokens(151_936, 10_000, on_cpu=False) == 1766
    assert chunk_tokens(1024, 10_000, on_cpu=False) == 2048
    assert chunk_tokens(1024, 5, on_cpu=True) == 5
    assert chunk_tokens(10**9, 5, on_cpu=True) == 1
    assert vocabulary_scores._MOST_LOGITS == 2**24
