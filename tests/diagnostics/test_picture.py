"""The picture of a run's signs with the alarm's marks."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from ragen_jax.diagnostics import picture
from ragen_jax.errors import UserError

DECLINE = Path(__file__).parent / "decline_bandit.jsonl"


def test_the_picture_of_a_decline_is_drawn_and_the_alarm_repeated(tmp_path, capsys):
    """Without the line that a kill cut off."""
    record, path = tmp_path / "metrics.jsonl", tmp_path / "decline.png"
    record.write_text(DECLINE.read_text() + '{"iteration": 9999, "train/succ')
    picture.main([str(record), str(path)])
    assert path.stat().st_size > 10_000
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "iterations 123 to 124: watch at iteration 123: train/suc"
    )
    assert "collapse at iteration 125: train/success fell, and" in said[1]


def test_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"path of a run's metrics\.jsonl"):
        picture.main([str(tmp_path / "none.jsonl"), "x.png"])


@pytest.mark.parametrize("name", ["no folder/x.png", "x.txt"])
def test_a_picture_that_cannot_be_is_refused_in_a_sentence(tmp_path, name):
    with pytest.raises(
        UserError, match="a picture cannot be written to .*: name a file"
    ):
        picture.main([str(DECLINE), str(tmp_path / name)])


def test_a_file_of_no_records_is_refused_and_an_old_picture_stays(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"train/succ\n')
    (tmp_path / "old.png").write_text("old")
    with pytest.raises(UserError, match="Line 1 of .*metrics.jsonl is not a record"):
        picture.main([str(tmp_path / "metrics.jsonl"), str(tmp_path / "old.png")])
    assert (tmp_path / "old.png").read_text() == "old"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"iteration": 4, "test/success": 0.5}\n', "holds no training iteration"),
        ('{"train/succ', "holds no training iteration"),
        ("3\n", "Line 1 of .*metrics.jsonl is not a record of numbers"),
        ('{"train/success": 0.5}\n', "Line 1 of .*metrics.jsonl is not a record"),
    ],
)
def test_nothing_to_watch_is_not_a_silent_alarm(tmp_path, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        picture.main([str(tmp_path / "metrics.jsonl"), str(tmp_path / "x.png")])


def test_a_picture_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(self, file, **options):
        (file if hasattr(file, "write") else open(file, "wb")).write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    (tmp_path / "old.png").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        picture.main([str(DECLINE), str(tmp_path / "old.png")])
    assert (tmp_path / "old.png").read_text() == "old"


@pytest.mark.slow
def test_the_command_prints_nothing_but_what_the_alarm_said(tmp_path):
    module = "ragen_jax.diagnostics.picture"
    command = [sys.executable, "-m", module, str(DECLINE), str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_panel_of_the_picture_draws_its_own_metric(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(picture.plt, "close", figures.append)
    records = [
        {"iteration": i} | {name: 10 * n + i for n, name in enumerate(picture.PANELS)}
        for i in (1, 2)
    ]
    picture.draw(records, tmp_path / "x.png")
    (figure,) = figures
    drawn = [axis.lines[0].get_ydata().tolist() for axis in figure.axes]
    assert drawn == [[10 * n + 1, 10 * n + 2] for n in range(len(picture.PANELS))]
    assert [axis.get_title() for axis in figure.axes] == list(picture.PANELS.values())
