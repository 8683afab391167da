"""Group statistics, which groups are kept, and the gather of their rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import episodes_of, rows_of

from ragen_jax.learning import filters

NOTHING = [False] * 4
SCORE = jnp.array([1.0, 3.0, 0.0, 2.0])


@pytest.mark.parametrize("compiled", [False, True])
def test_statistics_equal_the_numbers_worked_out_by_hand(compiled):
    function = filters.group_statistics
    function = jax.jit(function, static_argnums=2) if compiled else function
    # Group 0: 1, 2, 3; group 1: 5; group 2: nobody; group 3: 0, 4.
    values = jnp.array([1.0, 0.0, 3.0, 5.0, 4.0, 2.0])
    group = jnp.array([0, 3, 0, 1, 3, 0])
    statistics = function(values, group, 4)
    np.testing.assert_allclose(statistics.mean, [2.0, 5.0, 0.0, 2.0])
    np.testing.assert_allclose(statistics.std, [1.0, 0.0, 0.0, 8**0.5], rtol=1e-6)
    np.testing.assert_array_equal(statistics.count, [3, 1, 0, 2])


@pytest.mark.parametrize("value", [0.1, -0.7, 1e6 + 0.3, 1e-20])
def test_equal_values_have_a_std_of_exactly_zero_and_their_own_mean(value):
    value = np.float32(value)
    statistics = filters.group_statistics(
        jnp.full(7, value), jnp.zeros(7, jnp.int32), 1
    )
    assert statistics.std[0] == 0
    assert statistics.mean[0] == value


def test_a_small_spread_far_from_zero_is_not_lost():
    values = jnp.array([1e6, 1e6 + 1, 1e6 + 2])
    statistics = filters.group_statistics(values, jnp.zeros(3, jnp.int32), 1)
    np.testing.assert_allclose(statistics.std, [1.0], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_statistics_equal_numpy_whatever_the_order_and_sizes_of_groups(seed):
    random = np.random.default_rng(seed)
    group = random.integers(0, 5, size=40)
    values = random.normal(3, 2, size=40).astype(np.float32)
    statistics = filters.group_statistics(jnp.asarray(values), jnp.asarray(group), 5)
    for g in range(5):
        members = values[group == g].astype(np.float64)
        np.testing.assert_allclose(statistics.mean[g], members.mean(), rtol=1e-5)
        np.testing.assert_allclose(statistics.std[g], members.std(ddof=1), rtol=1e-5)


def test_no_filter_keeps_groups_of_zero_score_too():
    _assert_kept([True] * 4, SCORE, strategy="none", fraction=0.1, keep_zero=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.1, [False, True, False, False]),  # Never fewer than one.
        (0.25, [False, True, False, False]),
        (0.375, [False, True, False, True]),  # A half is rounded up.
        (0.75, [True, True, False, True]),
        (1.0, [True, True, False, True]),
    ],
)
def test_top_fraction_keeps_the_highest_scores_that_are_not_zero(
    fraction, expected, compiled
):
    keep = functools.partial(
        filters.keep_groups,
        strategy="top_fraction",
        fraction=fraction,
        keep_zero=False,
    )
    keep = jax.jit(keep) if compiled else keep
    np.testing.assert_array_equal(keep(SCORE), expected)


def test_top_fraction_fills_up_with_zero_groups_only_where_asked():
    zeros = functools.partial(
        _assert_kept, score=jnp.zeros(4), strategy="top_fraction", fraction=0.5
    )
    zeros(NOTHING, keep_zero=False)
    zeros([True, True, False, False], keep_zero=True)


@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_ties_go_to_the_lower_index(strategy):
    score = jnp.array([1.0, 2.0, 2.0, 2.0, 1.0])
    # A fraction of 5 groups is 3 of them; of the total, 8, it is 4: two groups.
    keep = filters.keep_groups(score, strategy=strategy, fraction=0.5, keep_zero=False)
    expected = [False, True, True, strategy == "top_fraction", False]
    np.testing.assert_array_equal(keep, expected)


def test_top_p_keeps_until_the_sum_is_reached():
    # Scores 3, 2, 1 of 6: the sums are 3 = 0.5 * 6, 5 = 0.8333 * 6 and 6.
    kept = functools.partial(
        _assert_kept, score=SCORE, strategy="top_p", keep_zero=False
    )
    kept([False, True, False, False], fraction=0.5)
    # 0.5016 * 6 - 0.01 < 3 = the sum of the first: the margin makes it enough.
    kept([False, True, False, False], fraction=0.5016)
    kept([False, True, False, True], fraction=0.503)
    kept([False, True, False, True], fraction=0.83)
    kept([True, True, False, True], fraction=0.9)
    kept([True, True, False, True], fraction=1.0)


def test_top_p_of_a_total_within_the_margin_keeps_nothing():
    score = jnp.array([0.004, 0.0, 0.002, 0.0])
    _assert_kept(NOTHING, score, strategy="top_p", fraction=0.9, keep_zero=False)


def test_top_p_reaches_zero_groups_only_at_a_fraction_of_one():
    kept = functools.partial(_assert_kept, score=SCORE, strategy="top_p")
    kept([True, True, False, True], fraction=0.99, keep_zero=True)
    kept([True, True, True, True], fraction=1.0, keep_zero=True)
    kept([True, True, False, True], fraction=1.0, keep_zero=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep_zero", [False, True])
@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_the_kept_groups_equal_those_of_a_loop(strategy, keep_zero, seed):
    random = np.random.default_rng(seed)
    # Multiples of 1/16 add up without rounding; a small range makes ties.
    score = random.integers(0, 6, size=9).astype(np.float32) / 16
    fraction = [0.1, 0.25, 0.5, 0.8, 0.9, 1.0][seed]
    expected = _kept_by_loop(score, strategy, fraction, keep_zero)
    _assert_kept(
        expected,
        jnp.asarray(score),
        strategy=strategy,
        fraction=fraction,
        keep_zero=keep_zero,
    )
    assert sum(expected) <= filters.most_kept(9, strategy=strategy, fraction=fraction)


@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_permuted_groups_are_kept_just_as_they_were(strategy):
    random = np.random.default_rng(0)
    score = jnp.asarray(random.permutation(12), jnp.float32)
    order = random.permutation(12)
    keep = functools.partial(
        filters.keep_groups, strategy=strategy, fraction=0.4, keep_zero=False
    )
    np.testing.assert_array_equal(keep(score[order]), np.asarray(keep(score))[order])


@pytest.mark.parametrize("keep_zero", [False, True])
@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_a_score_that_is_not_a_number_is_never_kept(strategy, keep_zero):
    score = jnp.array([jnp.nan, 1.0, 2.0, 0.0])
    keep = filters.keep_groups(
        score, strategy=strategy, fraction=1.0, keep_zero=keep_zero
    )
    np.testing.assert_array_equal(keep, [False, True, True, keep_zero])


@pytest.mark.parametrize(
    ("strategy", "fraction", "most"),
    [("none", 0.25, 8), ("top_p", 0.25, 8), ("top_fraction", 0.25, 2)],
)
def test_room_is_made_for_the_most_groups_that_can_be_kept(strategy, fraction, most):
    assert filters.most_kept(8, strategy=strategy, fraction=fraction) == most


def test_unknown_strategies_and_fractions_are_refused():
    with pytest.raises(ValueError, match="'top_k'; choose one of"):
        filters.keep_groups(SCORE, strategy="top_k", fraction=0.5, keep_zero=False)
    with pytest.raises(ValueError, match=r"got 1\.5"):
        filters.keep_groups(SCORE, strategy="top_p", fraction=1.5, keep_zero=False)
    with pytest.raises(ValueError, match="got 0"):
        filters.keep_groups(SCORE, strategy="top_fraction", fraction=0, keep_zero=True)


ROWS = rows_of("orR.", "oorR", "oR..", "ooR.", "....", episode=[2, 0, 3, 2, 0])
EPISODES = episodes_of(reward=[[1.0]] * 4, group=[1, 0, 1, 0])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ([False, True], [True, True, False, True, False]),
        ([True, False], [False, False, True, False, False]),
        ([True, True], [True, True, True, True, False]),
        ([False, False], [False] * 5),
    ],
)
def test_the_rows_of_kept_groups_are_kept_and_padding_never(keep, expected):
    is_kept = jax.jit(filters.kept_rows)(ROWS, EPISODES, jnp.array(keep))
    np.testing.assert_array_equal(is_kept, expected)


@pytest.mark.parametrize("capacity", [3, 4, 7])
def test_gathering_puts_the_kept_rows_first_in_their_order(capacity):
    is_kept = jnp.array([False, True, False, True, True])
    gathered, weight = jax.jit(filters.gather_rows, static_argnums=2)(
        ROWS, is_kept, capacity
    )
    np.testing.assert_array_equal(weight, [1, 1, 1, 0, 0, 0, 0][:capacity])
    assert weight.dtype == jnp.float32
    for field, source in zip(
        jax.tree.leaves(gathered), jax.tree.leaves(ROWS), strict=True
    ):
        assert field.shape == (capacity, *source.shape[1:])
        assert field.dtype == source.dtype
        np.testing.assert_array_equal(field[:3], source[jnp.array([1, 3, 4])])


def test_the_rows_behind_the_kept_ones_are_empty():
    is_kept = jnp.array([True, False, False, False, False])
    gathered, _ = filters.gather_rows(ROWS, is_kept, 3)
    for name in ("tokens", "is_reply", "logprobs", "entropy", "turn_end"):
        assert not np.asarray(getattr(gathered, name))[1:].any(), name
    np.testing.assert_array_equal(gathered.episode[1:], np.full((2, 4), -1))
    np.testing.assert_array_equal(gathered.turn[1:], np.full((2, 4), -1))


def test_gathering_nothing_gives_only_rows_without_weight():
    gathered, weight = filters.gather_rows(ROWS, jnp.zeros(5, bool), 2)
    np.testing.assert_array_equal(weight, [0, 0])
    assert not gathered.is_reply.any()


def _assert_kept(expected, score, **settings):
    np.testing.assert_array_equal(filters.keep_groups(score, **settings), expected)


def _kept_by_loop(score, strategy, fraction, keep_zero):
    order = sorted(range(len(score)), key=lambda g: (-score[g], g))
    order = [g for g in order if keep_zero or score[g] > 0]
    keep = [False] * len(score)
    kept_sum = 0.0
    for g in order:
        if strategy == "top_fraction":
            if sum(keep) >= max(1, int(fraction * len(score) + 0.5)):
                break
        elif fraction < 1 and (
            kept_sum >= fraction * score.sum() - 0.01 or score[g] <= 0
        ):
            break
        keep[g] = True
        kept_sum += score[g]
    return keep
