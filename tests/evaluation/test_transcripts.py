"""Transcripts say what the recorded tokens say, and nothing else."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import models
from helpers.chat_templates import QWEN3
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.transcripts import Transcript, Turn
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.text import agent_template, chat_template, phrases, prompts
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import END_OF_TURN, OTHER_STOP, REPLY_BUDGET

PROMPTS, ROLLOUTS, FIRST = 6, 4, 3


@pytest.fixture(scope="module")
def task():
    return models.make_task(
        TurnLimits(3, 2, 4, 5), settings=FrozenLake(3, 0.9, success_probability=1.0)
    )


@pytest.fixture(scope="module")
def record(task):
    """Rows and episodes of levels 3 to 8, on the host."""
    plan = task.plan(prompts=PROMPTS, group_size=ROLLOUTS)
    rollout = rollout_lib.make_rollout(task.rollout_context(models.one_device()), plan)
    result = rollout(
        task.parameters, (task.tokens,), models.call(3, first_prompt=np.int32(FIRST))
    )
    return jax.device_get((result.rows, result.episodes))


@pytest.fixture(scope="module")
def reader(task):
    return transcripts.make_reader(task.tokenizer, task.env, task.dialogue)


@pytest.fixture(scope="module")
def found(reader, record):
    return transcripts.read(reader, *record, first_episode=FIRST * ROLLOUTS)


def test_the_record_holds_all_that_transcripts_distinguish(record):
    _, episodes = record
    played = episodes.reply_end[episodes.reply_end > 0]
    assert set(played.tolist()) == {END_OF_TURN, REPLY_BUDGET}
    assert 0 < episodes.success.mean() < 1
    assert len(set(episodes.end.tolist())) == 3


def test_messages_through_the_template_are_the_decoded_row(task, record, found):
    """And what a reply that ran out of tokens lacks at the row's end."""
    rows, _ = record
    for transcript, tokens, turn in zip(found, rows.tokens, rows.turn, strict=True):
        row = task.tokenizer.decode(tokens[turn >= 0])
        whole = task.tokenizer.apply_chat_template(
            transcript.messages(), tokenize=False
        )
        assert whole in (row + "\n", row + "<|im_end|>\n")


@pytest.mark.parametrize("model", ["the model's own", "qwen3"])
def test_an_exports_prompt_and_the_reply_to_it_are_a_rows_beginning(
    model, task, record, found
):
    """Qwen3's pieces are the same: it differs in that it drops earlier thoughts."""
    tokenizer = copy.copy(task.tokenizer)
    if model == "qwen3":
        tokenizer.chat_template = QWEN3
    assert chat_template.cut_pieces(tokenizer, model) == task.pieces
    agent, _ = agent_template.for_agent(tokenizer, task.pieces, thinking=True)
    rows, _ = record
    for transcript, tokens, turn in zip(found, rows.tokens, rows.turn, strict=True):
        row, messages = task.tokenizer.decode(tokens[turn >= 0]), transcript.messages()
        for index in range(2, len(messages), 2):
            prompt = agent.apply_chat_template(
                messages[:index], tokenize=False, add_generation_prompt=True
            )
            assert prompt.endswith("<think>")
            reply = messages[index]["content"].removeprefix("<think>")
            assert row.startswith(prompt + reply)


def test_text_of_tokens_is_what_the_tokenizer_decodes(task, reader):
    rng = np.random.default_rng(0)
    for tokens in rng.integers(0, len(task.tokenizer), (300, 12)):
        text = transcripts.text_of_tokens(reader, tokens)
        assert text == task.tokenizer.decode(tokens)


def test_ids_that_stand_for_no_token_read_as_nothing(task, reader):
    beyond = np.array([task.config.vocabulary - 1])
    assert transcripts.text_of_tokens(reader, beyond) == ""


