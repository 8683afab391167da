"""Free-form answers and the places in thoughts, against plain Python on the bytes."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.text import free_form, reference_parser, reply_parser

LONGEST, MOST, TOKENS = 12, 3, 14  # bytes of an answer, actions, tokens of a reply
PIECES = (
    b"</think>",
    b"<answer>",
    b"</answer>",
    b"||",
    b"|",
    b" ",
    b"\x0b\n",
    b"u",
    b"U b",
    b"12",
    b"<",
    b"/answer>",
    b"x||y",
    b"k><answer>ab||",
    b"</thin",
    b"",
    b"(1, ",
    b"2)",
    b"(/, /)",
)


def read_action(text, length):
    """Texts of at most three bytes mean the sum of their bytes."""
    return jnp.where(length <= 3, text.astype(jnp.int32).sum(), reply_parser.NO_ACTION)


def read_text(text: bytes) -> int:
    return sum(text) if len(text) <= 3 else -1


@functools.cache
def tables(thinking, prefix=b""):
    prefix = prefix or (b"<think>" if thinking else b"<answer>")
    return reply_parser.reply_tables(PIECES, (), prefix, thinking, with_text=True)


def read_all(thinking, tokens, counts, landmarks=((1, 2), (-1, -1)), prefix=b""):
    """What the device makes of replies: actions, valid, closed, thought, grounded."""
    read = reader(thinking, prefix)
    return jax.device_get(read(tokens, counts, jnp.array(landmarks)))


@functools.cache
def reader(thinking, prefix):
    own = tables(thinking, prefix)

    def one(tokens, count, places):
        def read(reply, index):
            after = reply_parser.read_token(own, reply, tokens[index])
            keep = functools.partial(jnp.where, index < count)
            return jax.tree.map(keep, after, reply), None

        start = reply_parser.start_reply(own, MOST)
        reply, _ = jax.lax.scan(read, start, jnp.arange(TOKENS))
        found = free_form.read_answer(
            own, reply, tokens, count, read_action, LONGEST, MOST
        )
        grounded = free_form.grounded(own, reply, tokens, count, places)
        return *found, reply_parser.is_closed(own, reply), reply.thought, grounded

    return jax.jit(jax.vmap(one, (0, 0, None)))


def draw(thinking, replies_wanted):
    """int[n, TOKENS] random replies, most of them near the form; int[n] lengths."""
    rng = random.Random(0)
    drawn = []
    for _ in range(replies_wanted):
        reply = rng.choices(range(len(PIECES)), k=rng.randrange(TOKENS - 3))
        if thinking and rng.random() < 0.7:
            cut = rng.randrange(3)
            reply = [*reply[:cut], 0, 1, *reply[cut:]]
        if rng.random() < 0.6:
            reply.append(2)
        drawn.append(reply)
    table = np.zeros((len(drawn), TOKENS), np.int32)
    for row, reply in zip(table, drawn, strict=True):
        row[: len(reply)] = reply
    return table, np.array([len(reply) for reply in drawn])


@pytest.mark.parametrize(
    "thinking", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_random_replies_are_read_as_the_reference_reads_them(thinking):
    tokens, counts = draw(thinking, 30_000)
    actions, valid, closed, thought, grounded = read_all(thinking, tokens, counts)
    prefix = b"<think>" if thinking else b"<answer>"
    seen_valid = seen_grounded = 0
    for index, (row, count) in enumerate(zip(tokens, counts, strict=True)):
        pieces = [PIECES[i] for i in row[:count]]
        text = b"".join(pieces)
        expected = reference_parser.parse_free_form(
            prefix, text, read_text, LONGEST, MOST, thinking
        )
        got = tuple(actions[index].tolist())
        found = (got, bool(valid[index]), bool(closed[index]))
        filled = (reply_parser.NO_ACTION,) * (MOST - len(expected.actions))
        wanted = (expected.actions + filled, expected.is_valid, expected.is_closed)
        assert found == wanted, text
        seen_valid += expected.is_valid
        # The thought: what stands before the text of the answer.
        begun = re.search(rb"</think>\s*<answer>", text) if thinking else None
        end = begun.end() if begun else (len(text) if thinking else 0)
        lengths = np.cumsum([len(piece) for piece in pieces])
        before = int((lengths < end).sum()) if begun else count * thinking
        assert thought[index] == before, text
        assert grounded[index] == (b"(1, 2)" in text[:end]), text
        seen_grounded += grounded[index]
    assert seen_valid > 1000
    assert seen_grounded > 5 or not thinking


def test_a_thought_ends_where_the_answers_text_begins_in_whichever_token():
    """Answers "u b||12" and, begun within a token, "ab||u"; the others have none.

    The first thought also writes what the place (-1, -1), which is none, would be.
    """
    replies = (
        (
            b"(/, /)",
            b"(1, ",
            b"2)",
            b"</think>",
            b" ",
            b"<answer>",
            b"U b",
            b"||",
            b"12",
        ),
        (b"(1, ", b"</thin", b"k><answer>ab||", b"u"),
        (b"(1, ", b"2)", b" ", b"(1, "),
        (b"u",),
    )
    ends = (b"</answer>",), (b"</answer>",), (), (b"</answer>",)
    tokens, counts = np.zeros((4, TOKENS), np.int32), np.zeros(4, np.int32)
    for row, (reply, end) in enumerate(zip(replies, ends, strict=True)):
        counts[row] = len(reply + end)
        tokens[row, : counts[row]] = [PIECES.index(piece) for piece in reply + end]
    actions, valid, closed, thought, grounded = read_all(True, tokens, counts)
    none = reply_parser.NO_ACTION
    assert actions.tolist() == [[247, 99, none], [195, 117, none], *[[none] * 3] * 2]
    assert valid.tolist() == closed.tolist() == [True, True, False, False]
    assert thought.tolist() == [5, 2, 4, 2]
    assert grounded.tolist() == [1.0, 0.0, 1.0, 0.0]
    # Of two places one is named, and of none none.
    half = read_all(True, tokens, counts, ((1, 2), (1, 3)))[-1]
    assert half.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert not read_all(True, tokens, counts, ((-1, -1), (-1, -1)))[-1].any()


def test_the_bytes_of_a_reply_begin_where_they_are_asked_for_and_end_in_zeros():
    """The third token is not of the reply "(1, 2)"."""
    tokens = jnp.array([PIECES.index(piece) for piece in (b"(1, ", b"2)", b"12")])
    text = tables(True).text
    read = jax.jit(free_form.reply_bytes, static_argnums=4)
    found = read(text, tokens, jnp.int32(2), jnp.int32(3), 5)
    assert found.tolist() == [*b" 2)", 0, 0]


@pytest.mark.parametrize(
    ("answer", "actions", "is_valid"),
    [
        (b"ab||u", (195, 117), True),
        (b"  A ||| b", (97, 254), True),  # "| b" is a text: 124 + 32 + 98.
        (b"||||", (), False),
        (b"abcd||u", (117,), False),
        (b"u||u||u||abcd", (), False),  # Thirteen bytes: too long to be read at all.
        (b"u||u||u||abc", (117, 117, 117), True),  # The fourth is not read.
    ],
)
def test_hand_written_answers_mean_what_they_should(answer, actions, is_valid):
    parsed = reference_parser.parse_free_form(
        b"<answer>", answer + b"</answer>", read_text, LONGEST, MOST, False
    )
    assert (parsed.actions, parsed.is_valid) == (actions, is_valid)


@pytest.mark.parametrize(
    ("thinking", "prefix"),
    [
        *((False, b"<answer>\n"), (False, b"<answer>4 +"), (False, b"<answer>|")),
        (False, b"<answer></answer>"),
        (True, b"<think>so</think> <answer></ans"),
    ],
)
def test_a_prefix_in_an_answer_is_refused_whose_text_the_reply_would_lack(
    thinking, prefix
):
    with pytest.raises(ValueError, match="already holds text of an answer: end it in"):
        reply_parser.reply_tables(PIECES, (), prefix, thinking, with_text=True)


@pytest.mark.parametrize("prefix", [b"Sure.\n<think>so</think> <answ"])
def test_a_prefix_before_an_answers_text_may_be_any(prefix):
    tokens, counts = draw(True, 2000)
    actions, valid, closed, *_ = read_all(True, tokens, counts, prefix=prefix)
    for index, (row, count) in enumerate(zip(tokens, counts, strict=True)):
        text = b"".join(PIECES[i] for i in row[:count])
        expected = reference_parser.parse_free_form(
            prefix, text, read_text, LONGEST, MOST
        )
        found = actions[index][actions[index] != reply_parser.NO_ACTION].tolist()
        state = found, bool(valid[index]), bool(closed[index])
        wanted = list(expected.actions), expected.is_valid, expected.is_closed
        assert state == wanted, text
    assert valid.sum() > 20
