"""What a study measures of a run."""

import dataclasses
import math

import numpy as np
import pytest
from helpers.study_records import record

from ragen_jax.studies import measures, statistics
from ragen_jax.studies.run_record import RunRecord


def test_measures_are_read_off_a_runs_curves_and_table():
    run = record(
        0, [1, 0, 1, 1], success=(0.2, 0.7, 0.5), **{"rollout/entropy": range(20)}
    )
    found = {
        name: measures.value(run, name)
        for name in measures.MEASURES
        if name != "seconds"
    }
    assert found["test_success"] == 0.75 and found["test_gain"] == 0.5
    assert found["best_validation"] == 0.7 and found["last_validation"] == 0.5
    assert found["drop"] == pytest.approx(0.2)
    assert found["last_entropy"] == 18.5
    assert found["test_before"] == 0.25
    assert measures.by_level(run, "test_gain").tolist() == [0.75, -0.25, 0.75, 0.75]
    gain = statistics.interval([run], "test_gain")
    assert gain.low <= gain.mean == 0.5 <= gain.high
    assert math.isnan(found["kept_groups"])
    filtered = record(0, [1], **{"filter/kept_fraction": [1.0, 0.5, 0.5, 0.0]})
    assert measures.value(filtered, "kept_groups") == 0.5
    assert math.isnan(found["last_return"]) and math.isnan(found["std_lead"])


def test_a_collapse_has_a_peak_an_onset_and_a_sign_that_led_it():
    # Means of five: success is 1 up to iteration 14, then 0.8, 0.6, 0.4, ...; the
    # spread falls nine iterations earlier.
    success = [1.0] * 14 + [0.0] * 16
    spread = [0.5] * 5 + [0.0] * 25
    run = record(
        0,
        [1],
        **{
            "train/success": success,
            "filter/reward_std": spread,
            "health/level": [0] * 20 + [2] * 10,
            # Means of five: above 0.2 from iteration 12 on, of 0.1 at first.
            "rollout/entropy": [0.1] * 7 + [0.21] * 23,
            # Above three times the median, 1, at iteration 13; not at 3, too early.
            "update/actor_grad_norm": [1.0, 1.0, 9.0] + [1.0] * 9 + [3.1] + [1.0] * 17,
            # Below 0.4 where four of five are 0.2: at iteration 22.
            "health/distinct_thoughts": [0.8] * 18 + [0.2] * 12,
        },
    )
    assert measures.value(run, "entropy_lead") == 17 - 12
    assert measures.value(run, "gradient_lead") == 17 - 13
    assert measures.value(run, "thoughts_lead") == 17 - 22
    assert measures.value(run, "peak_success") == pytest.approx(1)
    assert measures.value(run, "lost_success") == pytest.approx(1)
    assert measures.value(run, "collapsed") == 1
    assert measures.value(run, "success_onset") == 17
    assert measures.value(run, "std_lead") == 9
    assert measures.value(run, "alarm_at") == 21
    healthy = record(1, [1], **{"train/success": [0.5] * 30})
    assert measures.value(healthy, "collapsed") == 0
    # A mean over seeds leaves out those that never fell, and counts the others.
    found = statistics.interval([run, healthy], "success_onset")
    assert found.mean == 17 and found.seeds == 1


def test_what_is_just_at_a_bound_has_not_crossed_it():
    # Multiples of five, of which means of five are exact.
    run = record(
        0,
        [1],
        **{
            "train/success": [10.0] * 10 + [5.0] * 8 + [5.0, 0.0],
            "rollout/entropy": [5.0] * 10 + [10.0] * 10,
            "update/actor_grad_norm": [1.0] * 10 + [3.0] * 10,
            "health/level": [0, 1, 1, 2] + [0] * 16,
            "time/iteration_seconds": [9.0] + [1.0] * 3,
        },
    )
    assert measures.onset(run, "train/success") == 20
    assert math.isnan(measures.departure(run, "rollout/entropy", 0.5, 2))
    assert math.isnan(measures.spike(run, "update/actor_grad_norm"))
    # The median is of what came before: 1, though with the sixth it would be 5.
    sudden = record(0, [1], norm=[1.0] * 3 + [9.0] * 3)
    assert measures.spike(sudden, "norm") == 6
    assert measures.value(run, "alarm_at") == 4
    assert measures.value(run, "seconds") == 1
    # The highest tenth, two iterations, against the mean of the last one.
    assert measures.value(run, "lost_success") == 10 - 2.5
    half = record(0, [1], **{"train/success": [10.0] * 10 + [5.0] * 10})
    assert measures.value(half, "collapsed") == 0


