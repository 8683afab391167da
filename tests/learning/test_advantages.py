"""Advantages by token and by episode, against hand, loops and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.records import rows_of, split_turns

from ragen_jax.learning import advantages
from ragen_jax.learning.groups import Grouping
from ragen_jax.parallel import backend

# One row, two turns. Read as the four reply tokens 1, 2, 4, 5:
# r = 0, 1, 0, 2 and V = 0.5, 1, 0.5, 1, with gamma = lam = 0.5.
IS_REPLY = jnp.array([[False, True, True, False, True, True, False]])
REWARDS = jnp.array([[0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0]])
VALUES = jnp.array([[9.0, 0.5, 1.0, 9.0, 0.5, 1.0, 9.0]])
# delta from the last: 2 - 1 = 1; 0.5 - 0.5 = 0; 1 + 0.25 - 1 = 0.25; 0.5 - 0.5 = 0.
# A from the last: 1; 0 + 1/4 = 0.25; 0.25 + 1/16 = 0.3125; 0 + 0.078125.
BY_HAND = np.array([[0.0, 0.078125, 0.3125, 0.0, 0.25, 1.0, 0.0]])

GROUP = jnp.array([1, 0, 1, 0, 1, 2])
RETURNS = jnp.array([1.0, 5.0, 2.0, 5.0, 3.0, 7.0])


@pytest.fixture(params=["cpu", "gpu"])
def on(request):
    """Traces for a CPU, token by token, and for a GPU, all tokens at once."""
    here = tuple(jax.devices())
    with backend.targeting(backend.Backend(request.param, here, here, None)):
        yield request.param


@pytest.mark.usefixtures("on")
def test_gae_equals_the_numbers_worked_out_by_hand():
    function = jax.jit(functools.partial(advantages.gae, gamma=0.5, lam=0.5))
    result = function(REWARDS, VALUES, IS_REPLY)
    np.testing.assert_allclose(result.advantages, BY_HAND, rtol=1e-6)
    np.testing.assert_allclose(
        result.returns, np.where(IS_REPLY, BY_HAND + VALUES, 0.0), rtol=1e-6
    )


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_gae_equals_the_double_sum_over_reply_tokens(seed):
    rewards, values, is_reply = _random(seed)
    gamma, lam = 0.9, 0.8
    result = advantages.gae(rewards, values, is_reply, gamma=gamma, lam=lam)
    expected = np.zeros(rewards.shape)
    for row in range(rewards.shape[0]):
        places = np.flatnonzero(is_reply[row])
        r = np.asarray(rewards, np.float64)[row, places]
        v = np.append(np.asarray(values, np.float64)[row, places], 0.0)
        delta = r + gamma * v[1:] - v[:-1]
        for i, place in enumerate(places):
            expected[row, place] = sum(
                (gamma * lam) ** (j - i) * delta[j] for j in range(i, len(places))
            )
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on")
def test_without_discount_the_advantage_is_return_to_go_minus_value():
    rewards, values, is_reply = _random(seed=5)
    result = advantages.gae(rewards, values, is_reply, gamma=1.0, lam=1.0)
    paid = jnp.where(is_reply, rewards, 0.0)
    to_go = jnp.cumsum(paid[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(
        result.advantages,
        jnp.where(is_reply, to_go - values, 0.0),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        result.returns, jnp.where(is_reply, to_go, 0.0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("on")
def test_with_lambda_zero_only_the_next_value_is_seen():
    result = advantages.gae(REWARDS, VALUES, IS_REPLY, gamma=1.0, lam=0.0)
    np.testing.assert_allclose(
        result.advantages, [[0.0, 0.5, 0.5, 0.0, 0.5, 1.0, 0.0]], rtol=1e-6
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_all_tokens_at_once_give_what_one_after_the_other_does(gamma, lam):
    rng, shape = np.random.default_rng(1), (5, 1021)
    is_reply = rng.random(shape) < np.array([[0.0], [0.01], [0.5], [0.99], [1.0]])
    values, rewards = (
        np.where(is_reply, rng.normal(size=shape), 0).astype(np.float32)
        for _ in range(2)
    )
    one, other = (
        jax.jit(function, static_argnums=(3, 4))(rewards, values, is_reply, gamma, lam)
        for function in (advantages.token_by_token, advantages.all_tokens_at_once)
    )
    # Sums of up to a thousand terms, in another order.
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)
    assert abs(np.asarray(one)).max() > 2 and not np.asarray(other)[~is_reply].any()


def test_gae_across_rows_goes_on_from_one_turns_row_to_the_next():
    """The row above cut in two, its end first, and an episode of one turn between."""
    rows = rows_of("ooorR..", "orR....", ".......", "orR....", episode=[1, 0, -1, 1])
    rows = rows.replace(turn=rows.turn.at[0].add(rows.turn[0] >= 0))
    rewards = np.full((4, 7), np.nan, np.float32)
    values = np.full((4, 7), np.nan, np.float32)
    rewards[3, 1:3], values[3, 1:3] = REWARDS[0, 1:3], VALUES[0, 1:3]
    rewards[0, 3:5], values[0, 3:5] = REWARDS[0, 4:6], VALUES[0, 4:6]
    rewards[1, 1:3], values[1, 1:3] = (0, 3), (1, 2)
    expected = np.zeros((4, 7))
    expected[3, 1:3], expected[0, 3:5] = BY_HAND[0, 1:3], BY_HAND[0, 4:6]
    # From the last: 3 - 2 = 1; 0.5 * 2 - 1 + 0.25 * 1 = 0.25.
    expected[1, 1:3] = 0.25, 1
    result = advantages.gae_across_rows(
        jnp.asarray(rewards), jnp.asarray(values), rows, (2, 3, 4), gamma=0.5, lam=0.5
    )
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(
        result.returns, np.where(rows.is_reply, expected + values, 0.0), rtol=1e-6
    )


def test_gae_across_rows_of_one_turn_equals_gae_along_whole_episodes():
    rng = np.random.default_rng(3)
    lines = []
    for turns in (3, 1, 2, 3, 2):
        sizes = rng.integers(0, 4, (turns, 2))
        line = "".join("o" * (1 + o) + "r" * r + "R" for o, r in sizes)
        lines.append(line.ljust(26, "."))
    whole = rows_of(*lines, episode=[3, 0, 4, 1, 2])
    # By token, for every token of these rows is another.
    reward, value = rng.normal(size=(2, 5 * 26 + 1)).astype(np.float32)
    settings = dict(gamma=0.9, lam=0.8)
    expected = advantages.gae(
        reward[whole.tokens], value[whole.tokens], whole.is_reply, **settings
    )
    split = split_turns(whole)
    order = rng.permutation(11)
    for rows in (whole, jax.tree.map(lambda x: x[order], split)):
        found = advantages.gae_across_rows(
            reward[rows.tokens], value[rows.tokens], rows, (5, 3, 4), **settings
        )
        for name in ("advantages", "returns"):
            by_token = np.zeros(len(value))
            by_token[whole.tokens] = getattr(expected, name)
            np.testing.assert_allclose(
                getattr(found, name),
                np.where(rows.is_reply, by_token[rows.tokens], 0),
                rtol=1e-5,
                atol=1e-6,
            )


def test_a_row_of_turns_equals_the_same_row_without_its_observations():
    rewards, values, is_reply = _random(seed=7)
    settings = dict(gamma=0.95, lam=0.9)
    long = advantages.gae(rewards, values, is_reply, **settings)
    for row in range(rewards.shape[0]):
        places = np.flatnonzero(is_reply[row])
        short = advantages.gae(
            rewards[row : row + 1, places],
            values[row : row + 1, places],
            jnp.ones((1, len(places)), bool),
            **settings,
        )
        np.testing.assert_allclose(
            long.advantages[row, places], short.advantages[0], rtol=1e-6
        )
        np.testing.assert_allclose(
            long.returns[row, places], short.returns[0], rtol=1e-6
        )


@pytest.mark.usefixtures("on")
def test_a_nan_off_the_replies_changes_nothing():
    poison = functools.partial(jnp.where, IS_REPLY)
    clean = advantages.gae(REWARDS, VALUES, IS_REPLY, gamma=0.5, lam=0.5)
    result = advantages.gae(
        poison(REWARDS, jnp.nan),
        poison(VALUES, jnp.nan),
        IS_REPLY,
        gamma=0.5,
        lam=0.5,
    )
    np.testing.assert_array_equal(result.advantages, clean.advantages)
    np.testing.assert_array_equal(result.returns, clean.returns)


def test_group_advantages_equal_the_numbers_worked_out_by_hand():
    np.testing.assert_allclose(
        jax.jit(advantages.group_advantages)(RETURNS, Grouping(GROUP, 3)),
        [-1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        atol=1e-6,
    )


def test_groups_without_a_spread_have_advantages_of_exactly_zero():
    returns = jnp.array([0.1, 0.1, 0.1, 0.3 + 3e-8, 0.3, 0.3])
    assert returns[3] != returns[4]  # Rounding, which must not become a signal.
    grouping = Grouping(jnp.array([0, 0, 0, 1, 1, 1]), 2)
    np.testing.assert_array_equal(
        advantages.group_advantages(returns, grouping), np.zeros(6)
    )


def test_a_spread_of_a_hundred_thousandth_is_one():
    values, root = jnp.array([0.0, 1e-5]), 0.5**0.5
    grouping = Grouping(jnp.zeros(2, jnp.int32), 1)
    found = advantages.group_advantages(values, grouping)
    np.testing.assert_allclose(found, [-root, root], rtol=1e-5)
    found = advantages.whiten(values[None], jnp.ones((1, 2), bool), jnp.ones(1))
    np.testing.assert_allclose(found, [[-1, 1]], rtol=1e-5)


def test_dr_grpo_is_grpo_before_the_division():
    returns = jnp.array([1.0, 4.0, 2.0, 10.0, 1.0, 0.5])
    group = jnp.array([0, 1, 0, 1, 0, 1])
    grouping = Grouping(group, 2)
    centred = advantages.group_advantages(returns, grouping, divide_by_std=False)
    divided = advantages.group_advantages(returns, grouping)
    for g in range(2):
        members = np.asarray(returns)[np.asarray(group) == g]
        expected = members - members.mean()
        in_group = np.asarray(group) == g
        np.testing.assert_allclose(centred[in_group], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            divided[in_group], expected / members.std(ddof=1), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_permuted_episodes_keep_their_group_advantages(divide_by_std):
    random = np.random.default_rng(0)
    returns = jnp.asarray(random.normal(size=20), jnp.float32)
    group = jnp.asarray(random.integers(0, 4, size=20))
    order = random.permutation(20)
    compute = functools.partial(
        advantages.group_advantages, divide_by_std=divide_by_std
    )
    np.testing.assert_allclose(
        compute(returns[order], Grouping(group[order], 4)),
        compute(returns, Grouping(group, 4))[order],
        rtol=1e-5,
        atol=1e-6,
    )


def test_leaving_one_out_equals_a_loop_over_the_others():
    random = np.random.default_rng(3)
    returns = random.normal(size=15).astype(np.float32)
    group = random.permutation(np.repeat([0, 1, 2], [1, 6, 8]))
    grouping = Grouping(jnp.asarray(group), 3)
    result = advantages.leave_one_out(jnp.asarray(returns), grouping)
    for b in range(15):
        others = [returns[o] for o in range(15) if o != b and group[o] == group[b]]
        expected = returns[b] - np.mean(others) if others else 0.0
        np.testing.assert_allclose(result[b], expected, rtol=1e-4, atol=1e-6)


def test_every_reply_token_gets_the_advantage_of_its_episode():
    rows = rows_of("orRo", "rR..", "....", episode=[1, 0, 0])
    spread = jax.jit(advantages.broadcast_to_tokens)(jnp.array([2.0, -3.0]), rows)
    np.testing.assert_array_equal(spread, [[0, -3, -3, 0], [2, 2, 0, 0], [0, 0, 0, 0]])


def test_whitening_equals_the_numbers_worked_out_by_hand():
    # Counted: 1 and 3 with weight 1, 5 with weight 2: mean 3.5, variance 2.75.
    values = jnp.array([[1.0, jnp.nan, 3.0], [5.0, 8.0, jnp.nan], [jnp.nan, 7.0, 7.0]])
    mask = jnp.array([[True, False, True], [True, False, False], [True, True, True]])
    result = jax.jit(advantages.whiten)(values, mask, jnp.array([1.0, 2.0, 0.0]))
    expected = np.array([[-2.5, 0.0, -0.5], [1.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(result, expected / np.sqrt(2.75), rtol=1e-6)


def test_whitening_takes_mean_and_std_over_the_tokens_that_it_is_told_to_count():
    values, mask = jnp.array([[1.0, 1.0, 1.0, 5.0, 9.0]]), jnp.arange(5)[None] < 4
    counted = jnp.array([[True, False, False, True, True]])  # Off the mask: never.
    found = advantages.whiten(values, mask, jnp.ones(1), counted)
    np.testing.assert_allclose(found, [[-1, -1, -1, 1, 0]])


def test_whitened_values_have_mean_zero_and_std_one_over_the_mask():
    _, values, mask = _random(seed=2)
    weight = jnp.array([1.0, 0.0, 1.0, 1.0])
    result = advantages.whiten(100 + 5 * values, mask, weight)
    counted = np.asarray(mask) & (np.asarray(weight) > 0)[:, None]
    selected = np.asarray(result)[counted]
    np.testing.assert_allclose(selected.mean(), 0.0, atol=1e-5)
    np.testing.assert_allclose(selected.std(), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(result)[~counted], 0.0)


@pytest.mark.parametrize("value", [0.1, 1000.1, -777.7])
@pytest.mark.parametrize("tokens", [0, 1, 3, 37])
def test_whitening_equal_values_or_a_single_one_or_none_gives_zeros(tokens, value):
    mask = jnp.arange(40)[None, :] < tokens
    result = advantages.whiten(jnp.full((1, 40), value), mask, jnp.ones(1))
    np.testing.assert_array_equal(result, np.zeros((1, 40)))


def _random(seed):
    random = np.random.default_rng(seed)
    rewards, values = random.normal(size=(2, 4, 12)).astype(np.float32)
    is_reply = random.random((4, 12)) < 0.6
    return jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(is_reply)
