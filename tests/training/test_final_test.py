"""The end of a run: killed, interrupted or shortened, the same command finishes it."""

import io
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import pytest
from helpers import runs

from ragen_jax.diagnostics import episode_log
from ragen_jax.envs.base import TEST
from ragen_jax.reporting.console import Console
from ragen_jax.training import final_test, weights

pytestmark = pytest.mark.slow  # Compiles a run.


class KilledError(BaseException):
    """Stands for the end of the process: nothing in the program catches it."""


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare(iterations=2, health__record_every=1)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, runs.train(run, workdir)


def unfinished(whole, tmp_path):
    """The same run as it stood when its last iteration had been saved."""
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    (workdir / "test.json").unlink()
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert "test/success" in lines[-1]
    path.write_text("".join(lines[:-1]))
    episode_log.forget_tests(workdir, print)
    return workdir


def assert_same_end(workdir, whole, told):
    assert runs.records(workdir) == runs.records(whole[0])
    assert episode_log.read(workdir) == episode_log.read(whole[0])
    one, other = ((w / "test.json").read_text() for w in (workdir, whole[0]))
    assert one == other
    assert "gain on the same levels" in told


@pytest.mark.parametrize("moment", ["second batch", "metrics", "table", "last line"])
def test_a_run_killed_in_its_final_test_finishes_on_the_same_command(
    run, whole, tmp_path, monkeypatch, moment
):
    workdir = unfinished(whole, tmp_path)
    batches = []

    def die(*given, **named):
        raise KilledError

    def watch(*given):
        record = recorder(*given)

        def on_batch(*seen):
            record(*seen)
            batches.append(seen)
            if len(batches) == 2:
                die()

        return on_batch

    recorder = final_test.monitor_lib.recorder
    with monkeypatch.context() as patch:
        if moment == "second batch":
            patch.setattr(final_test.monitor_lib, "recorder", watch)
        elif moment == "metrics":
            patch.setattr(final_test.metrics.MetricsWriter, "write", die)
        elif moment == "table":
            patch.setattr(final_test.atomic_files, "write_text", die)
        else:
            patch.setattr(final_test.messages, "finished", die)
        with pytest.raises(KilledError):
            runs.train(run, workdir)
    assert_same_end(workdir, whole, runs.train(run, workdir))


def test_a_run_resumed_with_fewer_iterations_than_are_done_says_so_and_finishes(
    run, whole, tmp_path
):
    workdir = unfinished(whole, tmp_path)
    told = runs.train(runs.replace_settings(run, iterations=1), workdir)
    assert "2 iterations are done already, more than iterations = 1: nothing" in told
    assert_same_end(workdir, whole, told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_final_test_ends_it_and_the_same_command_plays_it_again(
    run, whole, tmp_path, monkeypatch, number
):
    workdir = unfinished(whole, tmp_path)

    def watch(*given):
        return lambda *seen: os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(final_test.monitor_lib, "recorder", watch)
        told = runs.train(run, workdir)
    assert told.endswith(
        "saved after iteration 2; the same command continues from there:\n"
        f"  {runs.COMMAND}\n"
    )
    assert "gain on the same levels" not in told
    assert not (workdir / "test.json").exists()
    assert_same_end(workdir, whole, runs.train(run, workdir))


def test_a_test_that_is_played_in_another_way_is_written_beside_the_first(
    run, whole, tmp_path
):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    more = dict(iterations=2, health__record_every=1, evaluation__test_prompts=16)
    runs.train(runs.replace_settings(run, **more), workdir)
    record = json.loads((workdir / "test.json").read_text())
    first, second = runs.records(workdir)[-2:]
    assert first == runs.records(whole[0])[-1]
    assert second["test/success"] == record["after"]["success"]
    assert len(record["after_by_level"]) == 16


def test_what_only_trains_is_freed_so_that_both_policies_fit(run):
    """With adapters the base model is not read again beside the one in memory."""
    state = weights.new_state(run)
    base = weights.load_parameters(run.model)
    sizes = dict(evaluation__test_prompts=7, evaluation__test_rollouts=3)
    run = runs.replace_settings(run, **sizes)
    played, plays = [], []

    def play(_, evaluators, *, actor, on_batch, **how):
        assert {each.rollouts for each in evaluators.values()} == {3}
        leaves = (state.critic, state.actor_optimizer, state.critic_optimizer)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(leaves) if leaf.ndim)
        played.append(actor)
        plays.append(how)
        return actor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final_test.validation, "evaluate", play)
        patch.setattr(final_test.weights, "load_parameters", None)
        console = Console(io.StringIO())
        nothing = lambda: None
        before, after = final_test._play(
            run, state, base, Path("none"), console, nothing
        )
    assert played == [base, state.actor]
    assert before is played[0] and after is played[1]
    assert plays == [dict(split=TEST, prompts=7)] * 2
    assert int(state.iteration) == 0


def test_the_tables_numbers_are_those_of_the_metrics(whole):
    record = json.loads((whole[0] / "test.json").read_text())
    last = runs.records(whole[0])[-1]
    assert record["after"].keys() > {"success", "return", "reply_tokens"}
    for name, value in record["after"].items():
        assert last[f"test/{name}"] == value, name
    for when in ("before", "after"):
        by_level = record[f"{when}_by_level"]
        assert len(by_level) == runs.SMALL["evaluation.test_prompts"]
        assert sum(by_level) / len(by_level) == pytest.approx(record[when]["success"])
    gain = record["after"]["success"] - record["before"]["success"]
    assert record["gain"] == pytest.approx(gain)
