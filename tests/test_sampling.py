"""Sampling against its distribution, by hand, and the keys that decide it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.rollout import keys, sampling

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))
DRAWS = 20_000
_sample = jax.jit(sampling.sample, static_argnames="greedy")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_at_the_temperature(temperature):
    drawn = _many(jax.random.key(0), temperature)
    expected = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]) ** (1 / temperature)
    expected /= expected.sum()
    seen = np.bincount(drawn.token, minlength=5) / DRAWS
    # Pearson's statistic: above 23.5 once in 10,000 with 4 degrees of freedom.
    assert DRAWS * ((seen - expected) ** 2 / expected).sum() < 23.5


def test_log_probability_and_entropy_are_those_worked_out_by_hand():
    drawn = _many(jax.random.key(0), 1.0)
    np.testing.assert_allclose(drawn.logprob, LOGITS[drawn.token], rtol=1e-6)
    # 1/2 * 1 + 1/4 * 2 + 1/8 * 3 + 2 * 1/16 * 4 = 1.875 bits.
    np.testing.assert_allclose(drawn.entropy, 1.875 * np.log(2), rtol=1e-6)


def test_the_temperature_divides_the_logits_and_shifts_of_them_do_not_matter():
    key = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 7))
    one = _sample(key, logits, jnp.float32(0.5), greedy=False)
    other = _sample(key, 2 * logits + 3, jnp.float32(1), greedy=False)
    np.testing.assert_array_equal(one.token, other.token)
    np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)
    np.testing.assert_allclose(one.entropy, other.entropy, atol=1e-5)


def test_greedy_takes_the_likeliest_token_and_tells_of_temperature_one():
    key = jax.random.split(jax.random.key(3), 2)
    logits = jnp.stack([LOGITS, LOGITS[::-1]])
    drawn = _sample(key, logits, jnp.float32(1e-6), greedy=True)
    assert drawn.token.tolist() == [0, 4]
    np.testing.assert_allclose(drawn.logprob, np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(drawn.entropy, 1.875 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("impossible", [-1e4, -np.inf])
def test_an_impossible_token_is_never_drawn_and_adds_no_entropy(impossible):
    logits = jnp.tile(jnp.array([0.0, impossible, 0.0]), (1000, 1))
    key = jax.random.split(jax.random.key(4), 1000)
    drawn = _sample(key, logits, jnp.float32(1), greedy=False)
    assert set(drawn.token.tolist()) == {0, 2}
    np.testing.assert_allclose(drawn.entropy, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(drawn.logprob, -np.log(2), rtol=1e-6)


def test_a_slots_token_depends_on_its_own_key_alone():
    key = jax.random.split(jax.random.key(5), 40)
    logits = jax.random.normal(jax.random.key(6), (40, 9))
    whole = _sample(key, logits, jnp.float32(1), greedy=False)
    part = np.array([31, 2, 17])
    alone = _sample(key[part], logits[part], jnp.float32(1), greedy=False)
    np.testing.assert_array_equal(whole.token[part], alone.token)


def test_every_event_of_a_run_has_a_key_of_its_own():
    small = range(3)
    runs = [
        keys.iteration_key(seed, split, iteration)
        for seed, split, iteration in itertools.product(small, small, small)
    ]
    bits = [np.asarray(jax.random.key_data(run)) for run in runs]
    grid = np.array(list(itertools.product(small, small, small)), np.uint32)

    @jax.jit
    @jax.vmap
    def events(run):
        tokens = jax.vmap(keys.token_key, (None, 0, 0, 0))(run, *grid.T)
        world = jax.vmap(keys.world_key, (None, 0, 0))(run, *grid[::3, :2].T)
        levels = jax.vmap(keys.level_key, (None, 0))(run, grid[::9, 0])
        return jax.random.key_data(jnp.concatenate([tokens, world, levels]))

    bits += list(np.asarray(events(jnp.stack(runs))).reshape(-1, 2))
    assert len(bits) == 27 * (1 + 27 + 9 + 3)
    assert len({tuple(pair) for pair in bits}) == len(bits)


def test_keys_are_the_same_one_by_one_and_in_any_batch():
    run = keys.iteration_key(jnp.uint32(8), jnp.int32(1), jnp.int32(5))
    episode, turn, token = np.array([9, 4, 9]), np.array([0, 2, 1]), np.array([3, 3, 0])
    batch = jax.vmap(keys.token_key, (None, 0, 0, 0))(run, episode, turn, token)
    for index in range(3):
        alone = keys.token_key(
            run, int(episode[index]), int(turn[index]), int(token[index])
        )
        assert alone == batch[index]


def _many(key, temperature):
    logits = jnp.tile(LOGITS, (DRAWS, 1))
    drawn = _sample(
        jax.random.split(key, DRAWS), logits, jnp.float32(temperature), greedy=False
    )
    return jax.device_get(drawn)