def test_a_run_that_was_rolled_back_collapsed_where_its_first_rollback_began():
    rollbacks = [{"from": 30, "to": 20}, {"from": 70, "to": 60}]
    run = dataclasses.replace(record(0, [1]), rollbacks=rollbacks)
    assert measures.value(run, "alarm_at") == 30


def test_a_run_without_thoughts_has_no_iteration_at_which_they_repeat(recwarn):
    run = record(0, [1], **{"train/success": [1.0] * 5 + [0.0] * 5})
    for one in run.records:
        one["health/distinct_thoughts"] = 0.0
    assert math.isnan(measures.value(run, "thoughts_lead"))
    assert not recwarn.list  # NumPy's, of 0 times infinity, in a study's output


def test_a_measure_of_one_of_several_environments_is_read_by_its_label():
    one, other = record(0, [1, 0, 0, 0]), record(0, [1, 1, 1, 0])
    both = RunRecord(0, [], {"rooms": one.test, "lakes": other.test})
    assert measures.value(both, "test_success/rooms") == 0.25
    assert measures.value(both, "test_gain/lakes") == 0.5
    assert measures.value(both, "test_success") == 0.5
    assert measures.by_level(both, "test_success/lakes").tolist() == [1, 1, 1, 0]
    assert measures.by_level(both, "test_success") is None
    assert measures.parse("last_entropy/rooms")[0] is None


def test_spearmans_correlation_is_of_ranks_with_ties_at_their_mean():
    assert measures.spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert measures.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5).
    assert measures.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert math.isnan(measures.spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(measures.spearman([1, 2, math.nan], [1, 2, 3]))


def test_a_correlation_with_success_is_over_a_runs_checkpoints():
    diagnoses = [
        {
            "step": step,
            "text": {"success": step / 10},
            "information": {"trajectory/token/zscore": -float(step)},
        }
        for step in range(4)
    ]
    # A checkpoint whose thoughts gave no such number is left out.
    diagnoses.append(
        {"text": {"success": 0.1}, "information": {"trajectory/token/zscore": None}}
    )
    run = RunRecord(0, [], {}, diagnoses)
    assert measures.value(run, "zscore_correlation") == pytest.approx(-1)
    assert math.isnan(measures.value(run, "entropy_correlation"))


def test_a_fall_is_that_from_the_highest_tenth_to_the_last():
    # Twenty values: tenths of two. The highest, 0.9, has one of each half.
    steps = np.array([0.5] * 6 + [0.9] * 4 + [0.4] * 10)
    assert measures.fall(steps) == pytest.approx(0.9 - 0.4)
    assert measures.fall(np.array([0.2] * 10 + [0.7] * 10)) == pytest.approx(0)
    # Tenths of four. The odd ones are highest in the second, where the even have 0.3;
    # the even ones in the third, where the odd have 0.1.
    halves = np.array([0.1] * 4 + [0.3, 0.8] * 2 + [0.9, 0.1] * 2 + [0.1] * 28)
    assert measures.fall(halves) == pytest.approx((0.3 + 0.1) / 2 - 0.1)
    assert measures.fall(np.array([0.5])) == 0
    assert np.isnan(measures.fall(np.array([])))
    # Of six evaluations a tenth is two: 0.7 chooses and 0.9 measures, and the reverse.
    validated = record(0, [1], success=(0.2, 0.1, 0.7, 0.9, 0.5, 0.3))
    assert measures.value(validated, "lost_validation") == pytest.approx(0.8 - 0.4)


def test_a_fall_is_the_same_read_from_a_data_file_of_six_digits():
    rng = np.random.default_rng(1)
    for run in rng.integers(90, 110, size=(50, 200)) / 128:  # Many equal tenths.
        rounded = np.array([float(f"{x:.6g}") for x in run])
        assert measures.fall(rounded) == pytest.approx(measures.fall(run), abs=2e-6)


def test_noise_alone_is_no_fall():
    rng = np.random.default_rng(0)
    runs = rng.normal(0.76, 0.1, size=(400, 200))
    found = np.array([measures.fall(run) for run in runs])
    assert abs(found.mean()) < 4 * found.std() / np.sqrt(len(found))
    highest = np.mean([measures.smoothed(run).max() for run in runs])
    assert highest - 0.76 > 0.1  # What the highest mean of five would have called lost.
