"""docs/examples/from_python.py: the method called from Python does what it says."""

import runpy

import pytest
from helpers import runs

EXAMPLE = str(runs.ROOT / "docs" / "examples" / "from_python.py")


def test_the_examples_own_test_of_gae_passes():
    runpy.run_path(EXAMPLE)["check_gae"]()


@pytest.mark.slow  # Compiles rollout and update.
def test_the_example_trains_shows_an_episode_and_scores_it(monkeypatch, capsys):
    monkeypatch.chdir(runs.ROOT)
    runpy.run_path(EXAMPLE, run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("success 0.") == 2
    assert "You move on a frozen lake" in out and "<answer>" in out
    assert "<|endoftext|>" not in out  # Padding.
    assert float(out.split("largest advantage: ")[1]) > 0
