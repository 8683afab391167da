"""What a resumed run still knows: of its health, and of what was validated how."""

import dataclasses
import io
import types

import jax.numpy as jnp
import pytest
from helpers import runs

from ragen_jax import settings as settings_lib
from ragen_jax.diagnostics import alarm, health, rollbacks
from ragen_jax.errors import UserError
from ragen_jax.reporting.console import Console
from ragen_jax.training import loop, resumed, trainer, weights
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.interrupts import StallWatchdog
from ragen_jax.training.loop import OpenWorkdir
from ragen_jax.training.profiling import Profiler


def validated(state, iteration, success, settings):
    values = {"validation/success": success, "train/success": 0.9}
    values |= {"validation/success_standard_error": 0.01}
    return health.observe(state, iteration, values, settings.health)


def test_the_gaps_before_a_stop_count_after_it(tmp_path):
    now = runs.settings()
    info = resumed.info(now, 3, None, [0.25, 0.5], health.HealthState())
    with Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=0) as saved:
        saved.save(3, {"x": jnp.zeros(1)}, info, score=None)
        opened = OpenWorkdir(tmp_path, saved, {}, {})
        assert loop._progress_at(now, opened, 3).gaps == [0.25, 0.5]
        assert loop._progress_at(now, opened, 0).gaps == []


@pytest.mark.parametrize(
    ("now", "level"),
    [
        ({}, alarm.COLLAPSE),
        ({"evaluation__slots": 4}, alarm.COLLAPSE),  # The same episodes, fewer at once.
        ({"evaluation__temperature": 2.0}, alarm.HEALTHY),
        ({"evaluation__prompts": 16}, alarm.HEALTHY),
    ],
)
def test_a_fall_that_another_evaluation_makes_is_no_decline(tmp_path, now, level):
    before = runs.settings(health__on_collapse="rollback")
    after = runs.settings(health__on_collapse="rollback", **now)
    state, _ = validated(health.HealthState(), 10, 0.8, before)
    state = dataclasses.replace(state, stops=health.StopCounts(low_validation=3))
    info = {
        "settings": settings_lib.to_dict(before),
        "health": health.to_json(state),
    }
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as saved:
        saved.save(10, {"x": jnp.zeros(1)}, info, score=0.8)
        state = resumed.health_state(saved, 10, 0, after)
    assert state.stops.low_validation == (3 if level == alarm.COLLAPSE else 0)
    for iteration in (20, 30):
        state, decision = validated(state, iteration, 0.5, after)
    assert decision.verdict.level == level
    assert decision.action == {alarm.COLLAPSE: health.ROLLBACK}.get(level, "continue")


def test_another_evaluation_is_told_where_the_run_validates():
    before = settings_lib.to_dict(runs.settings(evaluation__temperature=1.0))
    now = dict(evaluation__temperature=0.0, evaluation__slots=4)
    said = resumed.changed_evaluation(runs.settings(**now), before)
    assert said.startswith("warning: evaluation.temperature was 1.0 and is 0.0: the al")
    never = runs.settings(**now, every__evaluate=0)
    assert resumed.changed_evaluation(never, before) == ""
    assert resumed.changed_evaluation(runs.settings(), before) == ""
    assert resumed.changed_evaluation(runs.settings(), {}) == ""  # An older checkpoint.


def test_a_run_is_told_of_each_file_of_its_own_that_has_changed(tmp_path):
    run = runs.prepare()
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as saved:
        code = {"rooms.py": "a", "hook.py": "b", "gone.py": "c"}
        settings = settings_lib.to_dict(run.settings)
        info = {"code": code, "dtype": "float32", "settings": settings}
        saved.save(3, weights.new_state(run), info, score=None)
        told = []
        for hook in ("b", "other"):
            out = io.StringIO()
            code = {"rooms.py": "a", "hook.py": hook, "new.py": "d"}
            workdir = OpenWorkdir(tmp_path, saved, {}, code)
            trainer._start(run, run.settings, workdir, Console(out))
            told.append(out.getvalue().splitlines()[1:])
    assert told[0] == [] and len(told[1]) == 1
    assert told[1][0].startswith("warning: hook.py has changed since the checkpoint")
    assert resumed.changed_dtype("float32", None) == ""
    said = resumed.changed_dtype("bfloat16", "float32")
    assert "in float32 and the run continues in bfloat16" in said


