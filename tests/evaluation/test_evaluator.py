"""Figures against brute force, and evaluations that batches and devices leave alone."""

import dataclasses
import functools
import io
import itertools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, updates
from helpers.records import episodes_of
from jax.sharding import AxisType

from ragen_jax.envs.base import TEST, VALIDATION
from ragen_jax.errors import UserError
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation import recording
from ragen_jax.evaluation.report import Played
from ragen_jax.parallel.mesh import AXES
from ragen_jax.reporting.console import Console
from ragen_jax.rollout import plan as plan_lib
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout.types import RolloutOptions
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.training import final_test, messages, validation

# Figures ---------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_of_k_with_a_success(rollouts):
    rng = np.random.default_rng(rollouts)
    solved = rng.random((9, rollouts)) < rng.random((9, 1))
    found = evaluator_lib.pass_at_k(solved.sum(axis=1), rollouts)
    assert len(found) == rollouts
    for k, by_level in enumerate(found, start=1):
        shares = [
            np.mean([any(subset) for subset in itertools.combinations(level, k)])
            for level in solved
        ]
        np.testing.assert_allclose(by_level, shares, rtol=0, atol=1e-12)


def test_pass_at_k_of_many_rollouts_neither_overflows_nor_leaves_0_to_1():
    solved = np.array([0, 1, 500, 999, 1000])
    found = evaluator_lib.pass_at_k(solved, 1000).mean(axis=1)
    assert found[0] == pytest.approx(0.5)
    # One level is never solved; another by 1 of 1000, so by 999 of them nearly always.
    assert found[-1] == pytest.approx(0.8)
    assert found[-2] == pytest.approx((0 + 0.999 + 3) / 5)
    assert (np.diff(found) >= -1e-12).all()


def test_the_reported_ks_are_powers_of_two_and_the_last():
    assert evaluator_lib.reported_k(1) == (1,)
    assert evaluator_lib.reported_k(2) == (1, 2)
    assert evaluator_lib.reported_k(8) == (1, 2, 4, 8)
    assert evaluator_lib.reported_k(11) == (1, 2, 4, 8, 11)


def _episodes():
    """Three levels, two episodes each; up to two turns."""
    episodes = episodes_of(
        [[1, 0], [0, 0], [0, 1], [0.5, 1], [0, 0], [0, 0]],
        is_valid=[[1, 0], [1, 1], [1, 1], [0, 1], [0, 0], [0, 1]],
        turns=[1, 2, 2, 2, 1, 2],
    )
    return jax.tree.map(np.asarray, episodes).replace(
        success=np.array([True, False, True, True, False, False]),
        actions=np.array([[3, 0], [1, 1], [2, 2], [0, 2], [0, 0], [0, 4]]),
        reply_tokens=np.array([[10, 99], [20, 30], [5, 5], [1, 9], [40, 99], [20, 20]]),
    )


def test_a_score_is_worked_out_by_hand():
    score = evaluator_lib.score(_episodes(), rollouts=2)
    assert score.success == pytest.approx(0.5)
    # Levels' success 0.5, 1, 0: sample variance 0.25, over 3 levels.
    assert score.success_standard_error == pytest.approx(math.sqrt(0.25 / 3))
    assert score.pass_at_k == pytest.approx((0.5, 2 / 3))
    # Levels' pass@2 1, 1, 0: sample variance 1/3.
    errors = (math.sqrt(0.25 / 3), math.sqrt(1 / 9))
    assert score.pass_at_k_standard_error == pytest.approx(errors)
    assert score.turns == pytest.approx(10 / 6)
    assert score.actions == pytest.approx(15 / 6)
    # Turns that were not played (99 tokens, not valid) do not count.
    assert score.reply_tokens == pytest.approx(160 / 10)
    assert score.valid_reply_rate == pytest.approx(7 / 10)
    # Levels' mean returns 0.5, 1.25, 0.
    assert score.mean_return == pytest.approx(3.5 / 6)
    error = np.std([0.5, 1.25, 0], ddof=1) / math.sqrt(3)
    assert score.mean_return_standard_error == pytest.approx(error)
    assert score.by_level.tolist() == [[True, False], [True, True], [False, False]]