def test_messages_begin_with_the_system_prompt_and_take_turns(task, found):
    for transcript in found:
        system, *others = transcript.messages()
        assert system == {"role": "system", "content": task.dialogue.system}
        roles = [message["role"] for message in others]
        assert roles == ["user", "assistant"] * len(transcript.turns)
        assert others[0]["content"].startswith("State:\n")
        for user in others[2::2]:
            assert user["content"].startswith("Reward: ")
        for reply in others[1::2]:
            assert reply["content"].startswith("<think>")
            assert not reply["content"].endswith("<|im_end|>")


def test_rewards_validity_and_actions_are_the_records(record, found):
    _, episodes = record
    for index, transcript in enumerate(found):
        turns = int(episodes.turns[index])
        line = transcript.to_dict()
        assert line["rewards"] == episodes.reward[index, :turns].tolist()
        assert line["valid"] == episodes.is_valid[index, :turns].tolist()
        counts = [len(actions) for actions in line["actions"]]
        assert counts == episodes.actions[index, :turns].tolist()
        assert line["success"] == bool(episodes.success[index])
        assert line["level"] == FIRST + index // ROLLOUTS
        assert line["rollout"] == index % ROLLOUTS


def test_actions_lead_from_each_state_to_the_next(found):
    """The ice is firm here, so the named actions alone must explain what is seen."""
    moves = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    seen = 0
    for transcript in found:
        for turn, following in zip(
            transcript.turns, transcript.turns[1:], strict=False
        ):
            at = _player(turn.message)
            for action in turn.actions:
                at = np.clip(np.add(at, moves[action]), 0, 2)
            assert tuple(at) == _player(following.message)
            seen += len(turn.actions)
    assert seen > 5


def test_of_answers_read_in_part_no_part_is_said_to_be_the_action(reader, record):
    """The first may be what could not be read."""
    free = dataclasses.replace(reader.env, answer_bytes=64, read_action=max)
    reader = dataclasses.replace(reader, env=free)
    seen = {True: 0, False: 0}
    for transcript in transcripts.read(reader, *record, first_episode=FIRST * ROLLOUTS):
        for turn in transcript.turns:
            count = len(turn.actions)
            answer = turn.reply.partition("<answer>")[2].partition("</answer>")[0]
            parts = [part.strip().lower() for part in answer.split("||")]
            expected = parts[:count] if turn.is_valid else ["?"] * count
            assert list(turn.actions) == expected
            seen[turn.is_valid] += count
    assert min(seen.values()) > 0


def _player(message: str) -> tuple[int, int]:
    board = message.split("State:\n")[1].splitlines()[:3]
    (place,) = [
        (row, line.split().index("P"))
        for row, line in enumerate(board)
        if "P" in line.split()
    ]
    return place


def test_why_an_episode_ended_is_put_in_words(record, found):
    _, episodes = record
    for transcript, end in zip(found, episodes.end, strict=True):
        assert (
            transcript.end
            == ["", "environment_done", "out_of_turns", "out_of_actions"][end]
        )


def test_a_line_survives_json(found):
    for transcript in found:
        line = transcript.to_dict()
        assert json.loads(json.dumps(line, ensure_ascii=False)) == line


def test_a_reward_that_is_no_number_is_written_as_none(found):
    turn = dataclasses.replace(found[0].turns[0], reward=float("nan"))
    line = dataclasses.replace(found[0], turns=(turn,)).to_dict()
    assert line["rewards"] == [None]
    json.dumps(line, allow_nan=False)


def test_episodes_that_were_not_asked_for_are_left_out(reader, record, found):
    rows, episodes = record
    few = jax.tree.map(lambda x: x[:5], episodes)
    assert transcripts.read(reader, rows, few, first_episode=12) == found[:5]


def test_a_reply_is_read_without_another_stop_token_that_ends_it(reader, record, found):
    rows, episodes = record
    index, turn = np.argwhere(episodes.reply_end == END_OF_TURN)[0]
    row = transcripts.rows_of_turns(rows)[FIRST * ROLLOUTS + index, turn]
    tokens, ends = rows.tokens.copy(), episodes.reply_end.copy()
    tokens[row, rows.turn_end[row] & (rows.turn[row] == turn)] = 0
    ends[index, turn] = OTHER_STOP
    other = rows.replace(tokens=tokens), episodes.replace(reply_end=ends)
    assert transcripts.read(reader, *other, first_episode=FIRST * ROLLOUTS) == found


