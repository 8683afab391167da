"""Studies: what runs, what is measured, and when a claim holds."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax.diagnostics import monitor
from ragen_jax.errors import UserError
from ragen_jax.reporting.console import Console
from ragen_jax.studies import (
    archive,
    definition,
    figure,
    measures,
    report,
    runner,
    statistics,
    study,
    verdicts,
)
from ragen_jax.studies.definition import Claim, PlannedRun, Study, planned_runs
from ragen_jax.studies.run_record import RunRecord, read_run

STUDY = Study(
    name="two",
    question="Is one better than other?",
    source="nothing",
    config="configs/frozenlake.py",
    changes={"iterations": 10},
    arms={"one": {"seed": 5}, "other, too": {"config": "configs/bandit.py"}},
    seeds=(0, 1),
    claims=(Claim("one is better", "one", "other, too"),),
    smoke={"iterations": 1},
)


def record(seed, levels, success=(), **series):
    """A run with these successes by test level and a series of each metric."""
    series = {"validation/success": success} | series
    length = max(len(values) for values in series.values())
    records = [
        {"iteration": i + 1} | {k: v[i] for k, v in series.items() if i < len(v)}
        for i in range(length)
    ]
    levels = np.asarray(levels, float)
    test = {
        "before": {"success": 0.25},
        "after": {"success": levels.mean()},
        "gain": levels.mean() - 0.25,
        "after_by_level": levels.tolist(),
        "before_by_level": np.full(len(levels), 0.25).tolist(),
    }
    return RunRecord(seed, records, test)


def test_a_grid_goes_seed_by_seed_with_an_arms_changes_over_the_studys():
    runs = planned_runs(STUDY)
    assert [(r.arm, r.seed) for r in runs] == [
        ("one", 0),
        ("other, too", 0),
        ("one", 1),
        ("other, too", 1),
    ]
    assert runs[2].arguments() == [
        "--config=configs/frozenlake.py",
        "--config.iterations=10",
        "--config.seed=1",
    ]
    assert runs[1].config == "configs/bandit.py"
    assert runs[1].label == "other_too-seed0"
    smoke = planned_runs(STUDY, scale="smoke", only="one")
    assert [(r.seed, r.changes["iterations"]) for r in smoke] == [(0, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="Two"), "small letters"),
        (dict(arms={}), "no arm"),
        (dict(seeds=(1, 1)), "repeat"),
        (dict(arms={"a b": {}, "a, b": {}}), "one folder name"),
        (dict(measures=("tests",)), "measure 'tests' is unknown"),
        (dict(claims=(Claim("x", "nobody"),)), "arm of a claim 'nobody'"),
        (dict(claims=(Claim("x", "one", relation="equal"),)), "relation"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_in_a_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        definition.check(Study(**{**vars(STUDY), **changes}))


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


def test_a_page_says_what_was_asked_measured_and_decided(tmp_path):
    runs = {
        "one": [
            record(s, np.arange(100) < solved, success=(0.3, 0.8))
            for s, solved in enumerate((79, 81))
        ],
        "other, too": [record(s, np.arange(100) < 30, success=(0.3,)) for s in (0, 1)],
    }
    failed = {"one-seed7": "exit code 2: error: no luck"}
    page = report.write(STUDY, runs, failed, tmp_path, command="python x", scale="tiny")
    text = page.read_text()
    assert STUDY.question in text and "python x" in text
    assert (
        "**holds: test_success of one minus that of other, too is 50.0 points" in text
    )
    alone = report.write(
        STUDY,
        runs | {"other, too": []},
        {},
        tmp_path / "alone",
        command="python x",
        scale="tiny",
    ).read_text()
    assert "Not judged, for want of runs:" in alone
    assert "(no run of other, too)" in alone and "**holds" not in alone
    assert "| one | 2 |" in alone and "| other, too |" not in alone
    assert (
        "| one | 2 | 80.0 % [" in text
        and "* one-seed7: exit code 2: error: no luck" in text
    )
    data = json.loads((tmp_path / "two.json").read_text())
    assert data["claims"][0]["verdict"] == "holds"
    assert data["runs"] == []
    assert (tmp_path / "two.png").stat().st_size > 1000


def test_an_alarm_whose_iterations_were_gone_back_over_is_counted(tmp_path):
    quiet = record(0, np.ones(3), **{"health/level": [0.0] * 5})
    (tmp_path / "test.json").write_text(json.dumps(quiet.test))
    lines = [json.dumps(line) + "\n" for line in quiet.records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    monitor.note_rollback(tmp_path, 11, 0, "a collapse", "learning_rate")
    monitor.note_rollback(tmp_path, 4, 0, "another", "learning_rate")
    read = read_run(tmp_path, 0)
    assert measures.value(read, "alarm_at") == 11
    # And in a study's data file, of which older ones have no such entry.
    kept = archive.entry(planned_runs(STUDY)[0], read, ())
    again = json.loads(json.dumps(kept))
    assert measures.value(archive._record(again), "alarm_at") == 11
    del again["rollbacks"]
    assert math.isnan(measures.value(archive._record(again), "alarm_at"))


def test_a_mean_of_fewer_seeds_than_an_arm_has_says_so(tmp_path):
    study = dataclasses.replace(STUDY, measures=("test_success", "alarm_at"))
    level = {"health/level": [0.0, 2.0]}
    some = [record(0, np.ones(3), **level), record(1, np.ones(3), success=(0.3,))]
    page = report.write(
        study, {"one": some, "other, too": []}, {}, tmp_path, command="x", scale="tiny"
    )
    (row,) = [line for line in page.read_text().splitlines() if "| one |" in line]
    assert row.endswith(" | 2.000 (no interval), 1 of 2 seeds |")
    assert "100.0 % [100.0, 100.0] |" in row


@pytest.mark.parametrize(
    ("measure", "right", "margin", "said"),
    [
        ("lost_success", None, 0.1, "claimed greater than 10 %"),
        ("test_success", "other", -0.05, "claimed greater than -5 points"),
        ("test_success", None, 0.0, "claimed greater than 0"),
        ("last_entropy", None, 0.1, "claimed greater than 0.1"),
    ],
)
def test_a_margin_stands_in_the_unit_of_what_it_is_compared_with(
    measure, right, margin, said
):
    claim = Claim("x", "one", right, measure=measure, margin=margin)
    quantity = statistics.Interval(0.3, 0.2, 0.4, 3, t_low=0.1, t_high=0.5)
    sentence = report._sentence(verdicts.Verdict(claim, quantity, verdicts.HOLDS))
    assert sentence.endswith(said)
    limits = "[20.0, 40.0], by t [10.0, 50.0]"
    if measure == "last_entropy":
        limits = "[0.200, 0.400], by t [0.100, 0.500]"
    assert f"{limits} (3 seeds)" in sentence


def test_a_mean_curve_is_where_all_of_its_runs_are():
    one = np.array([2, 4, 6]), np.array([1.0, 3.0, 5.0])
    other = np.array([1, 4]), np.array([0.0, 3.0])
    x, y = figure.mean_curve([one, other])
    assert x.tolist() == [1, 2, 4, 6]
    np.testing.assert_allclose(y, [np.nan, 1.0, 3.0, np.nan])


def test_many_arms_are_drawn_in_a_row_for_each_set_that_their_names_tell():
    shares = [f"Bandit, {e}, {n} %" for e in ("PPO", "GRPO") for n in (25, 50, 100)]
    rows = {"Bandit, PPO": shares[:3], "Bandit, GRPO": shares[3:]}
    assert figure.rows_of(shares) == rows
    assert figure.rows_of(shares[:5]) == {"": shares[:5]}  # few enough for one
    alone = [*shares, "FrozenLake, PPO, 25 %"]
    assert figure.rows_of(alone) == {"": alone}  # a row of one compares nothing
    plain = [str(number) for number in range(9)]
    assert figure.rows_of(plain) == {"": plain}


def test_the_rows_of_a_figure_share_their_axes_and_keep_their_curves(
    tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    curves = ("train/success", "rollout/entropy")
    runs = {
        f"{name}, {number}": [
            record(0, [1], **{curves[0]: [0.1 * number, scale], curves[1]: [1, 2]})
        ]
        for name, scale in (("A", 0.5), ("B", 4.0))
        for number in range(3)
    }
    # Of C one arm has been trained so far, of D none.
    runs["C, 1"] = [record(0, [1], **{curves[0]: [0.1, 0.2], curves[1]: [1, 2]})]
    planned = [*list(runs)[:-1], "C, 0", "C, 1", "D, 0", "D, 1"]
    arms = {name: {"seed": number} for number, name in enumerate(planned)}
    chosen = dataclasses.replace(STUDY, curves=curves, arms=arms)
    assert figure.draw(chosen, runs | {"C, 0": []}, tmp_path / "figure.png")
    (whole,) = drawn
    axes = whole.axes
    titles = [axis.get_title() for axis in axes]
    assert titles == [f"{row}: {name}" for row in "ABC" for name in curves]
    assert axes[0].get_ylim() == axes[2].get_ylim() and axes[0].get_ylim()[1] > 4
    assert [line.get_ydata()[-1] for line in axes[2].lines[1::2]] == [4.0] * 3
    words = [text.get_text() for text in axes[3].get_legend().get_texts()]
    assert words == ["B, 0", "B, 1", "B, 2"]
    # The arm of C that is there has the colour of its counterparts "A, 1" and "B, 1".
    colors = [line.get_color() for line in axes[0].lines[1::2]]
    assert len(set(colors)) == 3
    assert axes[4].lines[1].get_color() == axes[2].lines[3].get_color() == colors[1]


@pytest.mark.parametrize("count", [4, 13])
def test_each_of_many_arms_is_told_from_the_others_and_none_lies_behind_the_legend(
    count, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    arms = {f"arm {number}": {"seed": number} for number in range(count)}
    runs = {arm: [record(0, [1], **{"train/success": [0.1, 0.2]})] for arm in arms}
    chosen = dataclasses.replace(STUDY, curves=("train/success",), arms=arms)
    assert figure.draw(chosen, runs, tmp_path / "figure.png")
    (axis,) = drawn[0].axes
    means = axis.lines[1::2]
    looks = {(line.get_color(), line.get_linestyle()) for line in means}
    assert len(means) == len(looks) == count
    drawn[0].canvas.draw()
    assert axis.get_legend().get_window_extent().x0 >= axis.bbox.x1


def test_a_panel_without_curves_does_not_widen_the_axes_of_the_others(
    tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    curves = ("train/success", "update/clip_fraction")
    small = {curves[0]: [0.1, 0.2], curves[1]: [0.001, 0.002]}
    runs = {f"A, {number}": [record(0, [1], **small)] for number in range(3)}
    runs |= {f"B, {n}": [record(0, [1], **{curves[0]: [0, 1]})] for n in range(3)}
    arms = {name: {"seed": number} for number, name in enumerate(runs)}
    chosen = dataclasses.replace(STUDY, curves=curves, arms=arms)
    assert figure.draw(chosen, runs, tmp_path / "figure.png")
    with_curves, without = drawn[0].axes[1], drawn[0].axes[3]
    assert not without.lines and with_curves.get_ylim()[1] < 0.01


def test_a_page_of_the_papers_scale_says_what_its_runs_were_given(tmp_path):
    study = dataclasses.replace(
        STUDY,
        arms={"one": {"iterations": 20}, "other, too": STUDY.arms["other, too"]},
        paper={"iterations": 200},
        paper_arms={"one": {"optimizer.actor_lr": 5.0}},
    )
    runs = {"one": [record(0, [1])], "other, too": [record(0, [0])]}
    page = report.write(study, runs, {}, tmp_path, command="x", scale="paper")
    text = page.read_text()
    assert "`configs/frozenlake.py:paper` with `iterations=200`." in text
    assert "* **one**: `optimizer.actor_lr=5.0`; 1 run " in text
    assert "* **other, too**: `config=configs/bandit.py:paper`; 1 run " in text
    data = json.loads((tmp_path / "two-paper.json").read_text())
    for run in planned_runs(study, scale="paper", seeds=(0,)):
        own = dict(data["arms"][run.arm])
        assert own.pop("config", run.config) == run.config
        assert own.items() <= run.changes.items()


def test_the_figure_of_a_page_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(self, file, **options):
        (file if hasattr(file, "write") else open(file, "wb")).write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    (tmp_path / "two.png").write_text("old")
    runs = {arm: [record(0, [True, False], success=(0.3,))] for arm in STUDY.arms}
    with pytest.raises(KeyboardInterrupt):
        report.write(STUDY, runs, {}, tmp_path, command="python x", scale="tiny")
    assert (tmp_path / "two.png").read_text() == "old"


def test_a_page_says_that_what_a_claim_is_about_never_happened(tmp_path):
    early = Claim("the spread falls first", "one", measure="std_lead")
    study = dataclasses.replace(STUDY, claims=(early,), measures=("std_lead",))
    steady = [record(s, np.ones(10), success=(0.5, 0.5)) for s in (0, 1)]
    runs = {"one": steady, "other, too": []}
    page = report.write(study, runs, {}, tmp_path, command="x", scale="tiny")
    assert "**not judged: no seed has a std_lead in one" in page.read_text()


def test_a_page_links_only_to_files_that_are_beside_it(tmp_path):
    def links():
        runs = {"one": [record(0, [1])], "other, too": []}
        page = report.write(STUDY, runs, {}, tmp_path, command="x", scale="tiny")
        return re.findall(r"\]\((.*?)\)", page.read_text())

    assert links() and all((tmp_path / link).is_file() for link in links())
    (tmp_path / "README.md").write_text("how claims are judged")
    assert "README.md" in links()


STUDY_FILE = """
from ragen_jax.studies.definition import Study

