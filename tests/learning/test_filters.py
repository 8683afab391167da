"""Group statistics, which groups are kept, and the gather of their rows."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import advantages, filters, gather, groups, strategies
from ragen_jax.learning.groups import Grouping
from ragen_jax.settings import FilterSettings, update_counts

NOTHING = [False] * 4
USUAL = FilterSettings(
    strategy="top_fraction",
    fraction=0.25,
    fraction_end=-1.0,
    count=2,
    low=0.0,
    high=0.5,
    prefer="largest",
    metric="return_std",
    with_penalty=False,
    keep_zero=False,
    zero=1e-6,
    margin=0.01,
    rounding="nearest",
    scope="batch",
    loss_scale="none",
    reweight=False,
)


def keep_groups(score, **changes):
    """bool[P], by the usual filter with some settings changed."""
    chosen = dataclasses.replace(USUAL, **changes)
    return strategies.keep_groups(score, chosen, chosen.fraction)


SCORE = jnp.array([1.0, 3.0, 0.0, 2.0])


def test_statistics_equal_the_numbers_worked_out_by_hand():
    # Group 0: 1, 2, 3; group 1: 5; group 2: nobody; group 3: 0, 4.
    values = jnp.array([1.0, 0.0, 3.0, 5.0, 4.0, 2.0])
    group = jnp.array([0, 3, 0, 1, 3, 0])
    statistics = jax.jit(groups.group_statistics)(values, Grouping(group, 4))
    np.testing.assert_allclose(statistics.mean, [2.0, 5.0, 0.0, 2.0])
    np.testing.assert_allclose(statistics.std, [1.0, 0.0, 0.0, 8**0.5], rtol=1e-6)
    np.testing.assert_array_equal(statistics.count, [3, 1, 0, 2])


@pytest.mark.parametrize("value", [0.1, -0.7, 1e6 + 0.3, 1e-20])
def test_equal_values_have_a_std_of_exactly_zero_and_their_own_mean(value):
    value = np.float32(value)
    grouping = Grouping(jnp.zeros(7, jnp.int32), 1)
    statistics = groups.group_statistics(jnp.full(7, value), grouping)
    assert statistics.std[0] == 0
    assert statistics.mean[0] == value


@pytest.mark.parametrize("reward", [0.1, 50.0, 1e4])
def test_the_same_rewards_added_in_another_order_are_no_spread(reward):
    """A float32 holds the sums, 49 and more, to 4e-6 alone."""
    rewards = np.append(np.full(9, np.float32(-0.1)), np.float32(reward - 0.1))
    # Cut into two turns at each place: their sums differ in the last digits.
    returns = [
        rewards[:cut].sum(dtype=np.float32) + rewards[cut:].sum(dtype=np.float32)
        for cut in range(1, 10)
    ]
    assert reward < 1 or len(set(returns)) > 1
    grouping = Grouping(jnp.zeros(9, jnp.int32), 1)
    statistics = groups.group_statistics(jnp.asarray(returns), grouping)
    assert statistics.std[0] == 0
    gains = advantages.group_advantages(jnp.asarray(returns), grouping)
    np.testing.assert_array_equal(gains, np.zeros(9))


def test_a_reward_of_a_thousandth_is_a_spread_beside_returns_of_a_hundred():
    returns = jnp.full(16, 100.0).at[3].add(1e-3)
    grouping = Grouping(jnp.zeros(16, jnp.int32), 1)
    statistics = groups.group_statistics(returns, grouping)
    np.testing.assert_allclose(statistics.std, [1e-3 / 4], rtol=1e-2)


def test_a_small_spread_far_from_zero_is_not_lost():
    values = jnp.array([1e6, 1e6 + 1, 1e6 + 2])
    grouping = Grouping(jnp.zeros(3, jnp.int32), 1)
    statistics = groups.group_statistics(values, grouping)
    np.testing.assert_allclose(statistics.std, [1.0], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_statistics_equal_numpy_whatever_the_order_and_sizes_of_groups(seed):
    random = np.random.default_rng(seed)
    group = random.integers(0, 5, size=40)
    values = random.normal(3, 2, size=40).astype(np.float32)
    grouping = Grouping(jnp.asarray(group), 5)
    statistics = groups.group_statistics(jnp.asarray(values), grouping)
    for g in range(5):
        members = values[group == g].astype(np.float64)
        np.testing.assert_allclose(statistics.mean[g], members.mean(), rtol=1e-5)
        np.testing.assert_allclose(statistics.std[g], members.std(ddof=1), rtol=1e-5)


def test_no_filter_keeps_groups_of_zero_score_too():
    _assert_kept([True] * 4, SCORE, strategy="none", fraction=0.1, keep_zero=False)


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
def test_top_fraction_keeps_the_highest_scores_that_are_not_zero(fraction, expected):
    keep = functools.partial(
        keep_groups,
        strategy="top_fraction",
        fraction=fraction,
        keep_zero=False,
    )
    np.testing.assert_array_equal(jax.jit(keep)(SCORE), expected)


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
    keep = keep_groups(score, strategy=strategy, fraction=0.5, keep_zero=False)
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
    chosen = dataclasses.replace(USUAL, strategy=strategy, fraction=fraction)
    assert sum(expected) <= update_counts.room_for_groups(9, chosen)


@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_permuted_groups_are_kept_just_as_they_were(strategy):
    random = np.random.default_rng(0)
    score = jnp.asarray(random.permutation(12), jnp.float32)
    order = random.permutation(12)
    keep = functools.partial(
        keep_groups, strategy=strategy, fraction=0.4, keep_zero=False
    )
    np.testing.assert_array_equal(keep(score[order]), np.asarray(keep(score))[order])


@pytest.mark.parametrize("keep_zero", [False, True])
@pytest.mark.parametrize("strategy", ["top_fraction", "top_p"])
def test_a_score_that_is_not_a_number_is_never_kept(strategy, keep_zero):
    score = jnp.array([jnp.nan, 1.0, 2.0, 0.0])
    keep = keep_groups(score, strategy=strategy, fraction=1.0, keep_zero=keep_zero)
    np.testing.assert_array_equal(keep, [False, True, True, keep_zero])
    keep = keep_groups(score, strategy="none", fraction=1.0, keep_zero=keep_zero)
    np.testing.assert_array_equal(keep, [False, True, True, True])


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        (dict(strategy="none"), 8),
        (dict(strategy="top_p"), 8),
        (dict(strategy="top_fraction"), 2),
        (dict(strategy="top_fraction", fraction=0.3, rounding="down"), 2),
        (dict(strategy="top_fraction", fraction=0.3, fraction_end=0.6), 5),
        (dict(strategy="top_count", count=3), 3),
        (dict(strategy="min_p"), 8),
    ],
)
def test_room_is_made_for_the_most_groups_that_can_be_kept(changes, most):
    assert (
        update_counts.room_for_groups(8, dataclasses.replace(USUAL, **changes)) == most
    )


# All strategies ----------------------------------------------------------------------

# Scores 1, 3, 0, 2: what each keeps, worked out by hand.
BY_HAND = {
    "count": (dict(strategy="top_count", count=2), [False, True, False, True]),
    "count, smallest": (
        dict(strategy="top_count", count=2, prefer="smallest"),
        [True, False, False, True],
    ),
    "count, smallest, zeros too": (
        dict(strategy="top_count", count=2, prefer="smallest", keep_zero=True),
        [True, False, True, False],
    ),
    # What counts as zero is below `zero`; what equals it stays.
    "zero": (dict(strategy="top_count", count=4, zero=2.0), [False, True, False, True]),
    "more": (
        dict(strategy="top_count", count=4, zero=2.5),
        [False, True, False, False],
    ),
    # 0.7 * 4 = 2.8 groups, 3 when rounded, 2 when cut.
    "fraction, cut": (
        dict(fraction=0.7, rounding="down"),
        [False, True, False, True],
    ),
    # softmax of 3, 2, 1: 0.665, 0.245, 0.090.
    "softmax, one": (
        dict(strategy="top_p_softmax", fraction=0.66),
        [False, True, False, False],
    ),
    "softmax, two": (
        dict(strategy="top_p_softmax", fraction=0.67),
        [False, True, False, True],
    ),
    # softmax of -1, -2, -3 for the smallest first.
    "softmax, smallest": (
        dict(strategy="top_p_softmax", fraction=0.67, prefer="smallest"),
        [True, False, False, True],
    ),
    # In rising order 1, 2, 3 of 6: 0.5 * 6 - 0.01 < 3 = 1 + 2.
    "sum, smallest": (
        dict(strategy="top_p", fraction=0.5, prefer="smallest"),
        [True, False, False, True],
    ),
    # RAGEN's rule stops at the first zero, so with zeros kept nothing is.
    "sum, smallest, zeros too": (
        dict(strategy="top_p", fraction=0.5, prefer="smallest", keep_zero=True),
        NOTHING,
    ),
    "no margin": (
        dict(strategy="top_p", fraction=0.5016, margin=0.0),
        [False, True, False, True],
    ),
    # At least 0.6 * 3 = 1.8; at most 1 / 0.5 = 2.
    "ratio": (dict(strategy="min_p", fraction=0.6), [False, True, False, True]),
    "ratio, smallest": (
        dict(strategy="min_p", fraction=0.5, prefer="smallest"),
        [True, False, False, True],
    ),
    # Of four ranks 3, 2, 1, 0 the second quarter, and from below the second half.
    "ranks": (
        dict(strategy="percentile_range", low=0.25, high=0.5, keep_zero=True),
        [False, False, False, True],
    ),
    "ranks, smallest": (
        dict(
            strategy="percentile_range",
            low=0.5,
            high=1.0,
            keep_zero=True,
            prefer="smallest",
        ),
        [False, True, False, True],
    ),
    # Of three ranks those from round(0.9 * 3) = 3 on: there is none, so the last.
    "ranks, beyond the last": (
        dict(strategy="percentile_range", low=0.9, high=1.0),
        [True, False, False, False],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_each_strategy_keeps_what_was_worked_out_by_hand(case):
    changes, expected = BY_HAND[case]
    _assert_kept(expected, SCORE, **changes)


def test_top_p_of_one_keeps_every_group_that_is_not_zero():
    for strategy in ("top_p", "top_p_softmax"):
        _assert_kept([True, True, False, True], SCORE, strategy=strategy, fraction=1.0)


def test_a_fraction_that_moves_over_the_run_keeps_what_a_fixed_one_does():
    score = jnp.asarray(np.random.default_rng(0).random(9), jnp.float32)
    for strategy in ("top_fraction", "top_p", "top_p_softmax", "min_p"):
        chosen = dataclasses.replace(USUAL, strategy=strategy)
        keep = jax.jit(
            lambda f, chosen=chosen: strategies.keep_groups(score, chosen, f)
        )
        for fraction in (0.125, 0.5, 0.875):
            fixed = strategies.keep_groups(score, chosen, fraction)
            np.testing.assert_array_equal(keep(jnp.float32(fraction)), fixed)


@pytest.mark.parametrize(
    ("groups", "fraction", "rounding"), [(25, 0.58, "nearest"), (50, 0.58, "down")]
)
def test_there_is_room_for_all_that_a_fraction_that_moves_keeps(
    groups, fraction, rounding
):
    share = dict(fraction=fraction, fraction_end=0.1, rounding=rounding)
    chosen = dataclasses.replace(USUAL, strategy="top_fraction", **share)
    score = jnp.arange(1.0, groups + 1)
    kept = strategies.keep_groups(score, chosen, jnp.float32(fraction))
    assert kept.sum() <= update_counts.room_for_groups(groups, chosen)


def test_groups_outside_the_scope_are_never_kept():
    among = jnp.array([True, False, True, True])
    keep = strategies.keep_groups(SCORE, USUAL, 0.5, among, size=3)
    # 0.5 * 3 = 1.5 groups, rounded up: 2 of the scores 1, 0 and 2.
    np.testing.assert_array_equal(keep, [True, False, False, True])


FUZZED = 10_000  # score vectors of each strategy
# (fraction, low, high, count, rounding): each met by a share of the vectors.
PARAMETERS = (
    (0.25, 0.0, 0.25, 1, "nearest"),
    (0.5, 0.25, 0.75, 3, "down"),
    (0.9375, 0.5, 1.0, 7, "nearest"),
)
ENDS = tuple(itertools.product(("largest", "smallest"), (False, True)))


@pytest.mark.parametrize(
    "strategy",
    [
        name if name == "top_p" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(strategies.STRATEGIES)
    ],
)
def test_ten_thousand_score_vectors_are_kept_as_a_plain_loop_keeps_them(strategy):
    """With ties, zeros and negative scores, from either end, zeros kept or not."""
    rng = np.random.default_rng(len(strategy))
    each = -(-FUZZED // (len(PARAMETERS) * len(ENDS)))
    # A sum of the softmax that equals the fraction would be decided by rounding.
    shift = 0.013 if strategy == "top_p_softmax" else 0.0
    for parameters, end in itertools.product(PARAMETERS, ENDS):
        fraction, low, high, count, rounding = parameters
        chosen = dataclasses.replace(
            USUAL,
            strategy=strategy,
            fraction=fraction + shift,
            low=low,
            high=high,
            count=count,
            rounding=rounding,
            prefer=end[0],
            keep_zero=end[1],
        )
        keep = jax.jit(
            jax.vmap(lambda s, c=chosen: strategies.keep_groups(s, c, c.fraction))
        )
        # Multiples of 1/16 add up without rounding; a small range makes ties.
        scores = rng.integers(-3, 9, size=(each, 7)) / 16
        found = np.asarray(keep(jnp.asarray(scores, jnp.float32))).tolist()
        for score, kept in zip(scores.tolist(), found, strict=True):
            assert kept == _plain(score, chosen), (score, chosen)


def _plain(score, chosen) -> list[bool]:
    """Which groups are kept, by RAGEN's rules written out with lists."""
    sign = 1 if chosen.prefer == "largest" else -1
    if chosen.strategy == "none":
        return [True] * len(score)
    left = [g for g in range(len(score)) if chosen.keep_zero or score[g] != 0]
    left.sort(key=lambda g: (-sign * score[g], g))
    values, kept = [score[g] for g in left], []
    if chosen.strategy in ("none", "within_group"):
        kept = left
    elif chosen.strategy == "top_fraction":
        half = 0.5 if chosen.rounding == "nearest" else 0
        kept = left[: max(1, math.floor(chosen.fraction * len(score) + half))]
    elif chosen.strategy == "top_count":
        kept = left[: chosen.count]
    elif chosen.strategy == "top_p":
        enough, total = chosen.fraction * sum(values) - chosen.margin, 0.0
        for g in left:
            if total >= enough or score[g] <= 0:
                break
            kept.append(g)
            total += score[g]
        kept = kept if total >= enough else []
    elif chosen.strategy == "top_p_softmax":
        weights, total = [math.exp(sign * value) for value in values], 0.0
        for g, weight in zip(left, weights, strict=True):
            if total >= chosen.fraction:
                break
            kept.append(g)
            total += weight / sum(weights)
    elif chosen.strategy == "min_p" and left and sign > 0:
        least = np.float32(chosen.fraction * max(values) - 1e-10)
        kept = [g for g in left if score[g] >= least]
    elif chosen.strategy == "min_p" and left:
        # RAGEN's slack of 1e-10 is lost in float32, there as here.
        most = np.float32(min(values) / chosen.fraction)
        kept = [g for g in left if score[g] <= most]
    elif chosen.strategy == "percentile_range" and left:
        low = min(round(chosen.low * len(left)), len(left) - 1)
        kept = left[low : max(round(chosen.high * len(left)), low + 1)]
    return [g in kept for g in range(len(score))]