def test_the_standard_error_is_the_spread_of_means_of_fresh_levels():
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 0.5, (4000, 25))
    means = rates.mean(axis=1)
    reported = [evaluator_lib.standard_error(levels) for levels in rates]
    # Within 4 standard errors, 1 / sqrt(2 * 4000), of a standard deviation.
    assert np.sqrt(np.mean(np.square(reported))) == pytest.approx(
        means.std(), rel=0.045
    )


def test_the_standard_error_of_one_level_is_not_known():
    episodes = jax.tree.map(lambda x: x[:2], _episodes())
    score = evaluator_lib.score(episodes, rollouts=2)
    assert score.success == 0.5 and math.isnan(score.success_standard_error)


def test_the_test_of_a_single_level_knows_no_standard_error():
    one = jax.tree.map(lambda x: x[:2], _episodes())
    score = evaluator_lib.score(one, rollouts=2)
    record = final_test._record(score, score)
    text = json.dumps(record, allow_nan=False)  # NaN is no JSON.
    assert json.loads(text)["after"]["success_standard_error"] is None
    table = messages.before_after(
        types.SimpleNamespace(settings=updates.settings()), record
    )
    assert "gain on the same levels: +0.0% ± unknown (standard error)" in table
    assert "nan" not in table and "success" in table


def test_pass_at_k_goes_to_the_sinks_where_levels_have_several_episodes():
    names = evaluator_lib.score(_episodes(), rollouts=2).metrics()
    assert names["pass_at_1"] == names["success"]
    assert names["pass_at_2"] == pytest.approx(2 / 3)
    assert names["pass_at_2_standard_error"] == pytest.approx(1 / 3)
    single = evaluator_lib.score(_episodes(), rollouts=1).metrics()
    assert not [name for name in single if name.startswith("pass")]


def test_environments_of_the_same_levels_tell_no_more_than_one_of_them():
    score = evaluator_lib.score(_episodes(), rollouts=2)
    found = validation.named("test", {"rooms": score, "other_symbols": score})
    assert found["test/success"] == pytest.approx(score.success)
    assert found["test/success_standard_error"] == pytest.approx(math.sqrt(0.25 / 3))
    assert found["test/rooms/success"] == score.success
    # Levels' means of both 0.75, 0.5, 0.25: sample variance 1/16.
    turned = dataclasses.replace(score, by_level=score.by_level[[1, 2, 0]])
    found = validation.named("test", {"rooms": score, "others": turned})
    assert found["test/success_standard_error"] == pytest.approx(math.sqrt(1 / 48))


def test_a_paired_difference_cancels_what_levels_have_in_common():
    before = evaluator_lib.score(_episodes(), rollouts=2)
    gain = np.array([[0, 1], [0, 0], [1, 0]], bool)
    after = dataclasses.replace(before, by_level=before.by_level | gain)
    # Each level's gain: 0.5, 0, 0.5.
    mean, error = evaluator_lib.paired_difference(before, after)
    assert mean == pytest.approx(1 / 3)
    assert error == pytest.approx(np.std([0.5, 0, 0.5], ddof=1) / math.sqrt(3))


def test_the_test_at_the_end_says_what_levels_gained_from_before_to_after():
    before = evaluator_lib.score(_episodes(), rollouts=2)
    solved = np.array([[1, 1], [0, 1], [1, 1]], bool)
    after = dataclasses.replace(before, success=5 / 6, by_level=solved)
    record = final_test._record(before, after)
    assert record["before_by_level"] == [0.5, 1, 0]
    assert record["after_by_level"] == [1, 0.5, 1]
    assert record["before"]["success"] == pytest.approx(3 / 6)
    assert record["after"]["success"] == pytest.approx(5 / 6)
    # Each level's gain: 0.5, -0.5, 1.
    assert record["gain"] == pytest.approx(1 / 3)
    error = np.std([0.5, -0.5, 1], ddof=1) / math.sqrt(3)
    assert record["gain_standard_error"] == pytest.approx(error)


# Batches ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task():
    return models.make_task(TurnLimits(3, 2, 4, 5))