def get_study():
    return Study(
        name="kept",
        question="?",
        source="nothing",
        config="configs/frozenlake.py",
        changes={"iterations": 2},
        arms={"one": {}},
        seeds=(0, 1),
        curves=("own/curve",),
    )
"""


def test_a_page_keeps_its_runs_where_their_workdirs_are_gone(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    folder, pages = tmp_path / "runs", tmp_path / "pages"
    choice = study.Choice(path=str(path), folder=folder, pages=pages)
    workdir = folder / "kept" / "one-seed0"
    workdir.mkdir(parents=True)
    made = record(0, [1.0, 0.0], success=(0.25,), **{"own/curve": (1.5, 2.123456789)})
    lines = [json.dumps(row) for row in made.records]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (workdir / "test.json").write_text(json.dumps(made.test))
    first = study.write_page(study.prepare(choice)).read_text()

    shutil.rmtree(folder)
    plan = study.prepare(choice)
    states = [plan.state_of(run) for run in plan.runs]
    assert states == ["finished", "missing"]
    assert study.write_page(plan).read_text() == first
    curve = plan.record_of(plan.runs[0]).series("own/curve")
    assert curve[1].tolist() == [1.5, 2.12346]
    # A page is of all seeds, and keeps runs that the study no longer plans.
    other = study.prepare(dataclasses.replace(choice, seeds=("1",)))
    assert [run.seed for run in other.runs] == [1]
    assert study.write_page(other).read_text() == first
    path.write_text(STUDY_FILE.replace("seeds=(0, 1)", "seeds=(3,)"))
    study.write_page(study.prepare(choice))
    assert [item["seed"] for item in archive.entries(pages / "kept.json")] == [0]
    # The same arguments in another study are the same run; another seed is not.
    path.write_text(STUDY_FILE.replace('"kept"', '"again"'))
    again = study.prepare(choice)
    assert [again.state_of(run) for run in again.runs] == states


def test_a_run_that_was_saved_more_often_and_diagnosed_is_the_same_unless_it_rolls_back(
    tmp_path,
):
    def planned(*diagnose, **changes):
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        return PlannedRun("one", 0, "configs/bandit.py", changes, diagnose)

    def is_there(run):
        return archive.key(run) in archive.read(tmp_path)

    def keep(run):
        item = archive.entry(run, record(0, [1.0]), ())
        (tmp_path / "a.json").write_text(json.dumps({"runs": [item]}))

    saving = dict(every__checkpoint=10, checkpoint__keep_last=20)
    keep(planned("--all", iterations=9, **saving))
    assert is_there(planned(iterations=9))
    assert is_there(planned("--all", iterations=9))
    assert not is_there(planned("--all", "--nogradients", iterations=9))
    assert not is_there(planned(iterations=8, **saving))
    rollback = dict(health__on_collapse="rollback")
    keep(planned(**rollback, **saving))
    assert is_there(planned(**rollback, **saving))
    assert not is_there(planned(**rollback))


def test_a_run_that_came_into_the_data_file_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    pages = tmp_path / "pages"
    plans = [
        study.prepare(study.Choice(str(path), tmp_path / folder, pages))
        for folder in ("here", "elsewhere")
    ]
    for number, plan in enumerate(plans):
        workdir = plan.folder / f"one-seed{number}"
        workdir.mkdir(parents=True)
        made = record(number, [1.0, 0.0], success=(0.25,))
        (workdir / "metrics.jsonl").write_text('{"iteration": 1}\n')
        (workdir / "test.json").write_text(json.dumps(made.test))
        page = study.write_page(plan).read_text()
    seeds = [item["seed"] for item in archive.entries(pages / "kept.json")]
    assert seeds == [0, 1]
    assert "| one | 2 |" in page


def test_a_page_shows_the_seeds_that_an_earlier_command_added(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    choice = study.Choice(str(path), tmp_path / "runs", tmp_path / "pages")
    more = study.prepare(dataclasses.replace(choice, seeds=("7",)))
    workdir = more.folder / "one-seed7"
    workdir.mkdir(parents=True)
    made = record(7, [1.0, 0.0], success=(0.25,))
    (workdir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (workdir / "test.json").write_text(json.dumps(made.test))
    first = study.write_page(more).read_text()
    assert "| one | 1 |" in first
    assert "--seeds=0,1,7" in first

    plan = study.prepare(choice)
    assert [run.seed for run in plan.runs] == [0, 1]
    assert study.write_page(plan).read_text() == first


def test_a_run_of_an_arm_that_was_edited_since_is_not_taken_for_the_new_one(tmp_path):
    path, folder = tmp_path / "kept.py", tmp_path / "runs"
    path.write_text(STUDY_FILE)
    choice = study.Choice(str(path), folder, tmp_path / "pages")
    workdir = folder / "kept" / "one-seed0"
    workdir.mkdir(parents=True)
    saved = {"seed": 0, "iterations": 2, "optimizer": {"actor_lr": 1e-4}}
    (workdir / "settings.json").write_text(json.dumps(saved))
    (workdir / "test.json").write_text(json.dumps(record(0, [1.0]).test))
    plan = study.prepare(choice)
    assert [plan.state_of(run) for run in plan.runs] == ["finished", "missing"]
    edited = STUDY_FILE.replace('{"one": {}}', '{"one": {"optimizer.actor_lr": 3e-4}}')
    path.write_text(edited)
    with pytest.raises(UserError, match=r"one-seed0 was trained with .*=0\.0001, and"):
        study.prepare(choice)


def test_every_measure_can_be_taken_of_a_kept_run():
    rng = np.random.default_rng(0)
    series = {name: tuple(rng.random(40)) for name in archive.KEPT}
    success = np.concatenate([np.linspace(0.1, 1, 20), np.linspace(1, 0, 20)])
    series["train/success"] = series["filter/reward_std"] = tuple(success)
    series["health/level"] = (0,) * 30 + (2,) * 10
    series["rollout/entropy"] = tuple(success)  # From little to much.
    series["update/actor_grad_norm"] = (0.1,) * 20 + tuple(rng.random(20) + 1)
    series["health/distinct_thoughts"] = (0.5,) * 30 + (0.1,) * 10
    made = record(3, rng.random(20) < 0.5, **series)
    diagnoses = [
        {
            "text": {"success": x},
            "information": {
                "trajectory/token/mutual": x * x,
                "trajectory/token/zscore": -x,
                "trajectory/token/conditional_entropy": entropy,
            },
        }
        for x, entropy in ((0.1, 2), (0.4, 1), (0.9, 3))
    ]
    made = RunRecord(3, made.records, made.test, diagnoses)
    run = planned_runs(STUDY)[0]
    item = json.loads(json.dumps(archive.entry(run, made, ())))
    kept = archive._record(item)
    for name in measures.MEASURES:
        value = measures.value(made, name)
        assert math.isfinite(value), name
        assert math.isclose(measures.value(kept, name), value, rel_tol=1e-5), name
    last = dict(
        last_success="train/success",
        last_return="train/return",
        last_entropy="rollout/entropy",
        last_reply_tokens="rollout/reply_tokens",
        last_reward_std="filter/reward_std",
        last_valid="rollout/valid_reply_rate",
        last_grounded="rollout/grounded",
        last_distinct_thoughts="health/distinct_thoughts",
        last_grad_norm="update/actor_grad_norm",
    )
    for name, metric in last.items():
        assert measures.value(made, name) == np.mean(series[metric][-4:]), name
    of = dict(mutual_correlation=1.0, zscore_correlation=-1.0, entropy_correlation=0.5)
    for name, value in of.items():
        assert measures.value(made, name) == pytest.approx(value)


def test_a_data_file_that_is_none_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"runs": [{}]}')
    with pytest.raises(UserError, match=r"x\.json is not the data of a study"):
        archive.read(tmp_path)


def test_a_page_of_before_runs_were_kept_is_not_overwritten(tmp_path):
    (tmp_path / "kept.py").write_text(STUDY_FILE)
    choice = study.Choice(str(tmp_path / "kept.py"), tmp_path / "runs", tmp_path)
    (tmp_path / "kept.json").write_text('{"study": "kept"}')
    with pytest.raises(UserError, match=r"kept\.json keeps no runs.*move it away"):
        study.prepare(choice)


TRAIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
if "--config.seed=1" in sys.argv and "frozenlake" in sys.argv[1]:
    print("error: no luck")
    sys.exit(2)
(folder / "test.json").write_text(json.dumps({"after": {"success": 1}}))
print("ran", sys.argv[1:])
"""


