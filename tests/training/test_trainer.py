"""Whole runs within one process: signals, more iterations, and runs that stop."""

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import runs

from ragen_jax.diagnostics import rollbacks as rollbacks_lib
from ragen_jax.errors import UserError
from ragen_jax.parallel import heartbeat
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.training import (
    checkpoints,
    final_test,
    interrupts,
    loop,
    messages,
    resumed,
    safety,
    trainer,
    weights,
)
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.workdir import check_workdir, claim_workdir
from ragen_jax.utils import awake

# Waits as a device does for others in a collective.
STANDS_STILL = """
import threading
from ragen_jax.training.interrupts import StallWatchdog

def wait_for_the_others():
    threading.Event().wait()

with StallWatchdog(ends=True) as watchdog:
    watchdog.expect_within(0.2)
    wait_for_the_others()
"""


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A run of four iterations that nobody disturbed, and what it printed."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, runs.train(run, workdir)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_rest_equals_a_whole_run(run, whole, tmp_path):
    written = tmp_path / metrics.FILE

    def interrupt():
        while not (written.exists() and written.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    printed = runs.train(run, tmp_path)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    step = runs.steps(tmp_path)[-1]
    assert step < 4
    assert "stopping after this iteration, with a saved state ...\n" in printed
    assert printed.endswith(
        f"saved after iteration {step}; the same command continues from there:\n"
        f"  {runs.COMMAND}\n"
    )
    printed = runs.train(run, tmp_path)
    assert f"resuming after iteration {step}\n" in printed
    runs.assert_same_leaves(runs.leaves(tmp_path, 4), runs.leaves(whole[0], 4))
    assert runs.records(tmp_path) == runs.records(whole[0])


@pytest.mark.slow
def test_a_finished_run_continues_when_it_is_given_more_iterations(
    run, whole, tmp_path
):
    runs.train(runs.replace_settings(run, iterations=2), tmp_path)
    assert runs.steps(tmp_path) == [1, 2]
    assert "resuming after iteration 2\n" in runs.train(run, tmp_path)
    runs.assert_same_leaves(runs.leaves(tmp_path, 4), runs.leaves(whole[0], 4))
    assert [r for r in runs.records(tmp_path) if "train/success" in r] == [
        r for r in runs.records(whole[0]) if "train/success" in r
    ]


@pytest.mark.slow
def test_a_finished_run_only_prints_its_result_again(run, whole):
    workdir, printed = whole
    before = metrics.read(workdir), runs.leaves(workdir, 4)
    result = json.loads((workdir / "test.json").read_text())
    again = runs.train(run, workdir)
    assert again.splitlines()[-14:] == printed.splitlines()[-14:]
    assert "before and after training" in "".join(again.splitlines()[-14:])
    assert metrics.read(workdir) == before[0]
    runs.assert_same_leaves(runs.leaves(workdir, 4), before[1])
    assert json.loads((workdir / "test.json").read_text()) == result


@pytest.mark.slow
def test_the_settings_of_a_run_lie_beside_it(run, whole):
    saved = json.loads((whole[0] / "settings.json").read_text())
    assert saved["rollout"]["prompts"] == 2
    info = checkpoints.read_info(whole[0] / checkpoints.FOLDER, 4)
    assert info["dtype"] == "float32" and info["settings"] == saved
    check_workdir(whole[0], run.settings)
    longer = runs.settings(iterations=9, safety__max_bad_updates=1)
    check_workdir(whole[0], longer)
    with pytest.raises(UserError, match="seed was 0 and is 7"):
        check_workdir(whole[0], runs.settings(seed=7))


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_skipped_counted_and_end_the_run(
    run, tmp_path
):
    state = weights.new_state(run)
    broken = state.actor["final_norm"].at[0].set(jnp.nan)
    state = state.replace(actor={**state.actor, "final_norm": broken})
    with Checkpoints(tmp_path / "checkpoints", keep_last=9, keep_best=0) as writer:
        writer.save(0, state, {"validation": None}, score=None)
    claim_workdir(tmp_path, run.settings)
    with pytest.raises(UserError) as caught:
        runs.train(
            runs.replace_settings(run, safety__max_bad_updates=2, iterations=9),
            tmp_path,
        )
    assert str(caught.value) == (
        "gradients were not finite in 2 iterations in a row (safety.max_bad_updates ="
        " 2); the state was saved: start in another --workdir with a lower"
        " optimizer.actor_lr, or raise the limit and start the same command again"
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


@pytest.mark.slow
def test_a_gap_between_sampler_and_update_ends_the_run_saved_and_it_can_be_resumed(
    run, whole, tmp_path, monkeypatch, capfd
):
    # The stacks show 100 calls of each thread at most, and JAX may be in deeper ones.
    iterate = loop.starpo.iterate

    def stand_still_and_iterate(*given):
        time.sleep(1)
        return iterate(*given)

    monkeypatch.setattr(loop.starpo, "iterate", stand_still_and_iterate)
    monkeypatch.setattr(interrupts, "STALLED_AT_FIRST", 0.1)
    strict = runs.replace_settings(run, loss__logprob_gap_limit=1e-9)
    with pytest.raises(UserError) as caught:
        runs.train(strict, tmp_path)
    gap = runs.records(tmp_path)[0]["update/logprob_gap"]
    assert f"disagree by {gap:.3g} nats a token in an iteration" in str(caught.value)
    assert "10 times loss.logprob_gap_limit = 1e-09; the state" in str(caught.value)
    runs.assert_same_leaves(runs.leaves(tmp_path, 1), runs.leaves(whole[0], 1))
    # Its only iteration took longer than was allowed before the stacks are shown.
    stacks = capfd.readouterr().err
    assert "not ended in 0.1 s" in stacks and "in stand_still_and_iterate" in stacks
    check_workdir(tmp_path, run.settings)
    shorter = runs.replace_settings(run, iterations=2)
    assert "resuming after iteration 1\n" in runs.train(shorter, tmp_path)
    runs.assert_same_leaves(runs.leaves(tmp_path, 2), runs.leaves(whole[0], 2))


def test_an_iteration_counts_as_stalled_after_ten_times_the_longest():
    assert interrupts.stalled_after([]) == 3600
    assert interrupts.stalled_after([200.0]) == 2000
    assert interrupts.stalled_after([500.0, 3.0]) == 600
    assert interrupts.stalled_after([500.0, 90.0, 3.0]) == 900


def test_a_process_that_stands_still_shows_its_stacks_and_ends_for_another_try():
    ended = subprocess.run(
        [sys.executable, "-c", STANDS_STILL], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == heartbeat.EXIT_CODE
    assert "in wait_for_the_others" in ended.stderr
    assert ended.stderr.endswith(
        "\nerror: an iteration has not ended in 0.2 s (safety.end_stalled): the same"
        " command resumes from the last checkpoint\n"
    )


def test_a_resumed_run_knows_that_its_best_success_was_none_at_all(tmp_path):
    with Checkpoints(tmp_path, keep_last=9, keep_best=1) as saved:
        assert resumed.best_score(saved) == -1
        saved.save(1, {"x": jnp.zeros(1)}, {"validation": None}, score=None)
        assert resumed.best_score(saved) == -1
        saved.save(2, {"x": jnp.zeros(1)}, {"validation": 0.0}, score=0.0)
        assert resumed.best_score(saved) == 0


@pytest.mark.parametrize(("every", "due"), [(20, 20), (0, 1)])
def test_a_run_keeps_the_last_of_the_checkpoints_that_are_due(
    run, tmp_path, monkeypatch, every, due
):
    class OpenedError(Exception):
        """Ends the run where it opens its checkpoints."""

    def opened(_, **given):
        raise OpenedError(given)

    monkeypatch.setattr(trainer, "Checkpoints", opened)
    with pytest.raises(OpenedError) as error:
        runs.train(runs.replace_settings(run, every__checkpoint=every), tmp_path)
    assert error.value.args[0] == dict(keep_last=99, keep_best=1, every=due)


def test_the_start_and_each_batch_of_the_final_test_have_a_time_of_their_own(
    run, tmp_path, monkeypatch
):
    def look(*_) -> list[awake.Timer]:
        """Notes what the clocks that tick are set to."""
        threads = threading.enumerate()
        timers = [one for one in threads if isinstance(one, awake.Timer)]
        ticking = [timer for timer in timers if not timer.finished.is_set()]
        seen.extend(timer.args for timer in ticking)
        return ticking

    def start(*_):
        look()
        return weights.new_state(run)

    def compile_run(*_):
        look()
        return SimpleNamespace(base={})

    def iterate(run, prepared, state, outputs):
        assert outputs.watchdog.ends
        outputs.watchdog.expect_within(900)
        return state, True

    def play(*given):
        (first,) = look()
        given[-1]()
        assert look() != [first]  # The next batch has a clock of its own.
        return {}, {}

    seen: list[list] = []
    monkeypatch.setattr(trainer, "_start", start)
    monkeypatch.setattr(trainer.programs_lib, "compile_run", compile_run)
    monkeypatch.setattr(loop, "train_to_end", iterate)
    monkeypatch.setattr(final_test, "_play", play)
    monkeypatch.setattr(final_test, "_write", look)
    monkeypatch.setattr(final_test, "_nothing_learned", lambda *_: "")
    runs.train(runs.replace_settings(run, safety__end_stalled=True), tmp_path)
    batch = [3600, "a batch of the final test"]
    assert seen == [[3600, "the start"], [3600, "compiling"], batch, batch]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        (dict(filter__strategy="none"), "every group,"),
        (dict(filter__strategy="top_count", filter__count=1), "top_count 1 of the"),
        (
            dict(filter__strategy="within_group", filter__fraction=0.5),
            "within_group 0.5 of each group by return_std,",
        ),
        (
            dict(filter__strategy="percentile_range", filter__high=0.5),
            "percentile_range ranks 0 to 0.5 of the prompts by return_std,",
        ),
    ],
)
def test_the_banner_says_what_the_filter_keeps(run, tmp_path, changes, kept):
    banner = messages.banner(runs.replace_settings(run, **changes), tmp_path)
    assert f"starpo with ppo: keeps {kept}" in banner


def test_the_banner_names_what_is_paid_beside_the_environments_reward(run, tmp_path):
    changes = dict(reward__grounding=0.5, reward__hook="mine.py")
    banner = messages.banner(runs.replace_settings(run, **changes), tmp_path)
    paid = "the environment's, reward.grounding = 0.5 and reward.hook = mine.py"
    assert paid in " ".join(banner.split())
    assert "reward.grounding" not in messages.banner(run, tmp_path)


def test_runs_in_which_nothing_is_kept_end_only_if_that_is_asked_for(run):
    state = weights.new_state(run).replace(empty_in_row=jnp.int32(3))
    gaps = [0.0]
    assert safety.problem(run.settings, state, gaps, 0.0) == ""
    limited = runs.settings(safety__max_empty_updates=3)
    assert safety.problem(limited, state, gaps, 0.0).startswith(
        "no group was kept in 3 iterations in a row (safety.max_empty_updates = 3), for"
        " all episodes of each group earned the same;"
    )
    state = state.replace(empty_in_row=jnp.int32(2))
    assert safety.problem(limited, state, gaps, 0.0) == ""


def test_equal_returns_are_the_cause_of_an_empty_batch_only_where_they_are_equal(run):
    limited = runs.settings(safety__max_empty_updates=3, filter__zero=100)
    state = weights.new_state(run).replace(empty_in_row=jnp.int32(3))
    said = safety.problem(limited, state, [], 0.354)
    assert "earned the same" not in said
    assert "'return_std', filter.zero = 100 and filter.margin = 0.01 leave none" in said
    assert "standard deviation of 0.354" in said


@pytest.mark.parametrize("spread", [0.0, 0.354])
@pytest.mark.parametrize("strategy", ["top_p", "min_p"])
def test_negative_returns_are_the_cause_where_a_filter_ranks_by_them(
    run, strategy, spread
):
    chosen = runs.settings(filter__strategy=strategy, filter__metric="return_mean")
    cause = safety.why_nothing_is_kept(chosen, spread)
    named = f"filter.strategy = {strategy!r}", "'return_mean' is negative"
    assert all(part in cause for part in named)
    assert "differ" not in cause and "earned the same" not in cause
    assert "filter.margin" in cause or strategy == "min_p"
    counts = dict(iteration=jnp.int32(4), skipped_empty=jnp.int32(4))
    empty = weights.new_state(run).replace(**counts)
    said = safety.nothing_learned(chosen, empty, spread)
    assert said.endswith("begin with other values of those in another --workdir")


@pytest.mark.parametrize(
    ("changes", "spread"),
    [
        ({}, 0.0),
        (dict(filter__zero=100), 0.354),
        (dict(filter__strategy="top_p", filter__metric="return_mean"), 0.354),
    ],
)
def test_the_cause_of_an_empty_batch_says_which_rewards_do_not_count(changes, spread):
    thinking = dict(env__thinking=True)
    paid = (
        dict(
            reward__length_bonus=0.1, reward__length_low=2, reward__hook="my_rewards.py"
        )
        | thinking
    )
    uncounted = ", not counting reward.length_bonus and reward.hook"
    cause = safety.why_nothing_is_kept(runs.settings(**changes, **paid), spread)
    assert cause.endswith(uncounted)
    plain = safety.why_nothing_is_kept(runs.settings(**changes, **thinking), spread)
    assert cause == plain + uncounted


def test_a_run_without_any_update_says_why_nothing_was_learned(run):
    state = weights.new_state(run).replace(iteration=jnp.int32(4))
    empty = state.replace(skipped_empty=jnp.int32(4))
    said = safety.nothing_learned(run.settings, empty, 0.0)
    assert "no group was kept in any of 4 iterations, for all episodes of each" in said
    assert "filter.zero = 1e-06" in safety.nothing_learned(run.settings, empty, 0.1)
    bad = state.replace(skipped_bad=jnp.int32(4))
    assert "4 gradients were" in safety.nothing_learned(run.settings, bad, 0.1)
    learned = empty.replace(updates=jnp.int32(1))
    assert safety.nothing_learned(run.settings, learned, 0.0) == ""


def test_rewards_that_are_not_finite_are_named_as_the_cause(run):
    state = weights.new_state(run).replace(iteration=jnp.int32(4))
    unread = dict(optimizer__actor_lr=1e-4, safety__max_empty_updates=3)
    settings = runs.settings(**unread, safety__max_bad_updates=2)
    empty = state.replace(skipped_empty=jnp.int32(4), empty_in_row=jnp.int32(4))
    bad = state.replace(skipped_bad=jnp.int32(4), bad_in_row=jnp.int32(4))
    for said in (
        safety.nothing_learned(settings, empty, math.nan),
        safety.nothing_learned(settings, bad, math.nan),
        safety.problem(settings, empty, [], math.nan),
        safety.problem(settings, bad, [], math.nan),
    ):
        assert ", for rewards of the environment were not finite" in said
        assert "an environment that passes python -m ragen_jax.testing.che" in said
        assert "easier" not in said and "actor_lr" not in said
    assert "actor_lr" in safety.problem(settings, bad, [], 0.1)


def test_a_hook_is_named_beside_the_environment_where_rewards_are_not_finite(run):
    reward = dataclasses.replace(run.settings.reward, hook="my_rewards.py")
    settings = dataclasses.replace(run.settings, reward=reward)
    counts = dict(iteration=jnp.int32(4), skipped_bad=jnp.int32(4))
    state = weights.new_state(run).replace(**counts)
    for said in (
        safety.unsound_rewards(settings, math.nan),
        safety.nothing_learned(settings, state, math.nan),
    ):
        assert "environment or of reward.hook were not finite" in said
        assert "check_env and finite rewards of reward.hook in another" in said
    assert safety.unsound_rewards(settings, 0.5) == ""


def test_rewards_that_are_not_finite_are_said_once_in_a_run(run):
    stream = io.StringIO()
    console = console_lib.Console(stream)
    for spread in (0.5, math.nan, 0.0, math.inf):
        console.once(safety.unsound_rewards(run.settings, spread))
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(
        "warning: rewards of the environment were not finite: groups with them"
    )
    assert "python -m ragen_jax.testing.check_env" in line


def test_the_warning_of_a_finished_run_reads_which_rewards_were_not_finite(
    run, tmp_path
):
    state = weights.new_state(run).replace(
        iteration=jnp.int32(2), skipped_empty=jnp.int32(2)
    )
    lines = [{"iteration": 1, "filter/reward_std": 0.5}, {"iteration": 2}]
    for last, cause in ((0.0, "though returns differ"), (None, "were not finite")):
        lines[1]["filter/reward_std"] = last
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / metrics.FILE).write_text(text)
        assert cause in final_test._nothing_learned(run, state, tmp_path)