def _evaluator(task, mesh, **sizes):
    usual = dict(prompts=6, rollouts=2, slots=0, shards=1)
    options = RolloutOptions(decode_chunk=2, buckets=1)
    return evaluator_lib.make_evaluator(
        task.rollout_context(mesh),
        task.share(),
        task.tokens,
        options,
        **(usual | sizes),
    )


def test_every_batch_gives_shards_whole_levels_or_equal_parts_of_one(task, monkeypatch):
    plans = []

    def make_plan(*args, **sizes):
        plans.append(plan_lib.make_plan(*args, **sizes))
        return plans[-1]

    known = types.SimpleNamespace(
        make_rollout=lambda context, plan: (context.tasks, plan)
    )
    monkeypatch.setattr(
        evaluator_lib, "plan_lib", types.SimpleNamespace(make_plan=make_plan)
    )
    monkeypatch.setattr(evaluator_lib, "rollout_lib", known)
    mesh = models.one_device()  # Nothing is compiled here, so that any will do.
    sizes = itertools.product((1, 3, 8), (1, 2, 6), (0, 4, 32), (1, 2, 3, 8, 12))
    for prompts, rollouts, slots, shards in sizes:
        evaluator = _evaluator(
            task, mesh, prompts=prompts, rollouts=rollouts, slots=slots, shards=shards
        )
        (played,), plan = evaluator.rollout
        assert plan is plans[-1] and played.prompts == evaluator.prompts
        assert evaluator.rollouts == rollouts
        assert (evaluator.label, evaluator.tokens) == ("lake", (task.tokens,))
        level = np.arange(evaluator.prompts * rollouts) // rollouts
        parts = np.split(level, shards)  # An error unless they are equal.
        if any(len(set(part)) > 1 for part in parts):
            assert all(len(part) % rollouts == 0 for part in parts)
        if slots >= rollouts * shards:
            assert len(level) <= slots
        if slots:  # Of which each shard has equally many, the last perhaps too many.
            assert (plans[-1].slots - 1) * shards < slots
        else:
            assert plans[-1].slots * shards == len(level)
            assert evaluator.prompts >= prompts


def test_levels_are_played_in_batches_of_which_the_last_may_hold_too_many():
    """Even levels are solved."""
    calls, batches = [], []

    def rollout(parameters, tokens, call):
        assert (parameters, tokens) == ("actor", "tokens")
        calls.append(call)
        level = int(call.first_prompt) + np.arange(4) // 2
        made = episodes_of([[0.0]] * 4).replace(success=level % 2 == 0)
        too_long = np.array([[int(call.seed == 8)], [2 * (call.seed == 8)]])
        rows = jnp.asarray(level)
        return rollout_lib.Rollout(rows, made, passes=None, too_long=too_long)

    evaluator = evaluator_lib.Evaluator(
        "lake", rollout, "tokens", prompts=2, rollouts=2
    )
    evaluate = functools.partial(evaluator_lib.evaluate, evaluator, "actor")
    play = dict(prompts=5, split=TEST, seed=9)
    score = evaluate(**play, temperature=0.5, on_batch=lambda *x: batches.append(x))
    assert score.by_level.tolist() == [[i % 2 == 0] * 2 for i in range(5)]
    assert [call.first_prompt for call in calls] == [0, 2, 4]
    for call in calls:
        assert (call.seed, call.split, call.iteration) == (9, TEST, 0)
        assert (call.temperature, call.policy_version) == (0.5, 0)
    # Each batch with all of its rows, but only the episodes that were asked for.
    assert [first for first, _, _ in batches] == [0, 2, 4]
    assert [rows.tolist() for _, rows, _ in batches] == [
        [first, first, first + 1, first + 1] for first in (0, 2, 4)
    ]
    assert all(isinstance(rows, np.ndarray) for _, rows, _ in batches)
    shown = [episodes.success.tolist() for _, _, episodes in batches]
    assert shown == [[True, True, False, False]] * 2 + [[True, True]]
    evaluate(**play, temperature=0.0)
    assert 0 < calls[-1].temperature < 1e-5
    # Rows that are not what the environment showed have no score.
    with pytest.raises(UserError, match="^lake shows more tokens .* lost, 3 of them"):
        evaluate(**play | {"seed": 8}, temperature=0.5)


