"""The loop of iterations, and what stands around it, without a model's programs."""

import io
from types import SimpleNamespace

import jax
import pytest
from helpers import runs

from ragen_jax.diagnostics import monitor
from ragen_jax.envs.base import VALIDATION
from ragen_jax.reporting import metrics
from ragen_jax.reporting.console import Console
from ragen_jax.training import final_test, loop, profiling, trainer, weights
from ragen_jax.training.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


def test_every_iteration_is_in_the_record_however_seldom_the_console_has_a_line(
    run, tmp_path, monkeypatch
):
    lines, steps = _iterate(run, tmp_path, monkeypatch)
    records = runs.records(tmp_path)
    assert [one["iteration"] for one in records] == [1, 2, 3, 4, 5]
    validated = [one["iteration"] for one in records if "validation/success" in one]
    assert validated == [2, 4, 5]
    shown = [line.split()[0] for line in lines]
    assert [line for line in shown if line.endswith("/5")] == ["3/5", "5/5"]
    # The last is saved even where every.checkpoint = 0 asks for none.
    assert steps == [5]


def test_a_validation_plays_validation_levels_with_the_policy_as_it_is_then(
    run, tmp_path, monkeypatch
):
    taken = []
    score = SimpleNamespace(metrics=lambda: {"success": 0.5})

    def evaluate(run, evaluators, actor, *, split, prompts):
        taken.append((evaluators, actor, split, prompts))
        return {"lake": score}

    monkeypatch.setattr(loop.validation, "evaluate", evaluate)
    chosen = dict(evaluation__prompts=6, evaluation__test_prompts=7)
    run = runs.replace_settings(run, **chosen)
    programs = SimpleNamespace(merge=lambda *trees: trees, frozen="frozen")
    compiled = SimpleNamespace(programs=programs, validators="validators")
    values = loop._validate(run, compiled, SimpleNamespace(actor="actor"))
    assert taken == [("validators", ("actor", "frozen"), VALIDATION, 6)]
    assert values["validation/success"] == 0.5


def test_the_time_left_counts_the_validations_that_are_to_come():
    for total in (1, 5, 12):
        for every in range(total + 2):
            for done in range(1, total + 1):
                later = range(done + 1, total + 1)
                due = sum(loop._is_due(one, every, total) for one in later)
                assert loop._due_later(done, every, total) == due


def test_validations_and_saves_have_clocks_of_their_own(run, tmp_path, monkeypatch):
    clocks = []
    seconds, scores = iter([500.0, 90.0, 70.0]), iter([0.5, 0.5, 0.7])

    def expect_within(limit, what="an iteration"):
        clocks.append((what, limit))

    def validate(*_):
        assert clocks[-1][0] == "a validation"
        took = next(seconds)
        return {"validation/success": next(scores), "time/validation_seconds": took}

    def wait(saved):
        waited.append(clocks[-1:])
        return finish(saved)

    finish, waited = Checkpoints.wait, []
    monkeypatch.setattr(Checkpoints, "wait", wait)
    _, steps = _iterate(run, tmp_path, monkeypatch, expect_within, validate, best=1)
    assert [limit for what, limit in clocks if what == "a validation"] == [
        3600,  # It may have to compile.
        5000,
        900,
    ]
    # Before both saves, at the end, and when the folder is closed.
    assert waited[-4:] == [[("saving", 3600)]] * 4
    # Also a score as good as the best, as iteration 4 has it: where a rollback goes.
    assert steps == [2, 4, 5]


def test_a_validation_below_an_earlier_one_saves_nothing(run, tmp_path, monkeypatch):
    scores = iter([0.7, 0.5, 0.6])
    validate = lambda *_: {"validation/success": next(scores)}
    _, steps = _iterate(run, tmp_path, monkeypatch, validate=validate, best=1)
    assert steps == [2, 5]  # 4 is not the best; 5 is the last.


