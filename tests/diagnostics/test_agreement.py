"""Agreement of thoughts with answers, counted by hand."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from helpers import models, records

from ragen_jax.diagnostics.agreement import thought_agreement
from ragen_jax.evaluation import transcripts

# What each sampled token says; the prompt has written "<think>".
SAID = (
    b"I go RIGHT now",  # 0
    b"Up or down",
    b"   ",
    b"</think>",
    b"<answer>Right||Up</answer>",
    b"<answer>Left</answer>",  # 5
    b"<answer>Down</answer>",
    b"",  # the end of a turn
    b"Left, right?",  # a message of the environment, which no thought holds
    b"Right</answer>",
)
REPLIES = [
    [[0, 3, 4], [1, 3, 6]],  # both agree: Right, whatever its case, and Down
    [[1, 3, 5], [2, 3, 5]],  # Left was not thought of; nothing was thought
    [[0, 3, 4], []],  # would agree, but counts as invalid; the second was not played
]


@pytest.fixture(scope="module")
def reader():
    task = models.usual_task()
    made = transcripts.make_reader(task.tokenizer, task.env, task.dialogue)
    assert made.dialogue.reply_prefix == "<think>"
    return dataclasses.replace(made, token_bytes=SAID, written_bytes=SAID)


def record(replies):
    """(rows, episodes) of replies that each end in the end of a turn."""
    lines = ["".join("o" + "r" * len(r) + "R" for r in one if r) for one in replies]
    width = max(map(len, lines))
    tokens = [[t for r in one if r for t in (8, *r, 7)] for one in replies]
    rows = records.rows_of(
        *(line.ljust(width, ".") for line in lines), episode=[*range(len(lines))]
    )
    padded = [numbers + [7] * (width - len(numbers)) for numbers in tokens]
    episodes = records.episodes_of(
        [[0.0] * len(one) for one in replies],
        turns=[sum(map(bool, one)) for one in replies],
    )
    rows, episodes = jax.device_get((rows, episodes))
    return rows.replace(tokens=np.array(padded)), episodes


def test_two_of_three_thoughts_name_what_is_done(reader):
    rows, episodes = record(REPLIES)
    is_valid = np.array([[True, True], [True, True], [False, True]])
    episodes = episodes.replace(is_valid=is_valid)
    found = thought_agreement([reader], rows, episodes)
    assert found == pytest.approx(2 / 3)


def test_without_a_thought_there_is_no_agreement_to_speak_of(reader):
    rows, episodes = record([[[2, 3, 5]]])
    assert math.isnan(thought_agreement([reader], rows, episodes))
    answers = dataclasses.replace(reader.dialogue, reply_prefix="<answer>")
    answering = dataclasses.replace(reader, dialogue=answers)
    rows, episodes = record([[[9]]])
    assert math.isnan(thought_agreement([answering], rows, episodes))
