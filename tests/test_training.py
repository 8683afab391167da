"""Whole runs within one process: signals, more iterations, and runs that stop."""

import json
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import runs

from ragen_jax import metrics, training, weights
from ragen_jax.checkpoints import Checkpoints
from ragen_jax.settings import UserError


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A run of four iterations that nobody disturbed, and what it told."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, runs.train(run, workdir)


def test_ctrl_c_saves_and_the_rest_equals_a_whole_run(run, whole, tmp_path):
    written = tmp_path / metrics.FILE

    def interrupt():
        while not (written.exists() and written.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    told = runs.train(run, tmp_path)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    step = runs.steps(tmp_path)[-1]
    assert step < 4
    assert "stopping after this iteration, with a saved state ...\n" in told
    assert told.endswith(
        f"saved after iteration {step}; the same command goes on from there:\n"
        f"  {runs.COMMAND}\n"
    )
    told = runs.train(run, tmp_path)
    assert f"resuming after iteration {step}\n" in told
    runs.assert_same_leaves(runs.leaves(tmp_path, 4), runs.leaves(whole[0], 4))
    assert runs.records(tmp_path) == runs.records(whole[0])


def test_a_finished_run_goes_on_when_it_is_given_more_iterations(run, whole, tmp_path):
    runs.train(runs.replace_settings(run, iterations=2), tmp_path)
    assert runs.steps(tmp_path) == [1, 2]
    assert "resuming after iteration 2\n" in runs.train(run, tmp_path)
    runs.assert_same_leaves(runs.leaves(tmp_path, 4), runs.leaves(whole[0], 4))
    assert [r for r in runs.records(tmp_path) if "train/success" in r] == [
        r for r in runs.records(whole[0]) if "train/success" in r
    ]


def test_a_finished_run_only_tells_its_result_again(run, whole):
    workdir, told = whole
    before = metrics.read(workdir), runs.leaves(workdir, 4)
    result = json.loads((workdir / "test.json").read_text())
    again = runs.train(run, workdir)
    assert again.splitlines()[-14:] == told.splitlines()[-14:]
    assert "before and after training" in "".join(again.splitlines()[-14:])
    assert metrics.read(workdir) == before[0]
    runs.assert_same_leaves(runs.leaves(workdir, 4), before[1])
    assert json.loads((workdir / "test.json").read_text()) == result


def test_the_settings_of_a_run_lie_beside_it(run, whole):
    saved = json.loads((whole[0] / "settings.json").read_text())
    assert saved["rollout"]["prompts"] == 2
    training.check_workdir(whole[0], run.settings)
    longer = runs.settings(iterations=9, safety__max_bad_updates=1)
    training.check_workdir(whole[0], longer)
    with pytest.raises(UserError, match="seed was 0 and is 7"):
        training.check_workdir(whole[0], runs.settings(seed=7))


def test_gradients_that_are_not_finite_are_skipped_counted_and_end_the_run(
    run, tmp_path
):
    state = weights.new_state(run)
    broken = state.actor["final_norm"].at[0].set(jnp.nan)
    state = state.replace(actor={**state.actor, "final_norm": broken})
    with Checkpoints(tmp_path / "checkpoints", keep_last=9, keep_best=0) as writer:
        writer.save(0, state, {"validation": None}, score=None)
    with pytest.raises(UserError) as caught:
        runs.train(
            runs.replace_settings(run, safety__max_bad_updates=2, iterations=9),
            tmp_path,
        )
    assert str(caught.value) == (
        "gradients were not finite in 2 iterations running (safety.max_bad_updates ="
        " 2); the state was saved: start in another --workdir with a lower"
        " optimizer.actor_lr, or delete the last of this one's checkpoints to go on"
        " from an earlier one"
    )
    records = runs.records(tmp_path)
    assert [r["iteration"] for r in records] == [1, 2]
    assert [r["update/skipped_nonfinite"] for r in records] == [1, 2]
    assert [r["update/count"] for r in records] == [0, 0]
    assert records[0]["update/actor_grad_norm"] is None  # JSON has no NaN.
    first, last = runs.leaves(tmp_path, 0), runs.leaves(tmp_path, 2)
    counts = ("iteration", "bad_in_row", "skipped_bad")
    assert [int(last.pop(name)) for name in counts] == [2, 2, 2]
    assert [int(first.pop(name)) for name in counts] == [0, 0, 0]
    runs.assert_same_leaves(first, last)


def test_a_gap_between_sampler_and_update_ends_the_run_saved_and_it_can_go_on(
    run, whole, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(training, "_STALLED_AT_FIRST", 0.01)
    strict = runs.replace_settings(run, loss__logprob_gap_limit=1e-9)
    with pytest.raises(UserError) as caught:
        runs.train(strict, tmp_path)
    gap = runs.records(tmp_path)[0]["update/logprob_gap"]
    assert f"sampler and update disagree by {gap:.3g} nats a token" in str(caught.value)
    assert "loss.logprob_gap_limit = 1e-09; the state was saved" in str(caught.value)
    runs.assert_same_leaves(runs.leaves(tmp_path, 1), runs.leaves(whole[0], 1))
    # Its only iteration took longer than was allowed before the stacks are shown.
    stacks = capfd.readouterr().err
    assert "not ended in 0.01 s" in stacks and "in iterate" in stacks
    training.check_workdir(tmp_path, run.settings)
    shorter = runs.replace_settings(run, iterations=2)
    assert "resuming after iteration 1\n" in runs.train(shorter, tmp_path)
    runs.assert_same_leaves(runs.leaves(tmp_path, 2), runs.leaves(whole[0], 2))


def test_an_iteration_counts_as_stalled_after_ten_times_the_longest():
    assert training.stalled_after([]) == 3600
    assert training.stalled_after([200.0]) == 2000
    assert training.stalled_after([500.0, 3.0]) == 600
    assert training.stalled_after([500.0, 90.0, 3.0]) == 900


def test_runs_in_which_nothing_is_kept_end_only_if_that_is_asked_for(run):
    state = weights.new_state(run).replace(empty_in_row=jnp.int32(3))
    values = {"update/logprob_gap": 0.0}
    assert training.problem(run.settings, state, values) == ""
    limited = runs.settings(safety__max_empty_updates=3)
    assert training.problem(limited, state, values).startswith(
        "no group was kept in 3 iterations running (safety.max_empty_updates = 3)"
    )
    state = state.replace(empty_in_row=jnp.int32(2))
    assert training.problem(limited, state, values) == ""


def test_a_second_ctrl_c_ends_the_run_at_once():
    told = []
    with training.Signals(told.append) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.should_stop(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            jax.block_until_ready(jnp.zeros(1))
    assert told == ["stopping after this iteration, with a saved state ..."]
