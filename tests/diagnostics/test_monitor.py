"""Health in whole runs: what is measured and recorded, rollbacks, and diagnosis."""

import dataclasses
import json
import math
import os
import signal
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs, updates

from ragen_jax.cli import diagnosis
from ragen_jax.diagnostics import (
    alarm,
    episode_log,
    health,
    monitor,
    report,
    rollbacks,
    thought_samples,
)
from ragen_jax.diagnostics.mutual_information import SmoothedStd
from ragen_jax.errors import UserError
from ragen_jax.reporting import diagnosis_table, metrics
from ragen_jax.training import checkpoints, loop, resumed
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import workdir as workdir_lib
from ragen_jax.utils import workdir_files
from ragen_jax.utils.finite import finite

CHANGES = dict(
    env__thinking=True,
    health__record_every=2,
    health__record_episodes=4,
    health__on_collapse="rollback",
)


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare(**CHANGES)


@pytest.fixture(scope="module")
def rolled_back(run, tmp_path_factory):
    """A run of four iterations whose third is judged a collapse, the first time."""
    workdir = tmp_path_factory.mktemp("rolled")
    observe, seen, made = health.observe, [], []
    make_programs = programs_lib.make_programs

    def judge(state, iteration, values, asked):
        state, decision = observe(state, iteration, values, asked)
        seen.append((iteration, state.rollbacks))
        if seen[-1] == (3, 0):
            decision = dataclasses.replace(
                decision, action=health.ROLLBACK, sentence="a collapse", healthy_until=2
            )
        return state, decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "observe", judge)
        patch.setattr(
            programs_lib,
            "make_programs",
            lambda run, **more: made.append(run) or make_programs(run, **more),
        )
        printed = runs.train(run, workdir)
    return workdir, printed, seen, made


@pytest.mark.slow
def test_a_rollback_continues_from_the_last_healthy_checkpoint(run, rolled_back):
    workdir, printed, seen, made = rolled_back
    assert [iteration for iteration, _ in seen] == [1, 2, 3, 3, 4]
    assert [rollbacks for _, rollbacks in seen] == [0, 0, 0, 1, 1]
    rate = run.settings.optimizer.actor_lr / 2
    assert (
        "a collapse: back to the checkpoint after iteration 2, from now on with"
        f" optimizer.actor_lr = {rate:.3g}" in printed
    )
    records = metrics.read(workdir)
    assert [r["iteration"] for r in records if "train/success" in r] == [1, 2, 3, 4]
    rates = [r["update/actor_lr"] for r in records if "train/success" in r]
    np.testing.assert_allclose(rates, [2 * rate, 2 * rate, rate, rate])
    (noted,) = rollbacks.read_rollbacks(workdir)
    assert noted["from"] == 3 and noted["to"] == 2
    # The programs take the rate as an argument: nothing was compiled again.
    assert len(made) == 1


@pytest.mark.slow
def test_a_run_that_fell_before_its_first_checkpoint_begins_again(tmp_path):
    settings = runs.settings(**CHANGES, every__checkpoint=4, every__evaluate=0)
    run = runs.prepare(**CHANGES, every__checkpoint=4, every__evaluate=0)
    observe = health.observe

    def judge(state, iteration, values, asked):
        state, decision = observe(state, iteration, values, asked)
        if (iteration, state.rollbacks) == (3, 0):
            decision = dataclasses.replace(
                decision,
                action=health.ROLLBACK,
                sentence="a collapse",
                healthy_until=health.START,
            )
        return state, decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "observe", judge)
        printed = runs.train(run, tmp_path)
    rate = settings.optimizer.actor_lr / 2
    said = f"back to the beginning, from now on with optimizer.actor_lr = {rate:.3g}"
    assert f"a collapse: {said}" in printed
    trained = [r for r in metrics.read(tmp_path) if "train/success" in r]
    assert [r["iteration"] for r in trained] == [1, 2, 3, 4]
    np.testing.assert_allclose([r["update/actor_lr"] for r in trained], [rate] * 4)
    (noted,) = rollbacks.read_rollbacks(tmp_path)
    assert noted["from"] == 3 and noted["to"] == 0


