"""Sampling against its distribution, by hand, and the keys that decide it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.parallel import backend_choices
from ragen_jax.rollout import prng, token_sampling

LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))
DRAWS = 20_000
_sample = jax.jit(token_sampling.sample, static_argnames="greedy")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_at_the_temperature(temperature):
    drawn = _many(jax.random.key(0), temperature)
    expected = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]) ** (1 / temperature)
    expected /= expected.sum()
    seen = np.bincount(drawn.token, minlength=5) / DRAWS
    # Pearson's statistic: above 23.5 once in 10,000 with 4 degrees of freedom.
    assert DRAWS * ((seen - expected) ** 2 / expected).sum() < 23.5


def test_of_a_large_vocabulary_blocks_and_tokens_come_as_often_as_they_should():
    """In every block the five of LOGITS, the blocks themselves 1 : 2 : 3 ... likely."""
    vocabulary = 8192 + 200  # The last block is not full.
    count = -(-vocabulary // token_sampling._BLOCK)
    logits = np.full((count, token_sampling._BLOCK), -np.inf, np.float32)
    spots = [0, 3, 50, 70, 71]  # In the last block, too.
    logits[:, spots] = np.asarray(LOGITS) + np.log(np.arange(1, count + 1))[:, None]
    flat = jnp.asarray(logits.reshape(-1)[:vocabulary])
    key = jax.random.split(jax.random.key(7), DRAWS)

    @jax.jit
    def draw(keys):
        return jax.lax.map(
            lambda key: token_sampling.sample(
                key[None], flat[None], jnp.float32(1), greedy=False
            ).token[0],
            keys,
            batch_size=500,
        )

    token = np.asarray(draw(key))
    expected = np.exp(flat) / np.exp(flat).sum()
    by_block = np.add.reduceat(
        expected, np.arange(0, vocabulary, token_sampling._BLOCK)
    )
    seen = np.bincount(token // token_sampling._BLOCK, minlength=count) / DRAWS
    # Pearson's statistics: above 121 once in 10,000 with 65 degrees of freedom,
    # above 23.5 with 4.
    assert DRAWS * ((seen - by_block) ** 2 / by_block).sum() < 121
    within = (
        np.bincount(token % token_sampling._BLOCK, minlength=token_sampling._BLOCK)
        / DRAWS
    )
    assert set(np.flatnonzero(within)) == set(spots)
    shares = np.exp(LOGITS)
    assert DRAWS * ((within[spots] - shares) ** 2 / shares).sum() < 23.5
    # Other numbers decide within a block than between them: of block 50 its token 50,
    # of probability 1/8, is no likelier than of any other.
    own = token[token // token_sampling._BLOCK == 50] % token_sampling._BLOCK == 50
    assert abs(own.mean() - 1 / 8) < 4 * (1 / 8 * 7 / 8 / len(own)) ** 0.5


def test_log_probability_and_entropy_are_those_worked_out_by_hand():
    drawn = _many(jax.random.key(0), 1.0)
    np.testing.assert_allclose(drawn.logprob, LOGITS[drawn.token], rtol=1e-6)
    # 1/2 * 1 + 1/4 * 2 + 1/8 * 3 + 2 * 1/16 * 4 = 1.875 bits.
    np.testing.assert_allclose(drawn.entropy, 1.875 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("spread", [2, 20])  # Of many likely tokens, and of few.
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("impossible", [-1e4, -np.inf])
def test_a_large_vocabulary_is_scored_as_by_the_whole_softmax(
    greedy, impossible, spread, at_once, monkeypatch
):
    chosen = dataclasses.replace(backend_choices.choices(), sums_blocks_at_once=at_once)
    monkeypatch.setattr(backend_choices, "choices", lambda: chosen)
    rng = np.random.default_rng(5)
    logits = spread * rng.standard_normal((4, 8192 + 300))
    logits += [[0], [5000], [-5000], [0]]
    logits[0, 128:384] = impossible  # Two whole blocks, and one token of another.
    logits[3] = impossible
    logits[3, 700] = 7.0
    key = jax.random.split(jax.random.key(6), 4)
    logits = logits.astype(np.float32)
    sample = functools.partial(token_sampling.sample, greedy=greedy)
    drawn = jax.jit(sample)(key, jnp.asarray(logits), jnp.float32(0.7))
    scaled = logits.astype(float) / (1 if greedy else np.float32(0.7))
    scaled -= scaled.max(axis=1, keepdims=True)
    policy = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    expected = np.take_along_axis(policy, np.asarray(drawn.token)[:, None], 1)[:, 0]
    np.testing.assert_allclose(drawn.logprob, expected, rtol=1e-5, atol=2e-3)
    terms = np.exp(policy) * np.maximum(policy, -1e9)  # What is impossible adds 0.
    np.testing.assert_allclose(drawn.entropy, -terms.sum(axis=1), rtol=1e-4, atol=2e-3)
    assert drawn.token[3] == 700
    if greedy:
        np.testing.assert_array_equal(drawn.token, logits.argmax(axis=1))


def test_the_temperature_divides_the_logits_and_shifts_of_them_do_not_matter():
    key = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 7))
    one = _sample(key, logits, jnp.float32(0.5), greedy=False)
    other = _sample(key, 2 * logits + 3, jnp.float32(1), greedy=False)
    np.testing.assert_array_equal(one.token, other.token)
    np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)
    np.testing.assert_allclose(one.entropy, other.entropy, atol=1e-5)


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one():
    key = jax.random.split(jax.random.key(3), 2)
    logits = jnp.stack([LOGITS, LOGITS[::-1]])
    drawn = _sample(key, logits, jnp.float32(1e-6), greedy=True)
    assert drawn.token.tolist() == [0, 4]
    np.testing.assert_allclose(drawn.logprob, np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(drawn.entropy, 1.875 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("tokens", [5, 128, 300, 1024])
def test_the_largest_is_found_where_jax_numpy_finds_it(tokens):
    """Ties go to the first."""
    x = np.random.default_rng(tokens).integers(0, 40, (64, tokens)).astype(np.float32)
    x[0], x[1] = -np.inf, 3
    x[2, :] = -np.inf
    x[2, tokens - 1] = -1e30
    np.testing.assert_array_equal(
        jax.jit(token_sampling.argmax)(x), jnp.argmax(x, axis=-1)
    )


@pytest.mark.parametrize("impossible", [-1e4, -np.inf])
def test_an_impossible_token_is_never_drawn_and_adds_no_entropy(impossible):
    logits = jnp.tile(jnp.array([0.0, impossible, 0.0]), (1000, 1))
    key = jax.random.split(jax.random.key(4), 1000)
    drawn = _sample(key, logits, jnp.float32(1), greedy=False)
    assert set(drawn.token.tolist()) == {0, 2}
    np.testing.assert_allclose(drawn.entropy, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(drawn.logprob, -np.log(2), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [8000, 16384])
def test_no_token_wins_because_its_random_number_is_zero(vocabulary):
    """One in 2^23 uniform numbers of float32 is 0: a dozen among those drawn here."""
    logits = jnp.full(vocabulary, -30.0).at[11].set(0.0)  # The rest: 1e-9 together.
    logits = jnp.tile(logits, (256, 1))

    # So many numbers are worth optimized machine code.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    def draw(keys):
        def one(key):
            keys = jax.random.split(key, 256)
            return token_sampling.sample(
                keys, logits, jnp.float32(1), greedy=False
            ).token

        return jax.lax.map(one, keys)

    assert set(np.unique(draw(jax.random.split(jax.random.key(8), 50)))) == {11}


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
        prng.iteration_key(seed, split, iteration)
        for seed, split, iteration in itertools.product(small, small, small)
    ]
    bits = [np.asarray(jax.random.key_data(run)) for run in runs]
    grid = np.array(list(itertools.product(small, small, small)), np.uint32)

    @jax.jit
    @jax.vmap
    def events(run):
        tokens = jax.vmap(prng.token_key, (None, 0, 0, 0))(run, *grid.T)
        env = jax.vmap(prng.env_key, (None, 0, 0))(run, *grid[::3, :2].T)
        actions = jax.vmap(jax.random.fold_in, (0, None))(env, 0)  # of a turn's first
        levels = jax.vmap(prng.level_key, (None, 0))(run, grid[::9, 0])
        return jax.random.key_data(jnp.concatenate([tokens, env, actions, levels]))

    bits += list(np.asarray(events(jnp.stack(runs))).reshape(-1, 2))
    assert len(bits) == 27 * (1 + 27 + 9 + 9 + 3)
    assert len({tuple(pair) for pair in bits}) == len(bits)


def test_keys_are_the_same_one_by_one_and_in_any_batch():
    run = prng.iteration_key(jnp.uint32(8), jnp.int32(1), jnp.int32(5))
    episode, turn, token = np.array([9, 4, 9]), np.array([0, 2, 1]), np.array([3, 3, 0])
    batch = jax.vmap(prng.token_key, (None, 0, 0, 0))(run, episode, turn, token)
    for index in range(3):
        alone = prng.token_key(
            run, int(episode[index]), int(turn[index]), int(token[index])
        )
        assert alone == batch[index]


def _many(key, temperature):
    logits = jnp.tile(LOGITS, (DRAWS, 1))
    drawn = _sample(
        jax.random.split(key, DRAWS), logits, jnp.float32(temperature), greedy=False
    )
    return jax.device_get(drawn)