def test_a_gap_is_judged_by_its_mean_over_five_iterations_or_at_once_if_it_is_gross(
    run,
):
    state = weights.new_state(run)

    def problem(*gaps):
        return safety.problem(run.settings, state, gaps, 0.1)

    assert run.settings.loss.logprob_gap_limit == 0.05
    assert problem(0.1, 0.1, 0.1, 0.1) == ""
    assert problem(0.2, 0.0, 0.0, 0.0, 0.04) == ""
    assert "by 0.06 nats a token in the mean of 5" in problem(0.1, 0, 0.1, 0.1, 0)
    assert "by 0.6 nats a token in an iteration" in problem(0, 0.6)
    assert run.settings.safety.max_bad_updates == 5


@pytest.mark.parametrize(("known", "left"), [(0, [2]), (1, [2, 4])])
def test_a_rollback_that_was_killed_when_it_was_noted_is_ended_by_the_next_start(
    run, tmp_path, known, left
):
    folder, state = tmp_path / "checkpoints", weights.new_state(run)
    with Checkpoints(folder, keep_last=9, keep_best=0) as saved:
        for step, rollbacks in ((2, 0), (4, known)):
            info = {"health": {"rollbacks": rollbacks}}
            saved.save(step, state, info, score=None)
    rollbacks_lib.note_rollback(tmp_path, 5, 2, "collapsed", "learning_rate")
    with Checkpoints(folder, keep_last=9, keep_best=0) as saved:
        trainer._end_rollback(saved, tmp_path, rollbacks=1)
        assert saved.steps() == left