def test_what_is_missing_runs_and_a_failed_run_does_not_stop_the_rest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "_LOOK_EVERY", 0.02)
    train = tmp_path / "train.py"
    train.write_text(textwrap.dedent(TRAIN))
    folder, out = tmp_path / "runs", io.StringIO()

    def go(**options):
        return runner.run_missing(
            planned_runs(STUDY),
            folder,
            jobs=2,
            train=train,
            console=Console(out),
            **options,
        )

    failed = go()
    assert [run.label for run in failed] == ["one-seed1"]
    states = [runner.state_of(folder, run) for run in planned_runs(STUDY)]
    assert states == ["finished", "finished", "failed", "finished"]
    assert "failed    one-seed1  (exit code 2" in out.getvalue()
    assert "error: no luck" in out.getvalue()
    assert runner.failure_of(folder, failed[0]) == "exit code 2: error: no luck"
    out.seek(0)
    out.truncate()
    assert [run.label for run in go()] == ["one-seed1"]
    line, *_ = out.getvalue().splitlines()
    assert line == (
        "4 runs: 3 finished, 0 to run, 1 failed before (--retry_failed runs them again)"
    )
    train.write_text(train.read_text().replace("sys.exit(2)", "pass"))
    assert go(retry_failed=True) == []
    assert "ran" in (folder / "one-seed1" / "study.log").read_text()


