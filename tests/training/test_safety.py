"""What a run says of iterations that taught nothing."""

import io
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers import runs

from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.training import final_test, safety, weights
from ragen_jax.utils import workdir_files

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
        assert "first imitated demonstrations (docs/environments.md)" in said
        assert "rollout.reply_tokens" in said
    for valid in (0.1, float("nan")):
        said = safety.nothing_learned(run.settings, empty, 0.0, valid)
        assert "earned the same" in said and "an easier environment" in said


def test_where_the_budget_cut_most_replies_it_is_the_cause_and_to_be_raised(run):
    counts = dict(skipped_empty=jnp.int32(4), empty_in_row=jnp.int32(4))
    empty = weights.new_state(run).replace(iteration=jnp.int32(4), **counts)
    limited = runs.settings(safety__max_empty_updates=3)
    budget = f"rollout.reply_tokens = {limited.rollout.reply_tokens} cut off"
    for cut, is_budget in ((0.75, True), (0.5, False)):
        for said in (
            safety.nothing_learned(run.settings, empty, 0.0, 0.0, cut),
            safety.problem(limited, empty, [], 0.0, 0.0, cut),
        ):
            assert (f"no reply was valid, as {budget} 75% of them" in said) == is_budget
            assert ("begin with more rollout.reply_tokens" in said) == is_budget
            assert ("a model that writes the reply format" in said) != is_budget
    said = safety.nothing_learned(run.settings, empty, 0.0, 0.1, 0.75)
    assert "rollout.reply_tokens" not in said


@pytest.mark.parametrize(("cut", "is_budget"), [((0.25, 0.875), True), ((), False)])
def test_a_finished_run_reads_how_many_replies_were_cut(run, tmp_path, cut, is_budget):
    """Which runs of older versions did not record."""
    counts = dict(iteration=jnp.int32(2), skipped_empty=jnp.int32(2))
    line = {"iteration": 1, "filter/reward_std": 0.0, "rollout/valid_reply_rate": 0.0}
    lines = [line | {"rollout/cut_replies": share} for share in cut] or [line]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / metrics.FILE).write_text(text)
    state = weights.new_state(run).replace(**counts)
    said = final_test._nothing_learned(run, state, tmp_path)
    assert ("cut off 56% of them" in said) == is_budget


def test_that_nothing_was_learned_is_said_last_and_kept_with_the_results(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(final_test, "_record", lambda *sides: {"before": {}})
    monkeypatch.setattr(final_test.messages, "before_after", lambda *rest: "a table")
    monkeypatch.setattr(final_test.validation, "named", lambda *rest: {})
    writer, sides = SimpleNamespace(draw=lambda: None), {"lake": None}
    for warning in ("nothing was learned", ""):
        seen = io.StringIO()
        console = console_lib.Console(seen)
        final_test._write(run, 4, tmp_path, writer, console, sides, sides, warning)
        record = json.loads((tmp_path / workdir_files.TEST).read_text())
        assert record == {"before": {}} | ({"warning": warning} if warning else {})
        is_last = seen.getvalue().endswith(f"warning: {warning}\n")
        assert is_last == bool(warning)


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
    assert (_FORMAT in final_test._nothing_learned(run, state, tmp_path)) == is_form
