"""Iterations and evaluations in windows: every part of a run, once."""

import math

import jax
import numpy as np
import pytest
from helpers import runs

from ragen_jax import starpo
from ragen_jax.envs.base import VALIDATION
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation import transcripts
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import validation, weights

KINDS = {
    "window": dict(rollout__history="window", rollout__window=2),
    "single": dict(rollout__history="single"),
}
# Least to compile; a critic learns from windows in test_update.
USUAL = dict(estimator="grpo", loss__kl=0.0, rollout__turns=3)


@pytest.fixture(scope="module", params=KINDS)
def run(request):
    runs.share_compilations()
    return runs.prepare(**KINDS[request.param], **USUAL)


@pytest.mark.slow
def test_an_iteration_learns_from_every_turn_with_the_samplers_log_probs():
    run = runs.prepare(**KINDS["window"], **USUAL)
    programs, state = programs_lib.make_programs(run), weights.new_state(run)
    start = jax.device_get(state.actor)
    state, metrics, rollout = starpo.iterate(run, programs, state)
    rows, episodes = jax.device_get((rollout.rows, rollout.episodes))
    assert metrics["update/logprob_gap_max"] < 1e-4
    assert all(math.isfinite(value) for value in metrics.values())
    # Nothing is filtered: each turn played is a row, and 8 rows make an update.
    played = int(episodes.turns.sum())
    assert rows.is_reply.any(axis=1).sum() == played > 8
    assert metrics["update/count"] == int(state.updates) == -(-played // 8)
    assert metrics["rollout/episode_tokens"] == pytest.approx(
        (rows.episode >= 0).sum() / 8
    )
    assert metrics["rollout/reply_tokens"] == pytest.approx(
        rows.is_reply.sum() / played
    )
    held = [len(set(turn[turn >= 0].tolist())) for turn in rows.turn]
    assert max(held) == run.settings.rollout.window_turns
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), start, state.actor)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
def test_an_evaluation_plays_in_the_windows_of_the_run(run):
    (evaluator,) = validation.make_evaluators(run, rollouts=4, prompts=2).values()
    task = run.tasks[0]
    reader = transcripts.make_reader(run.model.tokenizer, task.env, task.dialogue)
    read = []

    def on_batch(first, rows, episodes):
        assert rows.tokens.shape[1] == run.plan.context
        read.extend(transcripts.read(reader, rows, episodes, first_episode=4 * first))

    score = evaluator_lib.evaluate(
        evaluator,
        weights.load_parameters(run.model),
        prompts=2,
        split=VALIDATION,
        seed=0,
        temperature=1.0,
        on_batch=on_batch,
    )
    assert len(read) == 8
    assert np.mean([len(one.turns) for one in read]) == score.turns
    assert np.mean([one.success for one in read]) == score.success
