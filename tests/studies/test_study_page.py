"""A study's page and figure."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from helpers.study_records import STUDY, record

from ragen_jax.diagnostics import rollbacks
from ragen_jax.studies import archive, figure, measures, report, statistics, verdicts
from ragen_jax.studies.definition import Claim, planned_runs
from ragen_jax.studies.run_record import read_run


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
    assert "Holm" not in text  # which one claim does not need
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


def test_a_page_names_the_arms_whose_runs_lack_a_curve(tmp_path):
    curves = dict(curves=("validation/success", "update/ratio_max"))
    study = dataclasses.replace(STUDY, **curves)
    runs = {
        "one": [record(s, [1.0], success=(0.3, 0.8)) for s in (0, 1)],
        "other, too": [
            record(0, [1.0], success=(0.3,), **{"update/ratio_max": (1.0,)}),
            record(1, [1.0], success=(0.3,)),
        ],
    }
    page = report.write(study, runs, {}, tmp_path, command="x", scale="tiny")
    assert (
        "Runs that lack a curve:\n\n"
        "* without a `update/ratio_max`: one (2 of 2), other, too (1 of 2)\n\n"
    ) in page.read_text()


def test_an_alarm_whose_iterations_were_gone_back_over_is_counted(tmp_path):
    quiet = record(0, np.ones(3), **{"health/level": [0.0] * 5})
    (tmp_path / "test.json").write_text(json.dumps(quiet.test))
    lines = [json.dumps(line) + "\n" for line in quiet.records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    rollbacks.note_rollback(tmp_path, 11, 0, "a collapse", "learning_rate")
    rollbacks.note_rollback(tmp_path, 4, 0, "another", "learning_rate")
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
        # The interval by t ends at the margin: p = 0.05. Otherwise, with s its half
        # over 4.3027, p = 1 - t / sqrt(t ** 2 + 2) of t = (0.3 - margin) / s.
        ("last_success", None, 0.1, "claimed greater than 10 %, p = 0.05"),
        ("lost_success", None, 0.1, "claimed greater than 10 points, p = 0.05"),
        ("test_success", "other", -0.05, "claimed greater than -5 points, p = 0.017"),
        ("test_success", None, 0.0, "claimed greater than 0, p = 0.023"),
        ("last_entropy", None, 0.1, "claimed greater than 0.1, p = 0.05"),
        ("last_entropy", None, -9.0, "claimed greater than -9, p < 0.001"),
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
    some = dataclasses.replace(quantity, left_out=2)
    sentence = report._sentence(verdicts.Verdict(claim, some, verdicts.HOLDS))
    assert f"{limits} (3 of 5 seeds)" in sentence
    equal = dataclasses.replace(quantity, t_low=math.nan, t_high=math.nan)
    sentence = report._sentence(verdicts.Verdict(claim, equal, verdicts.HOLDS))
    assert sentence.endswith(said.split(", p")[0])


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
    uneven = [*shares, "FrozenLake, PPO, 25 %", "FrozenLake, one"]  # by the first comma
    assert figure.rows_of(uneven) == {"Bandit": shares, "FrozenLake": uneven[6:]}
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
        for name, scale in (("A", 0.5), ("B", 2.0))
        for number in range(3)
    }
    # Of C one arm has been trained so far, of D none.
    runs["C, 1"] = [record(0, [1], **{curves[0]: [0.1, 0.6], curves[1]: [1, 2]})]
    planned = [*list(runs)[:-1], "C, 0", "C, 1", "D, 0", "D, 1"]
    arms = {name: {"seed": number} for number, name in enumerate(planned)}
    chosen = dataclasses.replace(STUDY, curves=curves, arms=arms)
    assert figure.draw(chosen, runs | {"C, 0": []}, tmp_path / "figure.png")
    (whole,) = drawn
    axes = whole.axes
    titles = [axis.get_title() for axis in axes]
    assert titles == [f"{row}: {name}" for row in "ABC" for name in curves]
    assert axes[0].get_ylim() == axes[2].get_ylim() and axes[0].get_ylim()[1] > 2
    assert [line.get_ydata()[-1] for line in axes[2].lines[1::2]] == [2.0] * 3
    words = [text.get_text() for text in axes[3].get_legend().get_texts()]
    assert words == ["B, 0", "B, 1", "B, 2"]
    # The arm of C that is there has the colour of its counterparts "A, 1" and "B, 1".
    colors = [line.get_color() for line in axes[0].lines[1::2]]
    assert len(set(colors)) == 3
    assert axes[4].lines[1].get_color() == axes[2].lines[3].get_color() == colors[1]


def test_a_row_is_not_flattened_by_values_ten_times_as_high(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figure.plt, "close", drawn.append)
    curves = ("train/success", "filter/reward_std")
    runs = {
        f"{name}, {number}": [
            record(0, [1], **{curves[0]: [0.2, 0.6], curves[1]: [scale, 1.1 * scale]})
        ]
        for name, scale in (("A", 0.3), ("B", 3.0))
        for number in range(3)
    }
    arms = {name: {"seed": number} for number, name in enumerate(runs)}
    chosen = dataclasses.replace(STUDY, curves=curves, arms=arms)
    assert figure.draw(chosen, runs, tmp_path / "figure.png")
    success, spread, other_success, other_spread = drawn[0].axes
    assert success.get_ylim() == other_success.get_ylim()
    assert spread.get_ylim()[1] < 0.4 and other_spread.get_ylim()[1] > 3.3
    assert spread.get_xlim() == other_spread.get_xlim()


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
    def links(*measures):
        runs = {"one": [record(0, [1])], "other, too": []}
        study = dataclasses.replace(STUDY, measures=("test_success", *measures))
        page = report.write(study, runs, {}, tmp_path, command="x", scale="tiny")
        return re.findall(r"\]\((.*?)\)", page.read_text())

    found = links("std_lead")
    assert found and all((tmp_path / link).is_file() for link in found)
    for name in ("README.md", "across.md"):
        (tmp_path / name).write_text("how claims are judged, and how often a sign errs")
    assert {"README.md", "across.md"} <= set(links("std_lead"))
    assert "across.md" not in links()  # of signs alone


@pytest.mark.parametrize(
    ("margin", "said"),
    [
        # Three times p of t = (0.65 - margin) / 0.0577: 0.027, 0.079 and 1.
        (0.05, "3 hold or do not hold, of which {holm} over this page leaves 3."),
        (0.3, "3 hold or do not hold, of which {holm} over this page leaves 0."),
        (0.6, "none holds or does not hold, even without {holm}."),
    ],
)
def test_a_page_says_what_is_left_of_several_claims(margin, said, tmp_path):
    claims = tuple(Claim(text, "one", margin=margin) for text in ("a", "b", "c"))
    study = dataclasses.replace(STUDY, claims=claims)
    successes = np.arange(20) < np.array([[11], [13], [15]])
    ran = [record(seed, row) for seed, row in enumerate(successes)]
    runs = {"one": ran, "other, too": []}
    page = report.write(study, runs, {}, tmp_path, command="x", scale="tiny")
    said = said.format(holm="Holm's correction")
    assert f"Of 3 claims with a t interval, {said}" in page.read_text()


def test_a_figure_that_rounds_to_nothing_has_no_sign():
    value = statistics.Interval(-1e-4, -1e-4, 0.031, seeds=3)
    assert report._shown(value, "lost_success") == "0.0 points [0.0, 3.1]"
    assert report._shown(value, "last_success") == "0.0 % [0.0, 3.1]"
