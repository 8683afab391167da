"""Intervals, and when a claim holds."""

import math

import numpy as np
import pytest
from helpers.study_records import record

from ragen_jax.studies import statistics, verdicts
from ragen_jax.studies.definition import Claim


def test_an_interval_over_levels_is_that_of_a_mean_of_draws():
    levels = np.arange(400) % 4 == 0  # success 0.25, standard error 0.02165
    found = statistics.interval([record(0, levels)], "test_success")
    assert found.mean == 0.25 and found.seeds == 1
    assert found.low == pytest.approx(0.25 - 1.96 * 0.02165, abs=0.004)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.02165, abs=0.004)


def test_an_interval_over_seeds_is_that_of_the_mean_of_as_many_draws():
    """Of five seeds one has 1: binomial, above 3 of 5 in 0.7 % and above 2 in 6 %."""
    runs = [record(seed, [1], success=(float(seed == 4),)) for seed in range(5)]
    found = statistics.interval(runs, "last_validation")
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0, 0.6))


def test_a_difference_is_paired_by_seed_and_level():
    rng = np.random.default_rng(0)
    hard = [rng.random(200) for _ in range(3)]
    left = [record(s, h > 0.5) for s, h in enumerate(hard)]
    right = [record(s, h > 0.6) for s, h in enumerate(hard)]
    found = statistics.difference(left, right, "test_success")
    # Every level that right solves left solves too: the difference is never negative.
    assert found.low > 0.03 and found.high < 0.2
    assert statistics.difference(left, right[:1], "test_success").seeds == 1
    shuffled = list(reversed(right))
    assert statistics.difference(left, shuffled, "test_success") == found
    # Of one seed, left alone solves a tenth of 400 levels: standard error 0.3 / 20.
    ways = [record(0, np.arange(400) % 10 < solved) for solved in (5, 4)]
    found = statistics.difference(ways[:1], ways[1:], "test_success")
    assert found.low == pytest.approx(0.1 - 1.96 * 0.015, abs=0.003)
    assert found.high == pytest.approx(0.1 + 1.96 * 0.015, abs=0.003)
    # Of other numbers of levels the runs' means alone are compared.
    fewer = [record(s, np.arange(4) < 1) for s in range(3)]
    found = statistics.difference(left, fewer, "test_success")
    means = [np.mean(h > 0.5) - 0.25 for h in hard]
    assert found.mean == pytest.approx(np.mean(means)) and found.seeds == 3
    assert min(means) <= found.low + 1e-9 and found.high <= max(means) + 1e-9


@pytest.mark.parametrize(
    ("one", "other", "relation", "margin", "verdict"),
    [
        (0.8, 0.5, "greater", 0.0, verdicts.HOLDS),
        (0.8, 0.5, "less", 0.0, verdicts.FAILS),
        (0.5, 0.8, "greater", 0.0, verdicts.FAILS),
        (0.5, 0.8, "less", 0.0, verdicts.HOLDS),
        (0.8, 0.5, "greater", 0.5, verdicts.FAILS),
        (0.5, 0.5, "greater", 0.0, verdicts.UNDECIDED),
    ],
)
def test_a_verdict_follows_from_where_the_whole_interval_lies(
    one, other, relation, margin, verdict
):
    rng = np.random.default_rng(1)

    def arm(share):
        return [record(seed, rng.random(150) < share) for seed in range(3)]

    claim = Claim("x", "one", "other", relation=relation, margin=margin)
    judged = verdicts.judge(claim, {"one": arm(one), "other": arm(other)})
    assert judged.verdict == verdict


def test_students_interval_is_that_of_the_textbook():
    runs = [
        record(seed, [1], **{"train/success": [value] * 10})
        for seed, value in enumerate([0.1, 0.2, 0.3])
    ]
    found = statistics.interval(runs, "last_success")
    # s = 0.1; of two degrees of freedom t = 4.3027, times 0.1 / sqrt(3).
    assert found.t_low == pytest.approx(0.2 - 0.24841, abs=1e-5)
    assert found.t_high == pytest.approx(0.2 + 0.24841, abs=1e-5)
    assert found.low >= 0.1 and found.high <= 0.3
    assert math.isnan(statistics.interval(runs[:1], "last_success").t_low)
    # t = (0.2 - 0.05) / (0.1 / sqrt(3)) = 2.59808; of two degrees of freedom
    # p = 1 - t / sqrt(t ** 2 + 2) = 1 - sqrt(6.75 / 8.75), on either side of the mean.
    p = 1 - math.sqrt(6.75 / 8.75)
    assert statistics.p_value(found, 0.05) == pytest.approx(p)
    assert statistics.p_value(found, 0.35) == pytest.approx(p)
    assert statistics.p_value(found, 0.2) == pytest.approx(1)
    assert statistics.p_value(found, found.t_high) == pytest.approx(0.05)
    assert math.isnan(statistics.p_value(statistics.interval(runs[:1], "drop"), 0.0))