# Members of a group ------------------------------------------------------------------


def test_the_members_that_vary_most_are_the_lowest_and_the_highest():
    values = jnp.array([5.0, 1.0, 2.0, 9.0, 3.0, 3.0, 3.0, 3.0])
    group = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])
    keep = strategies.keep_members(values, group, 2, 2)
    np.testing.assert_array_equal(keep[:4], [False, True, False, True])
    assert keep[4:].sum() == 2


@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_other_members_of_a_group_vary_more(count):
    """In 10,000 groups of 6, each tried with all sets of so many members."""
    rng, groups = np.random.default_rng(count), FUZZED
    group = rng.permutation(np.repeat(np.arange(groups), 6))
    values = rng.integers(0, 9, group.size) / 4
    keep = np.asarray(
        strategies.keep_members(jnp.asarray(values, jnp.float32), group, groups, count)
    )
    in_order = np.argsort(group, kind="stable").reshape(groups, 6)
    own, kept = values[in_order], keep[in_order]
    assert (kept.sum(axis=1) == count).all()
    sets = [list(one) for one in itertools.combinations(range(6), count)]
    best = np.max([own[:, one].var(axis=1) for one in sets], axis=0)
    found = own[kept].reshape(groups, count).var(axis=1)
    np.testing.assert_allclose(found, best, atol=1e-9)