@pytest.mark.slow
def test_a_signal_in_the_iteration_of_a_rollback_ends_the_run(run, tmp_path):
    observe = health.observe

    def judge(state, iteration, values, asked):
        state, decision = observe(state, iteration, values, asked)
        if (iteration, state.rollbacks) == (2, 0):
            os.kill(os.getpid(), signal.SIGTERM)
            decision = dataclasses.replace(
                decision, action=health.ROLLBACK, sentence="a collapse", healthy_until=1
            )
        return state, decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "observe", judge)
        printed = runs.train(run, tmp_path)
    assert runs.steps(tmp_path) == [1]
    assert len(rollbacks.read_rollbacks(tmp_path)) == 1
    assert "saved after iteration 1; the same command continues from there" in printed


def test_a_run_killed_after_going_back_to_its_beginning_keeps_others_out(tmp_path):
    """Nothing of it is left but its settings, and rollbacks that lower the rate."""
    first = runs.settings(health__on_collapse="rollback")
    workdir_lib.claim_workdir(tmp_path, first)
    other = runs.settings(health__on_collapse="rollback", seed=7)
    workdir_lib.check_workdir(tmp_path, other)  # Given up before its first iteration.
    rollbacks.note_rollback(tmp_path, 11, 0, "a collapse", "learning_rate")
    workdir_lib.check_workdir(tmp_path, first)
    with pytest.raises(UserError, match="seed was 0 and is 7"):
        workdir_lib.check_workdir(tmp_path, other)
    (tmp_path / workdir_files.SETTINGS).unlink()
    with pytest.raises(UserError, match="holds rollbacks.json but no settings.json"):
        workdir_lib.check_workdir(tmp_path, first)


def test_a_run_that_rolled_back_keeps_its_remedy(tmp_path):
    halved = runs.settings(health__on_collapse="rollback")
    fewer = runs.settings(health__on_collapse="rollback", health__remedy="filter")
    workdir_lib.claim_workdir(tmp_path, halved)
    workdir_lib.check_workdir(tmp_path, fewer)  # Nothing has happened yet.
    rollbacks.note_rollback(tmp_path, 11, 0, "a collapse", "learning_rate")
    workdir_lib.check_workdir(tmp_path, halved)
    with pytest.raises(UserError, match="go back to 'learning_rate'"):
        workdir_lib.check_workdir(tmp_path, fewer)


@pytest.mark.parametrize(
    "text",
    [
        '[{"from": 11, "t',
        "{}",
        "[[]]",
        '[{"from": 11, "to": 0}]',
        '[{"from": 11, "to": null, "why": ""}]',
    ],
)
def test_damaged_rollbacks_are_named_wherever_they_are_read(tmp_path, text):
    settings = runs.settings(health__on_collapse="rollback")
    workdir_lib.claim_workdir(tmp_path, settings)
    (tmp_path / metrics.FILE).write_text('{"iteration": 1, "train/success": 0.5}\n')
    rollbacks.note_rollback(tmp_path, 11, 0, "a collapse", "learning_rate")
    (tmp_path / rollbacks.FILE).write_text(text)
    said = "rollbacks.json is not readable as a run's rollbacks, .* from a copy, or"
    with pytest.raises(UserError, match=said):
        workdir_lib.check_workdir(tmp_path, settings)
    with pytest.raises(UserError, match=said):
        report.write_report(tmp_path)


def test_a_lower_learning_rate_needs_no_other_programs_and_another_filter_does(run):
    assert run.settings.health.remedy == "learning_rate"
    lower = health.remedied(run.settings, 2)
    assert lower != run.settings
    assert programs_lib.share_programs(run.settings, lower)
    starpo_s = runs.settings(
        algorithm="starpo_s", rollout__prompts=8, health__remedy="filter"
    )
    stricter = health.remedied(starpo_s, 1)
    assert stricter != starpo_s
    assert not programs_lib.share_programs(starpo_s, stricter)


