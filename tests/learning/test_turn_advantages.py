"""Advantages of turns and the table of estimators: hand, loops, and each other."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates

from ragen_jax.learning import advantages, turn_advantages
from ragen_jax.learning.estimators import ESTIMATORS, Evidence
from ragen_jax.learning.groups import Grouping
from ragen_jax.settings import ESTIMATORS as FACTS

# One episode of two turns with two tokens and one. Rewards 1 and 2 at the turns' ends,
# a penalty of -0.5 on the first token; gamma 0.5, lam 0.5, turn_gamma 0.8.
IS_REPLY = jnp.array([[[True, True], [True, False]]])
REWARDS = jnp.array([[[-0.5, 1.0], [2.0, 9.0]]])
VALUES = jnp.array([[[0.5, 1.0], [0.25, 9.0]]])
ALONG = dict(lam=0.5, turn_gamma=0.8)


def test_bi_level_gae_equals_the_numbers_worked_out_by_hand():
    # Turns, values at the last tokens 1 and 0.25: delta_2 = 2 - 0.25 = 1.75 = A_2;
    # delta_1 = 1 + 0.8 * 0.25 - 1 = 0.2; A_1 = 0.2 + 0.8 * 0.5 * 1.75 = 0.9.
    # So the ends earn 0.9 + 1 = 1.9 and 1.75 + 0.25 = 2.
    # Turn 2: 2 - 0.25 = 1.75. Turn 1: 1.9 - 1 = 0.9, then
    # -0.5 + 0.5 * 1 - 0.5 = -0.5, A = -0.5 + 0.25 * 0.9 = -0.275.
    found = turn_advantages.bi_level_gae(
        REWARDS, VALUES, IS_REPLY, gamma=0.5, turn_value="last", **ALONG
    )
    expected = np.array([[[-0.275, 0.9], [1.75, 0.0]]])
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-6)
    returns = np.where(IS_REPLY, expected + VALUES, 0)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-6)


@pytest.mark.parametrize(
    ("turn_value", "first", "at"), [("first", 0.9, (0, 0)), ("last", 0.4, (0, 1))]
)
def test_turn_wise_gae_equals_the_numbers_worked_out_by_hand(turn_value, first, at):
    # Turns earn 0.5 and 2. A_2 = 1.75; delta_1 = 0.5 + 0.8 * 0.25 - V_1, which is
    # 0.5 or 1: 0.2 or -0.3; A_1 = delta_1 + 0.4 * 1.75.
    found = turn_advantages.turn_wise_gae(
        REWARDS, VALUES, IS_REPLY, turn_value=turn_value, **ALONG
    )
    expected = np.array([[[first, first], [1.75, 0.0]]])
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-6)
    is_target = np.zeros((1, 2, 2), bool)
    is_target[0][at] = is_target[0, 1, 0] = True
    np.testing.assert_array_equal(found.is_target, is_target)
    returns = np.where(is_target, expected + VALUES, 0)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-6)


@pytest.mark.parametrize("turn_value", ["first", "last"])
def test_bi_level_gae_of_a_single_turn_is_gae(turn_value):
    rewards, values, is_reply = _replies(seed=0, turns=1)
    found = turn_advantages.bi_level_gae(
        rewards, values, is_reply, gamma=0.9, turn_value=turn_value, **ALONG
    )
    flat = [x[:, 0] for x in (rewards, values, is_reply)]
    expected = advantages.gae(*flat, gamma=0.9, lam=0.5)
    np.testing.assert_allclose(
        found.advantages[:, 0], expected.advantages, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
def test_bi_level_gae_equals_a_loop_over_turns_and_tokens(seed):
    rewards, values, is_reply = _replies(seed)
    found = turn_advantages.bi_level_gae(
        rewards, values, is_reply, gamma=0.9, turn_value="last", **ALONG
    )
    expected = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        carry = next_value = 0.0
        for k in reversed(range(rewards.shape[1])):
            count = int(is_reply[b, k].sum())
            if not count:
                continue
            value = float(values[b, k, count - 1])
            delta = float(rewards[b, k, count - 1]) + 0.8 * next_value - value
            carry, next_value = delta + 0.8 * 0.5 * carry, value
            gain, after = 0.0, 0.0
            for m in reversed(range(count)):
                is_end = m == count - 1
                reward = carry + value if is_end else float(rewards[b, k, m])
                gain = reward + 0.9 * after - float(values[b, k, m]) + 0.9 * 0.5 * gain
                after = float(values[b, k, m])
                expected[b, k, m] = gain
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-4, atol=1e-5)


def test_a_turn_that_earns_nothing_keeps_its_place():
    """RAGEN finds turns by their rewards, so that one would join the next."""
    rewards = jnp.array([[[0.0, 0.0], [0.0, 1.0]]])
    found = turn_advantages.bi_level_gae(
        rewards,
        jnp.zeros_like(rewards),
        jnp.ones(rewards.shape, bool),
        gamma=1.0,
        lam=1.0,
        turn_gamma=0.5,
        turn_value="last",
    )
    np.testing.assert_allclose(found.advantages, [[[0.5, 0.5], [1.0, 1.0]]])


def test_turn_grpo_equals_the_numbers_worked_out_by_hand():
    # Returns-to-go, discount 0.5: (1 + 1, 2), (0 + 2, 4), (3,). Turn 1: 2, 2, 3 with
    # mean 7/3 and std 1 / sqrt(3); turn 2, of two members: 2, 4, std sqrt(2).
    gains = turn_advantages.turn_group_advantages(
        jnp.array([[1.0, 2.0], [0.0, 4.0], [3.0, 0.0], [5.0, 1.0]]),
        jnp.array([2, 2, 1, 2]),
        Grouping(jnp.array([0, 0, 0, 1]), 2),
        turn_gamma=0.5,
        divide_by_std=True,
    )
    third, root = 1 / np.sqrt(3), 1 / np.sqrt(2)
    expected = [[-third, -root], [-third, root], [2 * third, 0], [0, 0]]
    np.testing.assert_allclose(gains, expected, rtol=1e-5, atol=1e-6)


def test_turn_grpo_of_single_turns_is_grpo():
    rng = np.random.default_rng(0)
    returns = jnp.asarray(rng.integers(0, 4, 12), jnp.float32)
    grouping = Grouping(jnp.asarray(rng.permutation(np.repeat(np.arange(3), 4))), 3)
    found = turn_advantages.turn_group_advantages(
        returns[:, None],
        jnp.ones(12, jnp.int32),
        grouping,
        turn_gamma=0.3,
        divide_by_std=True,
    )
    np.testing.assert_allclose(
        found[:, 0], advantages.group_advantages(returns, grouping), rtol=1e-6
    )


# The table ---------------------------------------------------------------------------


def estimate(
    name: str, rows=None, values=None, keep=None, turn_rewards=None, **changes
):
    """What an estimator makes of the record that updates are tested with."""
    whole, episodes = updates.record()
    rows = whole if rows is None else rows
    chosen = updates.settings(estimator=name, rollout__reply_tokens=8, **changes)
    rng = np.random.default_rng(3)
    random = [
        jnp.where(rows.is_reply, jnp.asarray(rng.normal(size=rows.tokens.shape)), 0.0)
        for _ in range(2)
    ]
    evidence = Evidence(
        rows=rows,
        episodes=episodes,
        keep=jnp.ones(episodes.turns.shape, bool) if keep is None else keep,
        turn_rewards=jnp.where(
            jnp.arange(updates.TURNS)[None] < episodes.turns[:, None],
            episodes.reward,
            0.0,
        )
        if turn_rewards is None
        else turn_rewards,
        token_rewards=random[0].astype(jnp.float32),
        old_values=(random[1] if values is None else values).astype(jnp.float32),
    )
    return jax.tree.map(np.asarray, ESTIMATORS[name](chosen, evidence))


@functools.cache
def usual(name: str):
    """What an estimator makes of the record by its presets."""
    return estimate(name)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_leaves_what_is_no_reply_alone(name):
    rows, _ = updates.record()
    found = usual(name)
    assert np.isfinite(found.advantages).all()
    assert not found.advantages[~np.asarray(rows.is_reply)].any()
    assert found.advantages.any()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_an_estimator_reads_the_settings_that_it_is_said_to_read_and_no_other(name):
    preset, read = usual(name).advantages, FACTS[name].reads
    for leaf in ("gamma", "lam", "turn_gamma", "turn_value"):
        value = 0.1 if leaf != "turn_value" else "first"
        if leaf == "turn_value" and FACTS[name].turn_value == "first":
            value = "last"
        found = estimate(name, **{f"advantage__{leaf}": value}).advantages
        is_read = f"advantage.{leaf}" in read
        assert (np.abs(found - preset).max() > 1e-3) == is_read, leaf


def test_rloo_is_dr_grpo_times_n_over_n_minus_one():
    n = updates.GROUP_SIZE
    found, expected = usual("rloo"), usual("dr_grpo")
    np.testing.assert_allclose(
        found.advantages, expected.advantages * n / (n - 1), rtol=1e-5, atol=1e-6
    )


def test_before_it_is_whitened_the_baseline_of_reinforce_pp_is_that_of_dr_grpo():
    found, expected = usual("reinforce_pp_baseline"), usual("dr_grpo")
    np.testing.assert_array_equal(found.advantages, expected.advantages)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bi_level_gae", dict(gamma=0.9, turn_value="last")),
        ("turn_wise_gae", dict(turn_value="first")),
    ],
)
def test_an_estimator_over_turns_is_its_function_of_each_turns_reply(name, options):
    rows = jax.device_get(updates.record()[0])
    rng = np.random.default_rng(3)
    earned, values = (rng.normal(size=rows.tokens.shape) for _ in range(2))
    replies = np.zeros((3, len(rows.tokens), updates.TURNS, 8), np.float32)
    places, length = [], Counter()
    for row, at in np.argwhere(rows.is_reply):
        reply = row, rows.turn[row, at]  # Row i is episode i.
        places.append((*reply, length[reply]))
        replies[(slice(None), *places[-1])] = earned[row, at], values[row, at], 1
        length[reply] += 1
    compute = getattr(turn_advantages, name)
    given = replies[0], replies[1], replies[2] > 0
    expected = compute(*given, lam=0.8, turn_gamma=0.95, **options)
    found, places = usual(name), tuple(np.transpose(places))
    for one, other in (
        (found.advantages, expected.advantages),
        (found.returns, expected.returns),
        (found.is_target, expected.is_target),
    ):
        assert (one is None) == (other is None)
        if one is not None:
            other = np.asarray(other, np.float32)[places]
            np.testing.assert_allclose(one[rows.is_reply], other, rtol=1e-5, atol=1e-6)


def test_turn_grpo_without_the_division_is_in_units_of_reward():
    rows, episodes = updates.record()
    undivided = dict(advantage__divide_by_std=False, advantage__turn_gamma=0.5)
    found = estimate("turn_grpo", **undivided).advantages
    turn = np.arange(updates.TURNS)
    played = turn < np.asarray(episodes.turns)[:, None]
    to_go = np.where(played, np.asarray(episodes.reward) * 0.5**turn, 0).sum(axis=1)
    to_go = to_go.reshape(updates.PROMPTS, updates.GROUP_SIZE)
    expected = (to_go - to_go.mean(axis=1, keepdims=True)).reshape(-1, 1)
    first_turn = np.asarray(rows.is_reply & (rows.turn == 0))
    expected = np.broadcast_to(expected, first_turn.shape)[first_turn]
    np.testing.assert_allclose(found[first_turn], expected, atol=1e-5)


def test_reinforce_pp_is_gae_without_values_and_lambda_one():
    rows, _ = updates.record()
    blank = jnp.zeros(rows.tokens.shape)
    found = usual("reinforce_pp")
    expected = estimate("ppo", values=blank, advantage__lam=1.0)
    np.testing.assert_allclose(found.advantages, expected.advantages, rtol=1e-6)
    assert not found.returns.any()


def test_reinforce_pp_adds_up_what_later_turns_earn():
    found = estimate("reinforce_pp", advantage__gamma=1.0).advantages
    rows, _ = updates.record()
    first = np.argmax(np.asarray(rows.is_reply), axis=1)
    rng = np.random.default_rng(3)
    earned = np.where(rows.is_reply, rng.normal(size=rows.tokens.shape), 0.0)
    np.testing.assert_allclose(
        found[np.arange(len(first)), first], earned.sum(axis=1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["grpo", "rloo", "turn_grpo"])
def test_members_that_were_dropped_are_not_compared(name):
    """The dropped members' returns do not matter to the others."""
    keep = jnp.asarray(np.tile([True, True, False, True], updates.PROMPTS))
    changes = dict(filter__strategy="within_group", filter__fraction=0.75)
    found = estimate(name, keep=keep, **changes).advantages
    everyone = estimate(name, **changes | dict(filter__strategy="none")).advantages
    kept = np.asarray(keep)
    assert np.abs(found[kept] - everyone[kept]).max() > 0.01
    rows, episodes = updates.record()
    is_played = np.arange(updates.TURNS) < np.asarray(episodes.turns)[:, None]
    earned = np.where(is_played, episodes.reward, 0.0)
    lost = jnp.asarray(np.where(kept[:, None], earned, earned - 5.0))
    other = estimate(name, keep=keep, turn_rewards=lost, **changes).advantages
    np.testing.assert_allclose(other[kept], found[kept], atol=1e-5)
    assert np.abs(found[kept]).max() > 0.1
    totals = earned.sum(axis=1)[[0, 1, 3]]
    by_hand = {
        "rloo": totals[0] - totals[1:].mean(),
        "grpo": (totals[0] - totals.mean()) / totals.std(ddof=1),
    }
    if name in by_hand:
        said = found[0][np.asarray(rows.is_reply)[0]]
        np.testing.assert_allclose(said, by_hand[name], rtol=1e-4)


GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "turn_grpo"]
PAID = dict(loss__kl=0.5, loss__kl_in="reward", loss__kl_kind="k1")


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_kl_penalty_in_the_reward_reaches_what_returns_are_compared_by(name):
    """Each turn earns the sum of its tokens' rewards, added up in a loop."""
    rows, episodes = updates.record()
    found = estimate(name, **PAID)
    paid = np.zeros(np.shape(episodes.reward))
    rng = np.random.default_rng(3)
    earned = np.where(rows.is_reply, rng.normal(size=rows.tokens.shape), 0.0)
    for place in np.argwhere(rows.is_reply):
        at = tuple(place)
        paid[rows.episode[at], rows.turn[at]] += earned[at]
    expected = estimate(name, turn_rewards=jnp.asarray(paid, jnp.float32))
    np.testing.assert_allclose(
        found.advantages, expected.advantages, rtol=1e-4, atol=1e-5
    )
    without = usual(name).advantages
    assert np.abs(found.advantages - without).max() > 0.1


def test_dr_grpo_takes_the_groups_mean_of_returns_less_the_penalty():
    """Group 0: the sums of its episodes' token rewards, by hand in one line."""
    rows, _ = updates.record()
    rng = np.random.default_rng(3)
    earned = np.where(rows.is_reply, rng.normal(size=rows.tokens.shape), 0.0)
    totals = earned.sum(axis=1)[: updates.GROUP_SIZE]
    said = estimate("dr_grpo", **PAID).advantages[0][np.asarray(rows.is_reply)[0]]
    np.testing.assert_allclose(said, totals[0] - totals.mean(), rtol=1e-4)


def _replies(seed: int, turns: int = 3):
    """Random rewards and values of 5 episodes, the last turns of some not played."""
    rng = np.random.default_rng(seed)
    shape = (5, turns, 4)
    lengths = rng.integers(1, 5, shape[:2])
    lengths *= np.arange(turns) < rng.integers(1, turns + 1, 5)[:, None]
    is_reply = np.arange(4) < lengths[..., None]
    rewards, values = (
        jnp.asarray(np.where(is_reply, rng.normal(size=shape), np.nan), jnp.float32)
        for _ in range(2)
    )
    return rewards, values, jnp.asarray(is_reply)
