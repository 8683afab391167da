"""A run that is ended by force or by a signal continues as if nothing had happened."""

import signal

import pytest
from helpers import runs

pytestmark = pytest.mark.slow  # Several processes, each of which compiles a run.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed, and what it printed."""
    workdir = tmp_path_factory.mktemp("whole")
    code, output, errors = runs.finish(runs.start(runs.arguments(workdir)))
    assert (code, errors) == (0, "")
    return workdir, output


@pytest.fixture(scope="module")
def killed(tmp_path_factory, whole):
    """The same run, killed while it wrote a checkpoint and again between iterations."""
    workdir = tmp_path_factory.mktemp("killed")
    folder = workdir / "checkpoints"
    metrics = workdir / "metrics.jsonl"

    def is_writing() -> bool:
        return any(folder.glob("2.orbax-checkpoint-tmp*")) or (folder / "2").exists()

    def has_third() -> bool:
        return metrics.exists() and '"iteration": 3,' in metrics.read_text()

    for moment in (is_writing, has_third):
        process = runs.start(runs.arguments(workdir))
        runs.wait_until(moment, process)
        process.send_signal(signal.SIGKILL)
        code, _, _ = runs.finish(process)
        assert code == -signal.SIGKILL
        # As a kill in the midst of a line leaves it.
        with metrics.open("a") as file:
            file.write('{"iteration": 4, "train/succ')
    code, output, errors = runs.finish(runs.start(runs.arguments(workdir)))
    assert (code, errors) == (0, "")
    return workdir, output


def test_a_killed_run_ends_in_the_same_bits(whole, killed):
    assert runs.steps(whole[0]) == runs.steps(killed[0]) == [1, 2, 3, 4]
    for step in (2, 3, 4):
        one, other = (runs.leaves(run[0], step) for run in (whole, killed))
        runs.assert_same_leaves(one, other)
    moved = runs.leaves(whole[0], 1)
    assert any((moved[n] != one[n]).any() for n in one if n.startswith("actor."))


def test_a_killed_run_has_each_iteration_once_with_the_same_numbers(whole, killed):
    records = runs.records(killed[0])
    assert [r["iteration"] for r in records] == [1, 2, 3, 4, 4]  # The last is the test.
    assert records == runs.records(whole[0])


def test_a_resumed_run_says_from_where_and_leaves_no_scraps(killed):
    workdir, output = killed
    assert "resuming after iteration" in output
    assert sorted(path.name for path in workdir.iterdir()) == [
        "checkpoints",
        "curves.png",
        "episodes.jsonl.gz",
        "metrics.jsonl",
        "settings.json",
        "tensorboard",
        "test.json",
    ]
    folders = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    assert folders == ["1", "2", "3", "4"]


def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    arguments = runs.arguments(tmp_path, iterations=500, every__checkpoint=0)
    process = runs.start(arguments)
    metrics = tmp_path / "metrics.jsonl"
    runs.wait_until(lambda: metrics.exists() and metrics.read_text() != "", process)
    process.send_signal(signal.SIGTERM)
    code, output, errors = runs.finish(process)
    assert (code, errors) == (0, "")
    (step,) = runs.steps(tmp_path)
    assert runs.records(tmp_path)[-1]["iteration"] == step < 500
    *_, printed, command = output.strip().splitlines()
    assert (
        printed
        == f"saved after iteration {step}; the same command continues from there:"
    )
    assert command.strip().startswith("python ")
    assert command.endswith(" ".join(arguments))


@pytest.mark.parametrize("sends", ["SIGINT", None])
def test_a_run_whose_output_nobody_reads_any_more_is_saved(tmp_path, sends):
    # As in `train.py | tee log`, where Ctrl-C ends both, and in `train.py | head`.
    arguments = runs.arguments(tmp_path, iterations=500, every__checkpoint=0)
    process = runs.start(arguments)
    while "  1/500  " not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    if sends:
        process.send_signal(signal.Signals[sends])
    assert process.wait(timeout=300) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()
    (step,) = runs.steps(tmp_path)
    assert runs.records(tmp_path)[-1]["iteration"] == step < 500