def test_a_checkpoint_of_another_run_is_not_continued(tmp_path):
    """Such as one of the same shapes that was copied from another workdir."""
    run, other = runs.prepare(), runs.settings(seed=7, optimizer__actor_lr=0.5)
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as saved:
        info = {"settings": settings_lib.to_dict(other)}
        saved.save(3, weights.new_state(run), info, score=None)
        workdir, console = OpenWorkdir(tmp_path, saved, {}, {}), Console(io.StringIO())
        with pytest.raises(UserError, match="3 holds a run .*_lr was 0.5 .*seed was 7"):
            trainer._start(run, run.settings, workdir, console)
        info["health"] = {"rollbacks": 1}  # Its remedy may have changed the rate.
        with pytest.raises(UserError, match="other settings: seed was 7 and is 0"):
            resumed.check_settings(run.settings, info, "3")
    now = dict(seed=7, iterations=9)
    resumed.check_settings(runs.settings(**now), info, "3")


def test_a_run_that_rolled_back_is_told_that_its_schedule_has_another_end(
    tmp_path, monkeypatch
):
    """Its remedy keeps fewer groups, and the schedule as long as with all of them."""
    changes = dict(
        algorithm="starpo_s",
        rollout__prompts=4,
        health__on_collapse="rollback",
        health__remedy="filter",
        filter__fraction=0.5,
        optimizer__schedule="cosine",
    )
    run = runs.prepare(iterations=60, **changes)
    rollbacks.note_rollback(tmp_path, 20, 10, "a collapse", "filter")
    said = io.StringIO()
    # All iterations are done, so that nothing is compiled.
    monkeypatch.setattr(trainer.final_test, "report", lambda *given: True)
    with Checkpoints(tmp_path / "steps", keep_last=1, keep_best=0) as saved:
        was = settings_lib.to_dict(runs.settings(iterations=30, **changes))
        rolled_back = health.to_json(health.HealthState(rollbacks=1))
        info = {"settings": was, "health": rolled_back}
        state = weights.new_state(run).replace(iteration=jnp.int32(60))
        saved.save(60, state, info, score=None)
        workdir = OpenWorkdir(tmp_path, saved, {}, {})
        profiler = Profiler(range(0), tmp_path, print)
        with StallWatchdog() as watchdog:
            trainer._train_from_checkpoint(
                run, workdir, Console(said), "", watchdog, profiler, None
            )
    assert "which moves the end of optimizer.schedule = 'cosine'" in said.getvalue()
    # Which its workdir never held.
    assert "lacks 60 of the 60 finished iterations" in said.getvalue()


def test_the_records_of_a_checkpoints_iterations_are_on_disk_before_it():
    done = []
    saved = types.SimpleNamespace(save=lambda *a, **k: done.append("saved"))
    writer = types.SimpleNamespace(sync=lambda: done.append("synced"))
    workdir = OpenWorkdir(None, saved, {}, {})
    outputs = loop.Outputs(workdir, writer, None, None, None, None)
    run = runs.prepare()
    state = types.SimpleNamespace(iteration=run.settings.iterations)
    progress = loop.Progress(health.HealthState(), [], -1.0)
    loop._save_if_due(run, state, outputs, progress, None, ends=True)
    assert done == ["synced", "saved"]


def test_a_run_whose_rollbacks_are_lost_does_not_go_on_as_if_there_were_none(tmp_path):
    """Its learning rate would be the one that it collapsed with."""
    with Checkpoints(tmp_path / "steps", keep_last=9, keep_best=0) as saved:
        info = {"health": {"rollbacks": 1}}
        saved.save(2, weights.new_state(runs.prepare()), info, score=None)
        said = "2 knows of more rollbacks than .*rollbacks.json, 1 instead of 0: re"
        with pytest.raises(UserError, match=said):
            trainer._end_rollback(saved, tmp_path, rollbacks=0)


@pytest.mark.parametrize(
    "change",
    [
        {"alarm": {"train/success": [1]}},
        {"alarm": 5},
        {"stops": {"baseline": [], "new": 1}},
        {"stops": {}},
    ],
)
def test_a_state_of_the_monitor_that_cannot_be_read_is_told_in_one_sentence(change):
    sound = health.to_json(health.HealthState())
    resumed.check_health({}, "4")
    resumed.check_health({"health": sound}, "4")
    with pytest.raises(UserError, match="4 holds a state of the health monitor that"):
        resumed.check_health({"health": sound | change}, "4")