ROWS = rows_of("orR.", "oorR", "oR..", "ooR.", "....", episode=[2, 0, 3, 2, 0])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ([True, False, True, False], [True, True, False, True, False]),
        ([False, False, False, True], [False, False, True, False, False]),
        ([False] * 4, [False] * 5),
    ],
)
def test_the_rows_of_kept_episodes_are_kept_and_padding_never(keep, expected):
    is_kept = jax.jit(gather.is_kept_row)(ROWS, jnp.array(keep))
    np.testing.assert_array_equal(is_kept, expected)


@pytest.mark.parametrize("capacity", [3, 4, 7])
def test_gathering_puts_the_kept_rows_first_in_their_order(capacity):
    is_kept = jnp.array([False, True, False, True, True])
    gathered, weight = jax.jit(gather.gather_rows, static_argnums=2)(
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
    gathered, _ = gather.gather_rows(ROWS, is_kept, 3)
    for name in ("tokens", "is_reply", "logprobs", "entropy", "turn_end"):
        assert not np.asarray(getattr(gathered, name))[1:].any(), name
    np.testing.assert_array_equal(gathered.episode[1:], np.full((2, 4), -1))
    np.testing.assert_array_equal(gathered.turn[1:], np.full((2, 4), -1))


def test_gathering_nothing_gives_only_rows_without_weight():
    gathered, weight = gather.gather_rows(ROWS, jnp.zeros(5, bool), 2)
    np.testing.assert_array_equal(weight, [0, 0])
    assert not gathered.is_reply.any()


def _assert_kept(expected, score, **settings):
    np.testing.assert_array_equal(keep_groups(score, **settings), expected)


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


def test_a_length_is_that_of_all_of_an_episodes_replies_thoughts_included():
    episodes = episodes_of(reward=[[0.0, 0.0], [0.0, 0.0]]).replace(
        reply_tokens=jnp.array([[3, 2], [4, 0]]),
        thought_tokens=jnp.array([[1, 1], [3, 0]]),
    )
    assert filters._length(None, None, episodes).tolist() == [5.0, 4.0]
