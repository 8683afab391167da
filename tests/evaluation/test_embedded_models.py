"""The files of the embedded models play as the documents say."""

import pytest
from helpers import models, runs
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs.base import TEST
from ragen_jax.evaluation import transcripts
from ragen_jax.training import run as run_lib
from ragen_jax.training import validation, weights
from ragen_jax.trajectory import ANSWER_CLOSED


def play(variant: str, model: str, prompts: int):
    """The scores of a model in so many test rooms."""
    config = cli.load_config(f"{ROOT}/configs/sokoban.py:{variant}")
    config.evaluation.slots, config.model.path = prompts, model
    run = run_lib.prepare(settings_lib.from_dict(config.to_dict()), models.one_device())
    evaluators = validation.make_evaluators(run, rollouts=1, prompts=prompts)
    actor = weights.load_parameters(run.model)
    scores = validation.evaluate(run, evaluators, actor, split=TEST, prompts=prompts)
    (score,) = scores.values()
    return score


@pytest.mark.slow
def test_the_model_of_a_solvers_play_solves_most_rooms_that_it_has_not_seen():
    score = play("solver", "tiny_sokoban", 64)
    # 83 % of 256 rooms: of 64 below 60 % once in a million draws.
    assert score.success > 0.6 and score.valid_reply_rate > 0.99


@pytest.mark.slow
def test_the_model_of_larger_rooms_solves_some_of_a_size_that_it_has_not_seen():
    score = play("larger", "tiny_rooms", 20)
    # 58 % of 512 rooms: of 20 at most two once in 100,000 draws.
    assert score.success > 0.1 and score.valid_reply_rate > 0.99


def played(run, prompts: int):
    """Rows and episodes of one validation, which fits a batch."""
    seen = []
    validation.evaluate(
        run,
        validation.make_evaluators(run, rollouts=1, prompts=prompts),
        weights.load_parameters(run.model),
        split=TEST,
        prompts=prompts,
        on_batch=lambda label, first, *record: seen.append(record),
    )
    (record,) = seen
    return record


@pytest.mark.slow
def test_thoughts_are_grounded_by_the_places_that_stand_in_the_message_before_them():
    """The player's and the goal's on the lake, as a reader finds them in the text."""
    config = cli.load_config(f"{ROOT}/configs/frozenlake.py")
    config.reward.grounding = 0.1
    run = run_lib.prepare(settings_lib.from_dict(config.to_dict()), models.one_device())
    (rows, episodes), (task,) = played(run, prompts=16), run.tasks
    reader = transcripts.make_reader(run.model.tokenizer, task.env, task.dialogue)
    read = transcripts.read(reader, rows, episodes, first_episode=0)
    found = []
    for one, shares in zip(read, episodes.grounded, strict=True):
        for turn, share in zip(one.turns, shares.tolist(), strict=False):
            grid = turn.message.partition("State:\n")[2].splitlines()
            cells = [line.split() for line in grid[: len(grid[0].split())]]
            places = {
                cell: f"({row}, {column})"
                for row, line in enumerate(cells)
                for column, cell in enumerate(line)
            }
            thought = turn.reply.partition("<answer>")[0]
            assert share == sum(places[who] in thought for who in "PG") / 2
            found.append(share)
        assert not shares[len(one.turns) :].any()
    assert len(found) > 20 and 0.5 < sum(found) / len(found)


@pytest.mark.slow
def test_replies_end_at_the_answer_in_evaluations_where_they_do_in_training():
    run = runs.prepare(rollout__stop_at_answer=True)
    _, episodes = played(run, prompts=8)
    ends = episodes.reply_end
    assert (ends == ANSWER_CLOSED).sum() >= 8  # Replies without an answer go on.
