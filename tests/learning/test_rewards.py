"""Rewards on tokens: where they stand, the format penalty and the KL penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import rewards

# Row 0 holds episode 1, row 1 episode 0: nothing but `rows.episode` says so.


def paid_tokens(rows, episodes, format_penalty):
    """float32[R, T], what each token earns of the environment and of the penalty."""
    return rewards.at_turn_ends(rows, rewards.played_rewards(episodes, format_penalty))


ROWS = rows_of("oorRorRo", "orRoR...", episode=[1, 0])
EPISODES = episodes_of(
    reward=[[0.0, 1.0], [-0.5, 2.0]], is_valid=[[False, True], [True, False]]
)


def test_each_turn_pays_at_its_end_and_an_invalid_reply_costs_the_penalty():
    function = jax.jit(paid_tokens, static_argnums=2)
    expected = np.zeros((2, 8))
    expected[0, 3], expected[0, 6] = -0.5, 2.0 - 0.1
    expected[1, 2], expected[1, 4] = 0.0 - 0.1, 1.0
    np.testing.assert_allclose(function(ROWS, EPISODES, -0.1), expected, rtol=1e-6)


def test_a_turn_that_earns_nothing_keeps_its_end():
    unpaid = episodes_of(reward=[[0.0, 0.0]], is_valid=[[False, False]])
    row = rows_of("orRoR", episode=[0])
    np.testing.assert_array_equal(
        np.asarray(paid_tokens(row, unpaid, -0.1))[0] != 0,
        [False, False, True, False, True],
    )


def test_an_episode_in_one_row_per_turn_pays_each_turn_in_its_own_row():
    rows = rows_of("orR.", "orR.", episode=[0, 0])
    rows = rows.replace(turn=jnp.where(rows.turn < 0, -1, jnp.array([[0], [1]])))
    paid = paid_tokens(rows, episodes_of(reward=[[3.0, 4.0]]), 0.0)
    np.testing.assert_array_equal(paid, [[0, 0, 3, 0], [0, 0, 4, 0]])


def test_token_rewards_of_an_episode_sum_to_its_return():
    paid = paid_tokens(ROWS, EPISODES, -0.1).sum(axis=1)
    np.testing.assert_allclose(paid[::-1], rewards.returns(EPISODES, -0.1), rtol=1e-6)


def test_padding_is_paid_nothing_even_if_it_claims_to_end_a_turn():
    rows = ROWS.replace(turn_end=ROWS.turn_end | (ROWS.episode < 0))
    np.testing.assert_array_equal(
        paid_tokens(rows, EPISODES, -0.1),
        paid_tokens(ROWS, EPISODES, -0.1),
    )


def test_returns_count_only_turns_that_were_played():
    episodes = episodes_of(
        reward=[[1.0, 2.0, np.nan], [4.0, np.nan, 5.0], [1.0, 1.0, 1.0]],
        is_valid=[[True, False, False], [False, False, False], [True, True, True]],
        turns=[2, 1, 3],
    )
    np.testing.assert_allclose(rewards.returns(episodes), [3.0, 4.0, 3.0])
    np.testing.assert_allclose(rewards.returns(episodes, -0.1), [2.9, 3.9, 3.0])


@pytest.mark.parametrize("seed", range(3))
def test_rewards_and_returns_equal_a_loop_over_turns(seed):
    random = np.random.default_rng(seed)
    turns = random.integers(1, 4, size=6)
    reward = random.normal(size=(6, 3)).astype(np.float32)
    is_valid = random.random((6, 3)) < 0.5
    order = random.permutation(6)
    lines = [
        "oo" + "".join("rR"[-n:] + "o" for n in [1, 2, 1][: turns[b]]) for b in order
    ]
    rows = rows_of(*(line.ljust(12, ".") for line in lines), episode=list(order))
    episodes = episodes_of(reward.tolist(), is_valid.tolist(), turns.tolist())

    expected_return = np.zeros(6)
    expected = np.zeros((6, 12))
    for row, b in enumerate(order):
        ends = [t for t, letter in enumerate(lines[row]) if letter == "R"]
        assert len(ends) == turns[b]
        for k, end in enumerate(ends):
            earned = reward[b, k] + (0.0 if is_valid[b, k] else -0.25)
            expected[row, end] = earned
            expected_return[b] += earned
    np.testing.assert_allclose(paid_tokens(rows, episodes, -0.25), expected, rtol=1e-6)
    np.testing.assert_allclose(
        rewards.returns(episodes, -0.25), expected_return, rtol=1e-5, atol=1e-6
    )


def test_a_positive_penalty_is_refused_because_it_would_pay_for_bad_replies():
    with pytest.raises(ValueError, match=r"<= 0, got 0\.1"):
        paid_tokens(ROWS, EPISODES, 0.1)
    with pytest.raises(ValueError, match=r"<= 0, got 0\.1"):
        rewards.returns(EPISODES, 0.1)


def test_the_kl_penalty_lowers_the_reward_of_tokens_likelier_than_the_reference():
    earned = jnp.array([[0.0, 0.0, 0.0, 1.0]])
    logprobs = jnp.array([[jnp.nan, -1.0, -3.0, -2.0]])
    reference = jnp.array([[-1.0, -2.0, -1.0, -2.0]])
    is_reply = jnp.array([[False, True, True, True]])
    penalized = jax.jit(rewards.penalize_kl, static_argnums=(4, 5))(
        earned, logprobs, reference, is_reply, 0.5, "k1"
    )
    np.testing.assert_allclose(penalized, [[0.0, -0.5, 1.0, 1.0]], rtol=1e-6)


def test_k3_in_the_reward_is_never_a_gain():
    random = np.random.default_rng(0)
    logprobs, reference = jnp.asarray(-random.random((2, 3, 5)), jnp.float32)
    penalized = rewards.penalize_kl(
        jnp.zeros((3, 5)), logprobs, reference, jnp.ones((3, 5), bool), 1.0, "k3"
    )
    d = np.asarray(reference) - np.asarray(logprobs)
    np.testing.assert_allclose(penalized, -(np.exp(d) - 1 - d), atol=1e-6)
    assert (np.asarray(penalized) <= 0).all()


def test_a_kl_of_k3_takes_at_most_ten_nats_from_a_reward():
    reference, is_reply = jnp.array([[3.0, 1.0]]), jnp.ones((1, 2), bool)
    penalized = rewards.penalize_kl(
        jnp.ones((1, 2)), jnp.zeros((1, 2)), reference, is_reply, 0.5, "k3"
    )
    # e^3 - 4 is above 16; e^1 - 2 = 0.718.
    np.testing.assert_allclose(penalized, [[-4.0, 2 - np.e / 2]], rtol=1e-5)
