"""The watch on validation success: a fall that training does not show."""

import dataclasses
import json
import math

import numpy as np
import pytest

from ragen_jax.diagnostics import alarm, health, validation_decline
from ragen_jax.diagnostics.validation_decline import Record
from ragen_jax.settings.schema import HealthSettings

# A run of Bandit by plain PPO (docs/studies/baseline.json, seed 2) at iterations 10,
# 20, ... 200: success on the validation's names, and in training.
FALLING = (0.992, 0.984, 0.977, 0.859, 0.922, 0.742, 0.688, 0.664, 0.617, 0.648)
FALLING += (0.609, 0.672, 0.68, 0.703, 0.734, 0.539, 0.633, 0.75, 0.703, 0.719)
TRAINING = (0.852, 0.922, 0.945, 0.969, 0.93, 0.969, 0.984, 0.984, 0.984, 0.992)
TRAINING += (0.969, 0.977, 1.0, 1.0, 0.984, 0.977, 0.961, 0.992, 0.984, 0.984)


def records_of(successes, levels: int = 128, every: int = 10) -> list[dict]:
    """Lines of metrics.jsonl of the run, with these validations."""
    lines = []
    for iteration in range(1, every * len(successes) + 1):
        train = TRAINING[(iteration - 1) // every]
        line = {"iteration": iteration, "train/success": train}
        if iteration % every == 0:
            success = successes[iteration // every - 1]
            error = math.sqrt(success * (1 - success) / levels)
            line |= {
                validation_decline.SUCCESS: success,
                validation_decline.ERROR: error,
            }
        lines.append(line)
    return lines


def test_a_fall_on_unseen_levels_is_a_collapse_though_training_goes_on_well():
    verdicts = alarm.replay(records_of(FALLING))
    found = [verdict for verdict in verdicts if verdict.level == alarm.COLLAPSE]
    assert len(found) == 131  # From the second validation that is too low on.
    assert found[0].ringing == ("validation/success",)
    assert found[0].healthy_until == 10
    assert found[0].sentence == (
        "collapse at iteration 70: validation/success fell from 99.2% (iteration 10)"
        " to 68.8%, whatever training shows"
    )


@pytest.mark.parametrize(
    ("successes", "error", "low"),
    [
        ((0.9, 0.79, 0.79), 0.0, 2),
        ((0.9, 0.81, 0.81), 0.0, 0),  # Not by more than 0.1.
        ((0.9, 0.79, 0.85, 0.79), 0.0, 1),  # Not twice running.
        ((0.9, 0.67, 0.67), 0.05, 2),  # Three errors of the difference are 0.212.
        ((0.9, 0.7, 0.7), 0.05, 0),
        ((0.9, 0.1, 0.1), float("nan"), 0),  # Of a single level no error is known.
        ((0.9, 0.7, 0.7, 0.95), 0.0, 0),  # A new best.
    ],
)
def test_how_low_and_how_often_by_hand(successes, error, low):
    record = Record()
    for iteration, success in enumerate(successes):
        metrics = {"validation/success": success}
        metrics |= {"validation/success_standard_error": error}
        record = validation_decline.update(record, iteration + 1, metrics)
        record = validation_decline.update(record, iteration + 1, {})  # None was made.
    assert record.low == low and record.is_decline == (low >= 2)
    # A checkpoint keeps it as JSON, which has no infinity.
    json.dumps(dataclasses.asdict(record), allow_nan=False)


def test_a_validation_whose_error_is_unknown_interrupts_a_fall():
    record = Record()
    validations = [(0.9, 0.0), (0.5, 0.0), (0.5, None), (0.5, 0.0)]
    for iteration, (success, error) in enumerate(validations, 1):
        metrics = {validation_decline.SUCCESS: success, validation_decline.ERROR: error}
        record = validation_decline.update(record, iteration, metrics)
    assert record.low == 1


def test_chance_alone_seldom_rings():
    # 300 runs of 20 validations of a policy that does not change.
    random = np.random.default_rng(0)
    rang = 0
    for true in (0.4, 0.8, 0.95):
        for successes in random.binomial(64, true, (100, 20)) / 64:
            verdicts = alarm.replay(records_of(successes.tolist(), 64, every=1))
            rang += any(verdict.level == alarm.COLLAPSE for verdict in verdicts)
    assert rang <= 3


def test_a_rollback_returns_to_the_best_validation_even_through_a_checkpoint():
    state = health.HealthState()
    for record in records_of(FALLING):
        saved = json.loads(json.dumps(health.to_json(state)))
        assert health.from_json(saved) == state
        asked = HealthSettings(on_collapse="rollback")
        state, decision = health.observe(state, record["iteration"], record, asked)
        if decision.action == health.ROLLBACK:
            break
    assert record["iteration"] == 70 and decision.healthy_until == 10


def test_the_last_of_equal_bests_is_healthy_though_a_sign_began_before_it():
    """Replies get worse from 37 on; validation is best at 40, and again at 50."""
    state = health.HealthState()
    asked = HealthSettings(on_collapse="rollback")
    for iteration in range(1, 71):
        line = {"rollout/valid_reply_rate": 1.0 if iteration < 37 else 0.9}
        if iteration % 10 == 0:
            success = {10: 0.2, 20: 0.4, 30: 0.6, 40: 0.8, 50: 0.8}.get(iteration, 0.5)
            line |= {
                validation_decline.SUCCESS: success,
                validation_decline.ERROR: 0.01,
            }
        state, decision = health.observe(state, iteration, line, asked)
    assert state.alarm.calm_before_signs(70) == 36
    assert decision.action == health.ROLLBACK and decision.healthy_until == 50


def test_a_checkpoint_from_before_validations_were_watched_still_counts():
    saved = alarm.to_json(alarm.AlarmState())
    del saved["validation"]
    assert alarm.from_json(saved) == alarm.AlarmState()
