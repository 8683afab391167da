"""Estimators, filters and losses from the command line, three iterations each."""

import pytest
from helpers import runs

from ragen_jax.settings import ESTIMATORS, FILTER_STRATEGIES

# Every estimator, every strategy, and the optional terms.
RUNS = {
    "tokens with a critic": {"estimator": "ppo", "filter.strategy": "none"},
    "groups": {
        "estimator": "grpo",
        "filter.strategy": "top_fraction",
        "filter.fraction": 0.5,
        "loss.kl": 0.01,
        "loss.kl_kind": "k1",
        "loss.kl_in": "reward",
    },
    "groups, one left out": {
        "estimator": "rloo",
        "filter.strategy": "top_count",
        "filter.count": 1,
    },
    "rewards to go": {
        "estimator": "reinforce_pp",
        "filter.strategy": "top_p",
        "filter.fraction": 0.9,
        "filter.fraction_end": 0.5,
        "loss.surrogate": "cispo",
        "loss.cut_replies": "mask",
    },
    "baselines": {
        "estimator": "reinforce_pp_baseline",
        "filter.strategy": "top_p",
        "filter.metric": "return_mean",
        "filter.prefer": "smallest",
        "filter.reweight": True,
    },
    "turns with a critic": {
        "estimator": "bi_level_gae",
        "filter.strategy": "within_group",
        "filter.fraction": 0.5,
        "loss.kl": 0.01,
        "loss.kl_end": 0.0,
        "optimizer.critic_schedule": "linear",
    },
    "turns in rows of their own": {
        "estimator": "turn_wise_gae",
        "rollout.history": "single",
        "filter.strategy": "top_p_softmax",
        "filter.metric": "entropy",
        "filter.loss_scale": "sqrt",
        "loss.entropy_on": "thought",
    },
    "turns in groups, episodes used twice": {
        "estimator": "turn_grpo",
        "filter.strategy": "min_p",
        "filter.metric": "length",
        "optimizer.reuse": 2,
        "loss.dual_clip": 3.0,
        "loss.sampler_correction": 2.0,
    },
    "sequences": {
        "estimator": "dr_grpo",
        "filter.strategy": "percentile_range",
        "filter.keep_zero": True,
        "loss.ratio": "sequence",
        "loss.aggregation": "sequence_mean_token_sum_norm",
        "loss.kl": 0.01,
        "loss.kl_kind": "k3+",
    },
}


# Without what other tests run and compile: validation, recorded episodes.
USUAL = {
    "iterations": 3,
    "filter.keep_zero": True,
    "every.evaluate": 0,
    "health.record_every": 0,
}


def test_every_estimator_and_every_strategy_is_run():
    assert {one["estimator"] for one in RUNS.values()} == set(ESTIMATORS)
    assert {one["filter.strategy"] for one in RUNS.values()} == set(FILTER_STRATEGIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_with(name, tmp_path):
    changes = USUAL | RUNS[name]
    arguments = runs.arguments(tmp_path, **_keys(changes))
    code, _, errors = runs.finish(runs.start(arguments))
    assert code == 0, errors
    seen = [one for one in runs.records(tmp_path) if "update/count" in one]
    assert len(seen) == 3
    assert seen[-1]["update/skipped_nonfinite"] == 0
    if changes["filter.strategy"] != "top_p":  # Which may find nothing to keep.
        assert seen[-1]["update/count"] > 0
    gaps = [one["update/logprob_gap_max"] for one in seen]
    learned = [gap for gap in gaps if gap is not None]  # None: nothing was kept
    assert learned or changes["filter.strategy"] == "top_p"
    assert all(gap < 1e-3 for gap in learned)
    if "optimizer.reuse" in changes:
        assert seen[0]["update/policy_lag"] >= 1


def _keys(changes: dict) -> dict:
    return {key.replace(".", "__"): value for key, value in changes.items()}