def test_holms_correction_counts_the_others_that_are_not_smaller():
    # 4 times 0.01; 3 times 0.02; 2 times 0.024, no less than 0.06; and 0.9 itself.
    found = statistics.holm([0.024, 0.01, 0.9, 0.02])
    assert found == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert statistics.holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert statistics.holm([0.7, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_the_claims_of_a_page_are_one_family_whatever_is_said_of_them():
    def verdict(p, said):
        # 1 - p = t / sqrt(t ** 2 + 2), of two degrees of freedom.
        t = (1 - p) * math.sqrt(2 / (1 - (1 - p) ** 2))
        half = 4.302653 / t
        quantity = statistics.Interval(1, 0, 2, 3, t_low=1 - half, t_high=1 + half)
        return verdicts.Verdict(Claim("x", "one"), quantity, said)

    undecided = [
        verdict(0.3, verdicts.UNDECIDED),
        verdict(0.045, verdicts.WEAKLY_HOLDS),
    ]
    equal = statistics.Interval(1, 0, 2, 3)  # has no p
    undecided.append(verdicts.Verdict(Claim("x", "one"), equal, verdicts.WEAKLY_FAILS))
    decided = [verdict(0.01, verdicts.HOLDS), verdict(0.02, verdicts.FAILS)]
    assert decided[1].p == pytest.approx(0.02, abs=1e-6)
    # Of four, 0.01 counts fourfold and 0.02 threefold.
    assert verdicts.corrected([*undecided, *decided]) == (4, 2, 1)
    assert verdicts.corrected(decided) == (2, 2, 2)
    assert verdicts.corrected(undecided[2:]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "relation", "margin", "verdict"),
    [
        ([0.8, 0.9, 1.0], "greater", 0.5, verdicts.HOLDS),
        ([0.8, 0.9, 1.0], "less", 0.5, verdicts.FAILS),
        # Student's interval is 0.4 +- 1.08: three seeds so far apart say little.
        ([0.1, 0.2, 0.9], "greater", 0.0, verdicts.WEAKLY_HOLDS),
        ([0.1, 0.2, 0.9], "greater", 0.95, verdicts.WEAKLY_FAILS),
        ([0.1, 0.2, 0.9], "less", 0.95, verdicts.WEAKLY_HOLDS),
        ([0.1, 0.2, 0.9], "greater", 0.5, verdicts.UNDECIDED),
        # Of two seeds the bootstrap alone says nothing; t = 12.7 says it here.
        ([0.1, 0.2], "greater", 0.0, verdicts.UNDECIDED),
        ([0.89, 0.9], "greater", 0.0, verdicts.HOLDS),
        # Equal values say nothing of the spread.
        ([0.9, 0.9], "greater", 0.0, verdicts.UNDECIDED),
        ([0.9, 0.9, 0.9], "greater", 0.0, verdicts.WEAKLY_HOLDS),
        ([0.9, 0.9, 0.9], "less", 0.0, verdicts.WEAKLY_FAILS),
        # Exactly at the margin is on neither side of it.
        ([0.5, 0.5, 0.5], "greater", 0.5, verdicts.UNDECIDED),
        ([0.5, 0.5, 0.5], "less", 0.5, verdicts.UNDECIDED),
    ],
)
def test_a_verdict_needs_both_intervals_or_says_that_it_has_one(
    values, relation, margin, verdict
):
    runs = [
        record(seed, [1], **{"train/success": [value] * 10})
        for seed, value in enumerate(values)
    ]
    claim = Claim("x", "one", None, "last_success", relation, margin)
    assert verdicts.judge(claim, {"one": runs}).verdict == verdict


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_two_seeds_decide_nothing_about_what_a_third_lacks(count, lacking):
    runs = [record(seed, [1], success=(0.89 + seed / 100,)) for seed in range(count)]
    runs += [record(9 + number, [1]) for number in range(lacking)]
    claim = Claim("x", "one", None, "last_validation", "greater", 0.0)
    judged = verdicts.judge(claim, {"one": runs})
    assert (judged.quantity.seeds, judged.quantity.left_out) == (count, lacking)
    decides = count == 3 or lacking == 0
    assert judged.verdict == (verdicts.HOLDS if decides else verdicts.UNDECIDED)


def test_equal_differences_have_no_students_interval_whatever_rounding_left():
    def arm(*values):
        return [
            record(seed, [1], **{"train/success": [value] * 10})
            for seed, value in enumerate(values)
        ]

    # 0.3 - 0.2 and 0.7 - 0.6 are not the same float.
    found = statistics.difference(arm(0.3, 0.7), arm(0.2, 0.6), "last_success")
    assert found.mean == pytest.approx(0.1) and found.seeds == 2
    assert math.isnan(found.t_low) and math.isnan(found.t_high)


def test_one_seed_decides_nothing():
    runs = {"one": [record(0, np.ones(500))], "other": [record(0, np.zeros(500))]}
    judged = verdicts.judge(Claim("x", "one", "other"), runs)
    assert judged.verdict == verdicts.UNDECIDED and judged.quantity.mean == 1