def test_the_time_left_is_asked_of_what_is_still_to_come(run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(loop.console_lib, "seconds_left", lambda *x: asked.append(x))
    _iterate(run, tmp_path, monkeypatch)
    # At the third of five iterations, when the fourth and fifth validate, and the last.
    assert [(left, due) for _, left, _, due in asked] == [(2, 2), (0, 0)]


@pytest.mark.parametrize(("process", "trims"), [(0, True), (1, False)])
def test_the_first_process_alone_trims_what_a_resumed_run_records_again(
    process, trims, run, tmp_path, monkeypatch
):
    trimmed, programs = [], SimpleNamespace(base={})
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(trainer.episode_log, "trim", lambda *_: trimmed.append(True))
    monkeypatch.setattr(trainer.programs_lib, "compile_run", lambda *_: programs)
    monkeypatch.setattr(loop, "train_to_end", lambda *given: (given[2], True))
    monkeypatch.setattr(final_test, "report", lambda *_: True)
    runs.train(run, tmp_path)
    assert bool(trimmed) == trims


def test_an_iteration_is_traced_with_its_validation_and_its_save(
    run, tmp_path, monkeypatch
):
    done = []

    def validate(*_):
        done.append("validation")
        return {"validation/success": 0.5}

    save, write = Checkpoints.save, metrics.MetricsWriter.write
    traced = lambda name, call: lambda *a, **k: done.append(name) or call(*a, **k)
    monkeypatch.setattr(Checkpoints, "save", traced("save", save))
    monkeypatch.setattr(metrics.MetricsWriter, "write", traced("metrics", write))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: done.append(1))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append(0))
    _iterate(run, tmp_path, monkeypatch, validate=validate, best=1, traced=range(2, 4))
    second = ["validation", "metrics", "save"]
    assert done[:7] == ["metrics", 1, *second, "metrics", 0]


@pytest.mark.parametrize(("process", "traces"), [(0, range(2, 4)), (1, range(0))])
def test_the_first_process_alone_traces(process, traces, run, tmp_path, monkeypatch):
    taken = []

    def train_to_end(run, compiled, state, outputs):
        taken.append(outputs.profiler._iterations)
        return state, True

    programs = SimpleNamespace(base={})
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(trainer.programs_lib, "compile_run", lambda *_: programs)
    monkeypatch.setattr(loop, "train_to_end", train_to_end)
    monkeypatch.setattr(final_test, "report", lambda *_: True)
    console = Console(io.StringIO())
    trainer.train(run, tmp_path, console, runs.COMMAND, range(2, 4))
    assert taken == [traces]


def _iterate(
    run,
    workdir,
    monkeypatch,
    expect_within=lambda *_: None,
    validate=lambda *_: {"validation/success": 0.5},
    best=0,
    traced=range(0),
):
    """What five iterations that compute nothing print, and which are saved.

    Each second one validates, and `best` checkpoints of the highest success are kept.
    Those in `traced` are to be traced.
    """
    chosen = dict(every__log=3, every__evaluate=2, every__checkpoint=0, iterations=5)
    run = runs.replace_settings(run, **chosen, checkpoint__keep_best=best)
    start, lines = weights.new_state(run), io.StringIO()
    values = {
        "update/logprob_gap": 0.0,
        "filter/reward_std": 0.1,
        "rollout/valid_reply_rate": 1.0,
        "rollout/cut_replies": 0.0,
    }

    def iterate(run, programs, state):
        return state.replace(iteration=state.iteration + 1), dict(values), None

    monkeypatch.setattr(loop.starpo, "iterate", iterate)
    monkeypatch.setattr(loop.messages, "example", lambda *_: "an episode")
    monkeypatch.setattr(loop, "_validate", validate)
    for name, result in (("measure", {}), ("record", None)):
        monkeypatch.setattr(monitor, name, lambda *_, result=result: result)
    blank = SimpleNamespace(programs=None, validators=None, monitor=None)
    deaf = SimpleNamespace(should_stop=lambda: False)
    clock = SimpleNamespace(expect_within=expect_within)
    writer = metrics.MetricsWriter(workdir, is_writer=True, first_iteration=1)
    with Checkpoints(workdir / "kept", keep_last=9, keep_best=best) as saved, writer:
        console = Console(lines)
        open_workdir = loop.OpenWorkdir(workdir, saved, {}, {})
        profiler = profiling.Profiler(traced, workdir, console.line)
        outputs = loop.Outputs(open_workdir, writer, console, deaf, clock, profiler)
        with profiler.after(0):
            loop.train_to_end(run, blank, start, outputs)
    return lines.getvalue().splitlines(), saved.steps()
