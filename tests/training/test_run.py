"""The iteration: what it compiles, what it brings to the host, what it changes."""

import dataclasses
import math
import shutil

import chex
import jax
import numpy as np
import pytest
from helpers import runs
from safetensors.numpy import load_file, save_file

from ragen_jax import starpo
from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.envs.base import VALIDATION
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.parallel import backend_choices
from ragen_jax.rollout.rollout import training_rollout_args
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import tasks, validation, weights
from ragen_jax.training.model import check_axes

EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def compilations():
    """A list that grows by one with every program that JAX builds or loads."""
    seen = []

    def listen(event: str, seconds: float, **_):
        if event == EVENT:
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def iterations(run, compilations):
    """Three iterations: (compilations, sizes fetched to the host, metrics, rollout)."""
    programs, state = programs_lib.make_programs(run), weights.new_state(run)
    seen = []
    for _ in range(3):
        before = len(compilations)
        with pytest.MonkeyPatch.context() as patch:
            fetched = watch_host(patch)
            state, metrics, rollout = starpo.iterate(run, programs, state)
        seen.append((len(compilations) - before, fetched, metrics, rollout))
    return seen, state


def watch_host(patch) -> list[tuple]:
    """The shapes of the arrays whose numbers Python has looked at from now on."""
    kind, seen = type(jax.numpy.zeros(())), []
    original = kind._value

    def look(array):
        seen.append(array.shape)
        return original.fget(array)

    patch.setattr(kind, "_value", property(look))

    # On CPU these two read an array's memory without asking it.
    def watched(make):
        def convert(value, *args, **kwargs):
            if isinstance(value, jax.Array):
                seen.append(value.shape)
            return make(value, *args, **kwargs)

        return convert

    for name in ("asarray", "array"):
        patch.setattr(np, name, watched(getattr(np, name)))
    return seen