def test_an_iteration_without_an_update_counts_for_no_gap(run):
    state = weights.new_state(run)
    assert safety.recent_gaps([1, 2, 3, 4, 5], state, 6) == [2, 3, 4, 5, 6]
    empty = state.replace(empty_in_row=jnp.int32(1))
    assert safety.recent_gaps([1, 2, 3, 4, 5], empty, 0.0) == [1, 2, 3, 4, 5]
    assert safety.recent_gaps([], empty, 0.0) == []


def test_a_gap_that_is_no_number_hides_no_others(run):
    state, gaps = weights.new_state(run), []
    for gap in (9.0, 9.0, math.nan, 9.0, math.nan, 9.0, 9.0, math.nan):
        gaps = safety.recent_gaps(gaps, state, gap)
    settings = runs.settings(loss__logprob_gap_limit=1.0)
    assert "in the mean of 5 iter" in safety.problem(settings, state, gaps, 0.1)
    assert safety.recent_gaps(gaps, state, math.inf)[-1] == math.inf


def test_a_second_ctrl_c_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(interrupts, "ONE_REQUEST", 0.0)
    printed = []
    with interrupts.InterruptHandler(printed.append) as handler:
        os.kill(os.getpid(), signal.SIGINT)
        assert handler.should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            jax.block_until_ready(jnp.zeros(1))
    assert printed == ["stopping after this iteration, with a saved state ..."]


def test_no_signal_is_lost_while_the_handlers_are_put_in_place_or_taken_away(
    monkeypatch,
):
    seen = []

    @contextlib.contextmanager
    def listening(_policy):
        os.kill(os.getpid(), signal.SIGINT)  # Between the two statements of __enter__.
        yield
        seen.append((signal.getsignal(signal.SIGINT), handler._left.is_set()))

    monkeypatch.setattr(interrupts.endings, "listening", listening)
    with interrupts.InterruptHandler(lambda _: None) as handler:
        assert handler.should_stop()
    # The policy of before is in force again while the handler still is in place.
    assert seen == [(handler._handle, False)]
    monkeypatch.setattr(interrupts.endings, "listening", contextlib.nullcontext)
    with interrupts.InterruptHandler(lambda _: None) as handler:
        assert not handler.should_stop()
        handler._left.set()  # So that nothing is waited for.
        handler._hear(signal.SIGINT)  # Of a signal that came before the handlers.
        assert handler.should_stop()
