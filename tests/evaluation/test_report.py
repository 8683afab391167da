"""The table and the record of an evaluation."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.records import episodes_of

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation import report as report_lib
from ragen_jax.reporting import metrics


@pytest.fixture(scope="module")
def played():
    config = cli.load_config(f"{ROOT}/configs/frozenlake.py").to_dict()
    return report_lib.Played(
        who="runs/a/checkpoints/3, the last",
        policy="model",
        settings=settings_lib.from_dict(config),
        split="test",
        prompts=2,
        rollouts=3,
        temperature=0.5,
    )


@pytest.fixture(scope="module")
def score():
    """Two levels; one solved in two of three episodes, the other never."""
    episodes = jax.tree.map(np.asarray, episodes_of([[1.0], [1.0], *[[0.0]] * 4]))
    solved = np.array([True, True, False, False, False, False])
    return evaluator_lib.score(episodes.replace(success=solved), rollouts=3)


def test_the_table_shows_success_pass_at_k_and_who_played_what(score, played):
    table = report_lib.table(score, played)
    # Levels' success 2/3 and 0: sample std 0.471, over sqrt(2).
    for part in (
        "played by      runs/a/checkpoints/3, the last",
        "2 test levels of frozen_lake, 3 episodes each, seed 0",
        "success_probability 0.8",
        "5 turns, 10 actions",
        "temperature    0.5",
        "success        33.3% ± 33.3% (standard error)",
        "pass@1         33.3% ± 33.3%",
        "pass@2         50.0% ± 50.0%",
        "pass@3         50.0% ± 50.0%",
        "return         0.333 ± 0.333",
        "valid replies  100.0%",
    ):
        assert part in table, part


def test_an_environment_without_settings_in_the_config_is_shown_as_it_comes(
    score, played
):
    env = dataclasses.replace(played.settings.env, options=())
    settings = dataclasses.replace(played.settings, env=env)
    table = report_lib.table(score, dataclasses.replace(played, settings=settings))
    assert "settings       as it comes" in table


def test_a_window_is_reported_and_recorded(score, played):
    rollout = dataclasses.replace(played.settings.rollout, history="window", window=2)
    settings = dataclasses.replace(played.settings, rollout=rollout)
    played = dataclasses.replace(played, settings=settings)
    assert "5 turns, 10 actions, 2 turns in sight" in report_lib.table(score, played)
    limits = report_lib.figures(score, played, 1.0)["limits"]
    assert (limits["history"], limits["window"]) == ("window", 2)


def test_a_greedy_evaluation_and_a_single_level_say_so(score, played):
    greedy = dataclasses.replace(played, temperature=0.0, rollouts=1)
    one = dataclasses.replace(score, success_standard_error=float("nan"))
    table = report_lib.table(one, greedy)
    assert "0 (the likeliest token)" in table
    assert "33.3% ± unknown" in table
    assert "1 episode each" in table


def test_a_baselines_table_says_what_it_leaves_out(score, played):
    table = report_lib.table(score, dataclasses.replace(played, policy="random"))
    assert "10 actions, one after the other, turns not counted" in table
    assert "reply" not in table and "temperature" not in table


def test_figures_are_json_with_documented_names(score, played):
    one = dataclasses.replace(score, success_standard_error=float("nan"))
    figures = report_lib.figures(one, played, 1.23)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["success"] == pytest.approx(1 / 3)
    assert figures["success_standard_error"] is None
    assert figures["pass_at_3"] == pytest.approx(0.5)
    assert figures["seconds"] == 1.2
    assert figures["env"]["size"] == 4
    assert figures["limits"]["turns"] == 5
    for name in score.metrics():
        assert name in figures
        assert metrics.describe(f"test/{name}").meaning


def test_figures_of_a_baseline_hold_nothing_about_replies(score, played):
    figures = report_lib.figures(
        score, dataclasses.replace(played, policy="planner"), 0
    )
    assert figures["temperature"] is None
    assert not {"reply_tokens", "valid_reply_rate", "turns"} & set(figures)