@pytest.mark.parametrize(
    ("sizes", "reason", "remedy"),
    [
        ((1, 3, 1), "3 does not divide its width, 32", "fsdp to 1 and mesh.data to 3"),
        ((2, 6, 1), "6 does not divide its width, 32", "fsdp to 4 and mesh.data to 3"),
        (
            (1, 2, 7),
            "7 does not divide its heads (4, and 2 of keys), nor its MLP's width (48),"
            " nor its vocabulary (",
            "tensor to 1 and mesh.data to 7",
        ),
    ],
)
def test_an_axis_that_would_share_none_of_the_model_is_refused(
    run, sizes, reason, remedy
):
    with pytest.raises(SettingsError) as caught:
        check_axes(run.model, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    message = str(caught.value)
    assert f"would shard no parameter of the model, since {reason}" in message
    assert message.endswith(f": set mesh.{remedy}")


def test_an_axis_that_shares_some_of_the_model_is_not_refused(run):
    # 3 does not divide its heads, but its MLP.
    check_axes(run.model, {"data": 3, "fsdp": 4, "tensor": 3})


def test_a_run_whose_mesh_shares_none_of_the_model_is_refused():
    with pytest.raises(SettingsError, match="set mesh.fsdp to 1 and mesh.data to 3"):
        runs.prepare_on(1, 3, 1)


def test_the_watch_sees_every_way_to_the_host(monkeypatch):
    fetched = watch_host(monkeypatch)
    array = jax.numpy.arange(6).reshape(1, 6)
    np.asarray(array[:, :2])
    jax.device_get(array[:, :3])
    float(array[0, 4])
    assert [shape for shape in fetched if shape != (6,)] == [(1, 2), (1, 3), ()]


def test_only_the_first_iteration_compiles(iterations):
    counts = [count for count, *_ in iterations[0]]
    assert counts[0] >= 3  # Rollout, summary, update.
    assert counts[1:] == [0, 0]


@pytest.mark.slow
def test_runs_that_differ_in_seed_alone_share_their_programs(run):
    texts = []
    for one in (run, runs.prepare(seed=run.settings.seed + 1)):
        programs = programs_lib.make_programs(one)
        rollout = programs.rollout.lower(*programs_lib.abstract_rollout_arguments(one))
        update = programs.update.lower(
            *programs_lib.abstract_update_arguments(one, rollout)
        )
        texts.append((rollout.as_text(), update.as_text()))
    assert texts[0] == texts[1]


def test_the_host_sees_numbers_and_no_batch(iterations):
    for _, fetched, metrics, _ in iterations[0]:
        assert len(fetched) >= len(metrics) - 3  # Three are times.
        assert set(fetched) == {()}


def test_every_metric_is_a_finite_float_and_counts_are_right(iterations):
    seen, state = iterations
    for number, (_, _, metrics, _) in enumerate(seen, start=1):
        assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
        assert metrics["update/count"] == number
        assert metrics["update/skipped_nonfinite"] == 0
        assert metrics["update/logprob_gap_max"] < 1e-4
    assert (int(state.iteration), int(state.updates)) == (3, 3)


def test_metrics_agree_with_the_episodes_they_are_of(iterations):
    for _, _, metrics, rollout in iterations[0]:
        episodes = jax.device_get(rollout.episodes)
        assert metrics["train/success"] == pytest.approx(episodes.success.mean())
        returns = episodes.reward.sum(axis=1)
        assert metrics["train/return"] == pytest.approx(returns.mean())
        spread = [returns[episodes.group == g].std(ddof=1) for g in (0, 1)]
        assert metrics["filter/reward_std"] == pytest.approx(np.mean(spread))
        assert metrics["rollout/turns"] == pytest.approx(episodes.turns.mean())
        sampled = episodes.reply_tokens.sum()
        turns = episodes.turns.sum()
        assert metrics["rollout/reply_tokens"] == pytest.approx(sampled / turns)
        assert jax.device_get(rollout.rows.is_reply).sum() == sampled


def test_each_iteration_plays_other_levels_with_the_policy_of_its_time(iterations):
    rollouts = [rollout for *_, rollout in iterations[0]]
    one, two = (jax.device_get(rollout.rows.tokens) for rollout in rollouts[:2])
    assert (one != two).any()
    for updates, rollout in enumerate(rollouts):
        assert jax.device_get(rollout.rows.policy_version).tolist() == [updates] * 8


def test_the_abstract_state_is_the_real_ones_shape(run):
    state, abstract = weights.new_state(run), weights.abstract_state(run)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for real, said in zip(
        jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
    ):
        assert (real.shape, real.dtype) == (said.shape, said.dtype)
        assert real.sharding.is_equivalent_to(said.sharding, real.ndim)


def test_a_run_without_a_critic_has_none_and_reports_none():
    run = runs.prepare(estimator="grpo", model__compute_dtype="bfloat16")
    abstract = weights.abstract_state(run)
    assert abstract.critic == {} and jax.tree.leaves(abstract.actor)
    assert run.model.dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    folder = shutil.copytree(runs.model(), tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, path)
    run = runs.prepare(model__path=str(folder))
    with pytest.raises(UserError, match=r"weights of layers\.up are not finite"):
        weights.load_parameters(run.model)


def test_weights_in_8_bits_sample_for_training_and_never_for_an_evaluation():
    run = runs.prepare(**{"rollout.decode_weights": "int8"})
    assert run.rollout_context.decode_weights == "int8"
    assert tasks.rollout_context(run.model, ()).decode_weights == "same"


@pytest.mark.slow
def test_an_evaluation_that_compiles_ahead_is_the_one_that_compiles_when_called(
    run, compilations, monkeypatch
):
    made = programs_lib.make_programs(run)
    evaluators = validation.make_evaluators(run, rollouts=1, prompts=8)
    actor = weights.new_state(run).actor
    given = dict(split=VALIDATION, prompts=8)
    alone = validation.evaluate(run, evaluators, actor, **given)
    ahead = dataclasses.replace(backend_choices.choices(), compiles_all_first=True)
    monkeypatch.setattr(backend_choices, "choices", lambda: ahead)
    programs, evaluators = programs_lib.compile_ahead(run, made, evaluators)
    for one in evaluators.values():
        one.rollout._compiled.result()
    before = len(compilations)
    found = validation.evaluate(run, evaluators, actor, **given)
    assert len(compilations) == before
    for label, score in alone.items():
        np.testing.assert_array_equal(found[label].by_level, score.by_level)
        assert found[label].metrics() == score.metrics()


@pytest.mark.slow
def test_indicators_that_compile_ahead_are_those_that_compile_when_called(
    run, compilations
):
    made = programs_lib.make_programs(run)
    programs, _ = programs_lib.compile_ahead(run, made, {})
    state = weights.new_state(run)
    args = training_rollout_args(run.settings, state.iteration, state.updates)
    rollout = programs.rollout(state.actor, run.tokens, args)
    monitor = monitor_lib.make_monitor(
        run, run.model.tokenizer, programs_lib.update_plan(run)
    )
    wanted = monitor_lib.measure(monitor, run, rollout)
    assert "health/distinct_thoughts" in wanted
    ahead = programs_lib.compile_indicators(run, programs, monitor)
    ahead.measure._compiled.result()
    programs.update._compiled.result()  # No thread is left to compile at the end.
    before = len(compilations)
    assert monitor_lib.measure(ahead, run, rollout) == wanted
    assert len(compilations) == before
    assert ahead.score is monitor.score


@pytest.mark.slow
def test_where_all_compiles_first_the_scores_of_recorded_episodes_do_too(
    run, compilations, monkeypatch
):
    first = dataclasses.replace(backend_choices.choices(), compiles_all_first=True)
    monkeypatch.setattr(backend_choices, "choices", lambda: first)
    made = programs_lib.make_programs(run)
    programs, _ = programs_lib.compile_ahead(run, made, {})
    monitor = monitor_lib.make_monitor(
        run, run.model.tokenizer, programs_lib.update_plan(run)
    )
    ahead = programs_lib.compile_indicators(run, programs, monitor)
    state, _, rollout = starpo.iterate(run, programs, weights.new_state(run))
    record = (programs.frozen, programs.reference, rollout.rows, rollout.episodes)
    trained = state.replace(iteration=state.iteration - 1)  # As monitor.record does.
    before = len(compilations)
    found = ahead.score(trained, *record)
    assert len(compilations) == before
    chex.assert_trees_all_equal(found, monitor.score(trained, *record))
