"""The picture of a run's signs with the alarm's marks."""

from pathlib import Path

import pytest

from ragen_jax.diagnostics import picture
from ragen_jax.errors import UserError

DECLINE = Path(__file__).parent / "decline_bandit.jsonl"


def test_the_picture_of_a_decline_is_drawn_and_the_alarm_repeated(tmp_path, capsys):
    path = tmp_path / "decline.png"
    picture.main([str(DECLINE), str(path)])
    assert path.stat().st_size > 10_000
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "iterations 123 to 124: watch at iteration 123: train/suc"
    )
    assert "collapse at iteration 125: train/success fell after" in said[1]


def test_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"path of a run's metrics\.jsonl"):
        picture.main([str(tmp_path / "none.jsonl"), "x.png"])
