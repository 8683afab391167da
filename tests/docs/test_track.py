"""docs/examples/track.py: what it sends of a run's metrics, without any tracker."""

import runpy
import sys
import types

import pytest
from helpers import runs

from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.utils import folder_lock

EXAMPLE = runpy.run_path(str(runs.ROOT / "docs" / "examples" / "track.py"))
follow = EXAMPLE["follow"]


def write(workdir, first, *values):
    """Records of success from iteration `first` on, as a run that begins there."""
    writer = metrics.MetricsWriter(workdir, is_writer=True, first_iteration=first)
    with writer:
        for iteration, value in enumerate(values, first):
            writer.write(iteration, {"train/success": value, "update/kl": float("nan")})


def test_iterations_that_a_resumed_or_rolled_back_run_repeats_are_logged_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics.MetricsWriter, "draw", lambda writer: None)
    calls, state = [], tmp_path / "tracked.json"
    log = lambda iteration, values: calls.append((iteration, values))
    follow(tmp_path, log, state)
    assert calls == []  # Nothing was written yet, and no run trains there.
    write(tmp_path, 1, 0.1, 0.2, 0.3)
    for _ in range(2):
        follow(tmp_path, log, state)
        assert calls == [(i, {"train/success": i / 10}) for i in (1, 2, 3)]
    write(tmp_path, 2, 0.7, 0.8, 0.9)
    with metrics.MetricsWriter(tmp_path, is_writer=True, first_iteration=5) as writer:
        writer.write(4, {"test/success": 0.5})
    follow(tmp_path, log, state)
    assert calls[3:] == [(4, {"train/success": 0.9}), (4, {"test/success": 0.5})]


def test_it_looks_again_until_no_run_trains_there(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.MetricsWriter, "draw", lambda writer: None)
    held, calls = iter([True, True, False]), []
    monkeypatch.setattr(folder_lock, "is_held", lambda workdir: next(held))

    def log(iteration, values):
        calls.append(iteration)
        write(tmp_path, iteration + 1, 0.5)  # Before the next look.

    write(tmp_path, 1, 0.5)
    follow(tmp_path, log, tmp_path / "tracked.json", seconds=0.0)
    assert calls == [1, 2, 3]
    (tmp_path / metrics.FILE).write_text("no record\n")
    held = iter([False])
    with pytest.raises(UserError, match="Line 1 of"):
        follow(tmp_path, log, tmp_path / "tracked.json")


def test_a_rolled_back_runs_file_is_one_line_a_record_without_repeats(
    tmp_path, monkeypatch
):
    """So that pandas.read_json(..., lines=True) reads it, as the README says."""
    monkeypatch.setattr(metrics.MetricsWriter, "draw", lambda writer: None)
    write(tmp_path, 1, 0.1, 0.2, 0.3)
    write(tmp_path, 2, 0.7)
    assert [record["iteration"] for record in metrics.read(tmp_path)] == [1, 2]
    assert (tmp_path / metrics.FILE).read_text().count("\n") == 2


def start(monkeypatch, workdir, tracker):
    """The example with --to=trackio, which is this module, or None: not installed."""
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setattr(sys, "argv", ["x", f"--workdir={workdir}", "--to=trackio"])
    EXAMPLE["main"]()


def test_a_second_start_continues_the_trackers_run_with_what_was_not_sent(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics.MetricsWriter, "draw", lambda writer: None)
    (tmp_path / "settings.json").write_text('{"seed": 3}')
    names, calls = [], []
    tracker = types.SimpleNamespace(
        init=lambda name, **options: names.append((name, options["config"])),
        log=lambda values, step: calls.append(step),
        finish=lambda: calls.append("finish"),
    )
    for first in (1, 2):
        write(tmp_path, first, 0.5)
        start(monkeypatch, tmp_path, tracker)
    assert calls == [1, "finish", 2, "finish"]
    assert names[0] == names[1] and names[0][1] == {"seed": 3}
    assert names[0][0].startswith(f"{tmp_path.name}-")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "error: --workdir={} is of no run that has begun: "),
        (["settings.json"], ": pip install trackio\n"),
    ],
)
def test_what_cannot_be_followed_ends_in_one_sentence(
    files, message, tmp_path, monkeypatch, capsys
):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, tmp_path, None)
    assert message.format(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == files