def test_a_row_of_another_dialogue_is_refused(reader, record):
    rows, episodes = record
    shifted = rows.replace(tokens=np.roll(rows.tokens, 1, axis=1))
    with pytest.raises(ValueError, match="not a message of this run's dialogue"):
        transcripts.read(reader, shifted, episodes, first_episode=FIRST * ROLLOUTS)


def _composing(tokenizer: dict) -> None:
    tokenizer["normalizer"] = {"type": "NFC"}


def _swallowing(side: str):
    def change(tokenizer: dict) -> None:
        for token in tokenizer["added_tokens"]:
            token[side] = token["special"]

    return change


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (_composing, True),
        (_swallowing("lstrip"), True),
        (_swallowing("rstrip"), True),
        (lambda tokenizer: None, False),
    ],
    ids=["composes", "strips the left", "strips the right", "keeps"],
)
def test_a_message_is_found_in_what_the_tokenizer_makes_of_the_texts_around(
    task, change, differs
):
    # Two characters, of which NFC makes one.
    opening, *others = task.dialogue.phrases
    opening = opening.replace(task.dialogue.system, "Un cafe\u0301")
    dialogue = dataclasses.replace(task.dialogue, phrases=(opening, *others))
    described = json.loads(task.tokenizer.backend_tokenizer.to_str())
    change(described)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described))
    )
    reader = transcripts.make_reader(tokenizer, task.env, dialogue)
    openings, ending = prompts.frames(dialogue)
    for before in openings:
        fed = [phrases.encode(tokenizer, x) for x in (before, "State: x", ending)]
        text = transcripts.text_of_tokens(reader, np.concatenate(fed).astype(int))
        assert transcripts._message(reader, text) == "State: x"
    whole = reader.openings == openings and reader.ending == ending
    assert whole != differs


def test_without_thinking_replies_begin_with_the_answer():
    task = models.make_task(thinking=False)
    reader = transcripts.make_reader(task.tokenizer, task.env, task.dialogue)
    assert transcripts.text_of_tokens(reader, np.array([], np.int32)) == ""
    assert reader.dialogue.reply_prefix == "<answer>"


# For a reader's eyes ----------------------------------------------------------------


def test_a_readable_episode_shows_state_thought_actions_and_reward():
    first = Turn(
        message="State:\n P _ G\nTurn 1 of 3. Actions left: 4.",
        reply="<think> Go\nright.</think><answer>Right || Right</answer>",
        actions=("Right",),
        reward=0.0,
        is_valid=True,
    )
    second = Turn(
        message="Reward: 0.0\nState:\n _ P G\nTurn 2 of 3. Actions left: 3.",
        reply="<think>\x1b[2J no end",
        actions=(),
        reward=-0.5,
        is_valid=False,
    )
    transcript = Transcript(7, 1, "Rules.", (first, second), False, "out_of_turns")
    expected = """\
Level 7, episode 1: not solved, out of turns after 2 turns and 1 actions
    State:
     P _ G
    Turn 1 of 3. Actions left: 4.
  thought   Go right.
  answer   <answer>Right || Right</answer>
  actions  Right
  reward   0
    Reward: 0.0
    State:
     _ P G
    Turn 2 of 3. Actions left: 3.
  INVALID  <think>·[2J no end
  actions  none
  reward   -0.5"""
    assert transcripts.readable(transcript) == expected


def test_a_solved_episode_of_one_turn_says_so():
    turn = Turn("State:\n P G", "<answer>Right</answer>", ("Right",), 1.0, True)
    text = transcripts.readable(Transcript(0, 0, "", (turn,), True, "environment_done"))
    assert text.startswith(
        "Level 0, episode 0: solved, environment done after 1 turn and 1 actions\n"
    )
    assert "  answer   <answer>Right</answer>\n" in text and "thought" not in text