def test_a_rollback_that_compiles_again_reads_no_second_copy_of_the_reference(
    monkeypatch,
):
    monkeypatch.setattr(programs_lib, "compile_ahead", lambda run, *made: made)
    monkeypatch.setattr(programs_lib, "compile_indicators", lambda *given: given[-1])
    chosen = dict(health__remedy="filter", loss__kl=0.1, rollout__prompts=8)
    run = runs.prepare(algorithm="starpo_s", **chosen)
    first = programs_lib.compile_run(run, None)
    tighter = resumed.remedied_run(run, 1)
    again = programs_lib.compile_run(tighter, first)
    assert again.settings == tighter.settings != first.settings
    assert again.programs.reference is first.programs.reference != {}


@pytest.mark.slow
def test_each_iteration_has_its_indicators(rolled_back):
    workdir, *_ = rolled_back
    for record in metrics.read(workdir)[:4]:
        assert 0 < record["health/distinct_thoughts"] <= 1
        assert record["health/level"] == 0
        assert 0 <= record["health/overlap_across"] <= 1
    saved = checkpoints.read_info(workdir / checkpoints.FOLDER, 4)["health"]
    state = health.from_json(saved)
    assert len(dict(state.alarm.tracks)["train/success"].values) == 4


@pytest.mark.parametrize(("with_penalty", "share"), [(False, 1.0), (True, 0.75)])
def test_groups_without_spread_are_counted_by_the_return_that_the_filter_sees(
    monkeypatch, with_penalty, share
):
    chosen = updates.settings(filter__with_penalty=with_penalty)
    plan = types.SimpleNamespace(reply_tokens=4)
    run = types.SimpleNamespace(settings=chosen, tasks=(), plan=plan, model=None)
    monkeypatch.setattr(monitor.scored_batch, "make_scoring", lambda *_, **__: None)
    rows, episodes = updates.record()
    # All earn nothing, and one reply of group 0 is not valid.
    is_valid = jnp.ones_like(episodes.is_valid).at[1, 0].set(False)
    episodes = episodes.replace(
        reward=jnp.zeros_like(episodes.reward), is_valid=is_valid
    )
    measure = monitor.make_monitor(run, None, None).measure
    assert float(measure(rows, episodes, ())["zero_spread_groups"]) == share


@pytest.mark.slow
def test_episodes_are_recorded_with_what_their_tokens_were_worth(rolled_back):
    workdir, *_ = rolled_back
    episodes = episode_log.read(workdir)
    assert {e["phase"] for e in episodes} == {"train", "before", "after"}
    assert {e["iteration"] for e in episodes if e["phase"] == "train"} == {2, 4}
    before = [e for e in episodes if e["phase"] == "before"]
    after = [e for e in episodes if e["phase"] == "after"]
    boards = [[e["turns"][0]["message"] for e in side] for side in (before, after)]
    assert boards[0] == boards[1] and len(set(boards[0])) > 1
    with_advantage = 0
    for episode in episodes:
        for turn in episode["turns"]:
            count = len(turn["tokens"])
            assert len(turn["logprob"]) == len(turn["entropy"]) == count
            assert all(value <= 0 for value in turn["logprob"])
            if turn["advantage"] is not None:
                assert len(turn["advantage"]) == len(turn["value"]) == count
                with_advantage += 1
    assert with_advantage > 0


@pytest.mark.slow
def test_a_report_of_a_real_run_holds_its_episodes(rolled_back):
    workdir, *_ = rolled_back
    text = report.write_report(workdir).read_text()
    assert "side by side" in text and '"phase":"after"' in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lora__rank": 2}, "weights"),  # Under its adapters,
        ({"loss__kl": 0.1}, "weights"),  # as the reference of its KL term,
        ({}, "tokens"),  # and as what its prompts are written in.
    ],
)
def test_a_checkpoint_is_not_diagnosed_with_another_model_than_it_began_with(
    changes, part, tmp_path
):
    run = runs.prepare(**changes)
    with checkpoints.Checkpoints(tmp_path, keep_last=1, keep_best=0) as saved:
        saved.save(4, {"x": jnp.zeros(1)}, {"model": {part: "of another"}}, score=None)
    with pytest.raises(UserError, match=f"4 began with a model of other {part} than"):
        diagnosis.diagnose(
            diagnosis.Instruments(run),
            tmp_path,
            4,
            diagnosis.DiagnosisOptions(),
            SmoothedStd(),
        )