DIAGNOSE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1].removeprefix("--checkpoint="))
assert sys.argv[2] == "--all" and (folder / "test.json").is_file()
pathlib.Path(sys.argv[3].removeprefix("--out=")).write_text("[]")
"""


def test_a_run_that_is_to_be_diagnosed_is_finished_after_that(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_LOOK_EVERY", 0.02)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "diagnose.py").write_text(textwrap.dedent(DIAGNOSE))
    study = Study(**{**vars(STUDY), "diagnose": ("--all",), "seeds": (0,)})
    runs, folder = planned_runs(study), tmp_path / "runs"
    out = io.StringIO()
    failed = runner.run_missing(
        runs, folder, jobs=1, train=tmp_path / "train.py", console=Console(out)
    )
    assert failed == [] and out.getvalue().count("finished  ") == 2
    workdir = folder / runs[0].label
    measured = workdir / "study_diagnosis.json"
    assert measured.read_text() == "[]"
    # What a user measured there with other flags is not the study's.
    other = workdir / "diagnosis.json"
    other.write_text('[{"step": 1}]')
    assert read_run(workdir, 0).diagnoses == []
    measured.unlink()
    assert runner.state_of(folder, runs[0]) == runner.MISSING
    assert read_run(workdir, 0).diagnoses == ()


SAVING = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "saved").touch()))
(folder / "started").touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_to_a_study_lets_its_runs_save_themselves(tmp_path, number, code):
    """By launch/study.py itself, in a copy beside another train.py."""
    shutil.copy(ROOT / "launch" / "study.py", tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVING))
    study = ROOT / "configs" / "studies" / "thinking.py"
    process = subprocess.Popen(
        [sys.executable, tmp_path / "study.py", f"--study={study}", "--jobs=1"]
        + [f"--folder={tmp_path}/runs", f"--pages={tmp_path}/pages"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (started := list(tmp_path.glob("runs/*/*/started"))):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors
    assert (started[0].parent / "saved").exists()


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


def test_a_figure_that_rounds_to_nothing_has_no_sign():
    value = statistics.Interval(-1e-4, -1e-4, 0.031, seeds=3)
    assert report._shown(value, "lost_success") == "0.0 % [0.0, 3.1]"