def test_every_evaluation_plays_as_it_is_asked_to(monkeypatch):
    """And not by the temperature of training."""
    settings = updates.settings(seed=4, evaluation__temperature=0.25)
    assert settings.rollout.temperature != 0.25
    taken = []

    def evaluate(evaluator, actor, *, on_batch, **how):
        taken.append((evaluator, actor, how))
        return "score"

    monkeypatch.setattr(evaluator_lib, "evaluate", evaluate)
    played = Played("who", "model", settings, "validation", 7, 2, 0.75)
    console = Console(io.StringIO())
    recording.play("lake", "actor", None, played, console, out=None, show=0)
    how = dict(prompts=7, split=VALIDATION, seed=4, temperature=0.75)
    assert taken == [("lake", "actor", how)]
    run = types.SimpleNamespace(settings=settings)
    validation.evaluate(run, {"x": "lake"}, "actor", split=TEST, prompts=9)
    how = dict(prompts=9, split=TEST, seed=4, temperature=0.25)
    assert taken[1:] == [("lake", "actor", how)]


@pytest.fixture(scope="module")
def whole(task):
    """Six levels at once, two episodes each, and what a batch shows."""
    seen = []
    evaluator = _evaluator(task, models.one_device())
    play = dict(prompts=6, split=TEST, seed=16, temperature=1.0)
    score = evaluator_lib.evaluate(
        evaluator, task.parameters, **play, on_batch=lambda *x: seen.append(x)
    )
    return evaluator, play, score, seen


@pytest.mark.slow
def test_the_levels_solved_are_some_and_the_batch_shows_every_episode(whole):
    _, _, score, seen = whole
    assert 0 < score.success < 1  # Else the tests below would compare nothing.
    ((first, rows, episodes),) = seen
    assert first == 0 and isinstance(rows.tokens, np.ndarray)
    assert episodes.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (score.by_level.ravel() == episodes.success).all()


@pytest.mark.slow
def test_the_same_call_gives_the_same_score_and_another_seed_or_split_another(
    task, whole
):
    evaluator, play, score, seen = whole

    def prompts(**changes):
        shown = []
        evaluator_lib.evaluate(
            evaluator,
            task.parameters,
            **(play | changes),
            on_batch=lambda first, rows, episodes: shown.append(rows.tokens),
        )
        return shown[0]

    tokens = seen[0][1].tokens
    np.testing.assert_array_equal(prompts(), tokens)
    assert (prompts(seed=17) != tokens).any()
    assert (prompts(split=VALIDATION) != tokens).any()


@pytest.mark.slow
def test_batches_on_several_devices_play_the_same_episodes(task, whole):
    """Two levels at a time, each shared by two devices; the last is not asked for."""
    _, play, score, seen = whole
    types = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((4, 1, 1), AXES, types, devices=jax.devices()[:4])
    evaluator = _evaluator(task, mesh, slots=4, shards=4)
    assert evaluator.prompts == 2
    parts = []
    shared = evaluator_lib.evaluate(
        evaluator,
        task.parameters,
        **play | {"prompts": 5},
        on_batch=lambda *x: parts.append(x),
    )
    np.testing.assert_array_equal(shared.by_level, score.by_level[:5])
    assert [first for first, _, _ in parts] == [0, 2, 4]
    assert [len(episodes.turns) for _, _, episodes in parts] == [4, 4, 2]
    rows = jax.tree.map(lambda *x: np.concatenate(x), *[rows for _, rows, _ in parts])
    np.testing.assert_array_equal(rows.tokens, seen[0][1].tokens)
    np.testing.assert_array_equal(rows.episode, seen[0][1].episode)


@pytest.mark.slow
def test_a_level_with_more_episodes_than_slots_has_the_same_episodes(task, whole):
    _, play, score, _ = whole
    evaluator = _evaluator(task, models.one_device(), slots=1)
    assert evaluator.prompts == 1
    waited = evaluator_lib.evaluate(evaluator, task.parameters, **play)
    np.testing.assert_array_equal(waited.by_level, score.by_level)