def test_a_batch_in_which_messages_were_cut_is_not_diagnosed():
    """A run ends before it learns from it; its last checkpoint would play it again."""
    cut = types.SimpleNamespace(too_long=jnp.array([[1], [2]]))
    run = types.SimpleNamespace(
        settings=runs.settings(),
        tasks=[types.SimpleNamespace(label="lake")],
        tokens=(),
    )
    programs = types.SimpleNamespace(rollout=lambda *given: cut)
    with pytest.raises(UserError, match="^lake shows more tokens .* lost, 3 of them"):
        diagnosis.sample(run, programs, {}, 4)


@pytest.mark.slow
def test_a_checkpoint_is_diagnosed(run, rolled_back):
    workdir, *_ = rolled_back
    wanted = diagnosis.DiagnosisOptions(samples=4)
    folder, instruments = workdir / checkpoints.FOLDER, diagnosis.Instruments(run)
    found, smoothed = diagnosis.diagnose(instruments, folder, 4, wanted, SmoothedStd())
    assert json.loads(json.dumps(found))["step"] == 4
    info = found["information"]
    assert info["first_turn/ragen/mutual"] <= info["first_turn/ragen/bound"] + 1e-5
    assert info["trajectory/tokens"] < info["trajectory/tokens_by_pair"]
    assert found["gradients"]["all/task"] > 0
    assert len(smoothed.values) == 6
    assert found["text"]["prompts"] == run.settings.rollout.prompts
    heads, row, _, *legend = diagnosis_table.table([found]).splitlines()
    assert row.split()[heads.split().index("KL")] == "-"  # The loss has no such term.
    assert len(legend) == 3 and "(4 thoughts, " in legend[1]


@pytest.mark.slow
def test_two_checkpoints_are_diagnosed_on_the_same_prompts_where_that_is_asked(
    run, rolled_back, monkeypatch
):
    drawn = []

    def draw(*given):
        drawn.append(given[-1])
        raise UserError("enough")

    made, make = [], programs_lib.make_programs
    monkeypatch.setattr(
        programs_lib, "make_programs", lambda run: made.append(run) or make(run)
    )
    monkeypatch.setattr(diagnosis, "sample", draw)
    instruments = diagnosis.Instruments(run)
    for options in (
        diagnosis.DiagnosisOptions(),
        diagnosis.DiagnosisOptions(prompts_of=2),
    ):
        for step in (2, 4):
            with pytest.raises(UserError, match="enough"):
                folder = rolled_back[0] / checkpoints.FOLDER
                diagnosis.diagnose(instruments, folder, step, options, SmoothedStd())
    assert drawn == [2, 4, 2, 2] and made == [run]


def test_a_rollback_without_a_checkpoint_to_return_to_says_which_it_wants(run):
    verdict = alarm.Verdict(alarm.COLLAPSE, (), "a collapse")
    decision = health.Decision(health.ROLLBACK, "a collapse", verdict, 37)
    saved = types.SimpleNamespace(latest_step=lambda until: None)
    workdir = types.SimpleNamespace(checkpoints=saved)
    outputs = types.SimpleNamespace(workdir=workdir)
    said = loop._carry_out(run, outputs, 60, decision)
    assert "no checkpoint that is kept is from iteration 37 or before" in said
    assert "with a higher checkpoint.keep_last" in said


def test_a_warning_is_printed_and_training_goes_on(run):
    verdict, said = alarm.Verdict(alarm.COLLAPSE, (), "a collapse"), []
    console = types.SimpleNamespace(line=said.append)
    outputs = types.SimpleNamespace(console=console)
    decision = health.Decision(health.WARN, "a collapse (warn)", verdict)
    assert loop._carry_out(run, outputs, 60, decision) == ""
    assert said == ["warning: a collapse (warn)"]


