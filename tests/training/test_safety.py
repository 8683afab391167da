"""What a run says of iterations that taught nothing."""

import io
import json

import jax.numpy as jnp
import pytest
from helpers import runs

from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.training import final_test, safety, weights

_FORMAT = "no reply was valid, so that no action reached the environment"


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


def test_replies_without_form_are_the_cause_of_an_empty_batch_and_not_the_levels(run):
    counts = dict(skipped_empty=jnp.int32(4), empty_in_row=jnp.int32(4))
    empty = weights.new_state(run).replace(iteration=jnp.int32(4), **counts)
    limited = runs.settings(safety__max_empty_updates=3)
    for said in (
        safety.nothing_learned(run.settings, empty, 0.0, 0.0),
        safety.problem(limited, empty, [], 0.0, 0.0),
    ):
        assert f"for {_FORMAT}" in said and "easier" not in said
        assert "a model that writes the reply format" in said
        assert "rollout.reply_tokens" in said
    for valid in (0.1, float("nan")):
        said = safety.nothing_learned(run.settings, empty, 0.0, valid)
        assert "earned the same" in said and "an easier environment" in said


@pytest.mark.parametrize(("last", "is_form"), [(0.0, True), (0.25, False)])
def test_a_finished_run_reads_whether_any_reply_was_valid(run, tmp_path, last, is_form):
    counts = dict(iteration=jnp.int32(2), skipped_empty=jnp.int32(2))
    state = weights.new_state(run).replace(**counts)
    lines = [
        {"iteration": 1, "test/success": 0.0},
        {"iteration": 1, "filter/reward_std": 0.0, "rollout/valid_reply_rate": 0.0},
        {"iteration": 2, "filter/reward_std": 0.0, "rollout/valid_reply_rate": last},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / metrics.FILE).write_text(text)
    seen = io.StringIO()
    final_test._warn(run, state, tmp_path, console_lib.Console(seen))
    assert (_FORMAT in seen.getvalue()) == is_form