def test_a_run_without_a_checkpoint_begins_again_until_its_twentieth_iteration(
    run, tmp_path
):
    decision = health.Decision(
        health.ROLLBACK, "x", alarm.Verdict(alarm.COLLAPSE, (), "x"), 3
    )
    deleted = []
    saved = types.SimpleNamespace(
        latest_step=lambda until: None, delete_after=deleted.append
    )
    workdir = types.SimpleNamespace(checkpoints=saved, path=tmp_path)
    outputs = types.SimpleNamespace(workdir=workdir)
    assert "no checkpoint" in loop._carry_out(run, outputs, 21, decision)
    with pytest.raises(loop.RolledBack) as back:
        loop._carry_out(run, outputs, 20, decision)
    assert (back.value.to, deleted) == (0, [0])


def test_a_number_that_is_not_known_is_no_figure_of_a_checkpoint():
    """Such as the agreement of thoughts where no reply has one."""
    text = {"episodes": 8, "prompts": 2, "success": 0.5, "distinct_thoughts": math.nan}
    found = {"step": 4, "text": text}
    heads, row, _, legend = diagnosis_table.table([found]).splitlines()
    assert heads.split()[:4] == ["step", "success", "error", "distinct"]
    assert row.split()[:4] == ["4", "0.5", "-", "-"]
    assert legend.startswith("8 episodes on 2 prompts; error:")
    assert finite([found]) == [{"step": 4, "text": text | {"distinct_thoughts": None}}]


def test_the_units_of_thoughts_are_told_though_the_last_checkpoint_has_none():
    text = {"episodes": 8, "prompts": 2, "success": 0.5}
    known = {"first_turn/prompts": 4.0, "first_turn/thoughts": 6.0}
    first, last = {"step": 4, "text": text}, {"step": 8, "text": text}
    first, last = first | {"information": known}, last | {"information": {}}
    legend = diagnosis_table.table([first, last]).splitlines()[4:]
    assert "(6 thoughts, 4 prompts: I(X;Z) is at most 1.39)" in legend[1]


def test_of_many_checkpoints_one_without_thoughts_lacks_their_information_alone(
    run, monkeypatch
):
    none = np.zeros(3, np.int64)
    turns = thought_samples.Turns(none, none, none, none, none)
    monkeypatch.setattr(thought_samples, "find_turns", lambda *_: turns)
    episodes = types.SimpleNamespace(group=none)
    rollout = types.SimpleNamespace(rows=none, episodes=episodes)
    wanted = diagnosis.DiagnosisOptions(may_lack_thoughts=True)
    instruments = diagnosis.Instruments(run)
    found, _ = diagnosis.information(instruments, {}, rollout, wanted, SmoothedStd())
    assert found == {"valid_thinking_rate": 0.0}
    with pytest.raises(UserError, match="no first turn of these episodes"):
        diagnosis.information(
            instruments, {}, rollout, diagnosis.DiagnosisOptions(), SmoothedStd()
        )


def test_another_shape_of_a_mixed_batch_is_refused():
    mixed = runs.settings()
    env = dataclasses.replace(mixed.env, mix=mixed.tasks())
    with pytest.raises(UserError, match="--prompts cannot be used where several"):
        diagnosis.reshape(dataclasses.replace(mixed, env=env), 8, 0)
    changed = diagnosis.reshape(mixed, 8, 2).rollout
    assert (changed.prompts, changed.group_size) == (8, 2)


def test_what_a_gpu_sampled_in_one_graph_is_diagnosed_without_on_any_device():
    settings = runs.settings(rollout__cuda_graph=True)
    assert diagnosis.reshape(settings, 0, 0).rollout.cuda_graph is False


def test_a_batch_to_diagnose_that_int32_cannot_count_is_refused():
    with pytest.raises(UserError, match="lower --group_size, the largest"):
        diagnosis.reshape(runs.settings(), 2, 2 * 10**9)
