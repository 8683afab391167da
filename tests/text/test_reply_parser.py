"""The device parser against hand-written cases and against the regex reference."""

import functools
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen_jax.text import reference_parser, reply_automaton, reply_parser, token_bytes

NAMES = ("Left", "up", "Turn", "turn left", "u")
MOST = 3  # max_actions
PREFIX = {True: b"<think>", False: b"<answer>"}

# Reply, actions, is_valid, is_closed; the prompt ends in <think> and MOST is 3.
THOUGHT_CASES = [
    (b"a</think><answer>left || up</answer>", (0, 1), True, True),
    (b"</think>\n\r\t\v\f <answer>UP</answer> left||<answer>", (1,), True, True),
    (b"</think><answer>lEfT||Turn||turn Left||u</answer>", (0, 2, 3), True, True),
    (b"</think><answer>u||u||u||what</answer>", (4, 4, 4), False, True),
    (b"</think><answer>left||jump||up</answer>", (0, 1), False, True),
    (b"</think><answer></answer>", (), False, True),
    (b"</think><answer> || ||</answer>", (), False, True),
    (b"</think><answer>||\tleft\x0b||||up||</answer>", (0, 1), True, True),
    (b"</think><answer>left|||up</answer>", (0,), False, True),
    (b"</think><answer>left||||up</answer>", (0, 1), True, True),
    (b"</think><answer>left | up</answer>", (), False, True),
    (b"</think><answer>left|</answer>", (), False, True),
    (b"</think><answer>left<</answer>", (), False, True),
    (b"</think><answer>left</ans</answer>", (), False, True),
    (b"</think><answer>left</ans||up</answer>", (1,), False, True),
    (b"</think><answer>turn  left||turn left</answer>", (3,), False, True),
    (b"</think><answer>turn \t||turn\tleft</answer>", (2,), False, True),
    (b"</think><answer>lef t||le</answer>", (), False, True),
    (b"</think><answer>left\xa0||u\xc3\xbc</answer>", (), False, True),
    (b"</think><answer>left\x00||\x1cup||\x85u</answer>", (), False, True),
    (b"</think><answer>left || up</answer", (), False, False),
    (b"</think><answer>left</Answer>", (), False, False),
    (b"</think>.<answer>up</answer>", (), False, False),
    (b"<answer>up</answer>", (), False, False),
    (b"<answer>up</think> <answer>u</answer>", (4,), True, True),
    (b"</think></think><answer>u</answer>", (4,), True, True),
    (b"</think> <</think><answer>u</answer>", (4,), True, True),
    (b"</think> </think>\n<answer>u</answer>", (4,), True, True),
    (b"</think><<answer>u</answer>", (), False, False),
    (b"</think><ans</think><answer>u</answer>", (4,), True, True),
    (b"</think><</think ><answer>u</answer>", (), False, False),
    (b"</think><a/think><answer>u</answer>", (), False, False),
    (b"</think> < answer>u</answer>", (), False, False),
    (b"<</think><answer>u</answer>", (4,), True, True),
    (b"<think></think><answer><answer>u</answer>", (), False, True),
    (b"</think><answer>u||</think><answer>up</answer>", (4,), False, True),
    (b"", (), False, False),
]
PLAIN_CASES = [
    (b"left || up</answer>", (0, 1), True, True),
    (b"</think><answer>left</answer>", (), False, True),
    (b"u||<answer>up</answer>", (4,), False, True),
    (b"</answer>u</answer>", (), False, True),
    (b"u", (), False, False),
]


@pytest.mark.parametrize("thinking", [True, False])
def test_hand_written_replies_mean_what_they_should(thinking):
    cases = THOUGHT_CASES if thinking else PLAIN_CASES
    table = tuple(bytes([byte]) for byte in range(256))
    tables = reply_parser.reply_tables(table, NAMES, PREFIX[thinking], thinking)
    expected = [reference_parser.ParsedReply(*case[1:]) for case in cases]

    on_host = [
        reference_parser.parse_reply(PREFIX[thinking], case[0], NAMES, MOST, thinking)
        for case in cases
    ]
    assert on_host == expected
    _check_on_device(tables, [[*case[0]] for case in cases], expected)


@pytest.mark.parametrize("thinking", [True, False])
def test_every_short_sequence_of_chosen_pieces_agrees_with_the_reference(thinking):
    pieces = (
        b"</think>",
        b"<answer>",
        b"</answer>",
        b"<",
        b"|",
        b" ",
        b"u",
        b"/",
        b"||",
    )
    tables = reply_parser.reply_tables(pieces, NAMES, PREFIX[thinking], thinking)
    tokens = [list(ids) for ids in itertools.product(range(len(pieces)), repeat=5)]
    expected = _parse_all(pieces, tokens, thinking, PREFIX[thinking])
    _check_on_device(tables, tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [True, False])
def test_near_misses_in_merged_tokens_agree_with_the_reference(thinking):
    rng = random.Random(1)
    texts = [_near_miss(rng, thinking) for _ in range(20_000)]
    table = _merged_vocabulary()
    cut = _Cutter(table)
    tokens = [cut(text, rng) for text in texts]
    tables = reply_parser.reply_tables(table, NAMES, PREFIX[thinking], thinking)
    assert tables.emitted_actions.shape[1] >= 2  # Some token ends several segments.

    expected = _parse_all(table, tokens, thinking, PREFIX[thinking])
    _check_has_every_outcome(expected)
    _check_on_device(tables, tokens, expected)


@pytest.mark.parametrize("thinking", [True, False])
def test_near_misses_byte_by_byte_agree_with_the_reference(thinking):
    rng = random.Random(2)
    texts = [_near_miss(rng, thinking) for _ in range(20_000)]
    table = (*(bytes([byte]) for byte in range(256)), b"")
    tokens = [[*text] for text in texts]
    for ids in tokens[::2]:
        ids.insert(rng.randint(0, len(ids)), 256)
    tables = reply_parser.reply_tables(table, NAMES, PREFIX[thinking], thinking)
    expected = _parse_all(table, tokens, thinking, PREFIX[thinking])
    _check_has_every_outcome(expected)
    _check_on_device(tables, tokens, expected)


def test_random_tokens_agree_with_the_reference():
    rng = random.Random(3)
    table = _merged_vocabulary()
    # Mostly tokens that touch the form; else nearly all replies are mere thought.
    weights = [20 if re.search(rb"[<|>]", token) else 1 for token in table]
    tokens = rng.choices(range(len(table)), weights, k=20_000 * 40)
    tokens = [tokens[i : i + 40] for i in range(0, len(tokens), 40)]
    tables = reply_parser.reply_tables(table, NAMES, b"<answer>", False)
    expected = _parse_all(table, tokens, False, b"<answer>")
    assert sum(parsed.is_closed for parsed in expected) > 2000
    _check_on_device(tables, tokens, expected)


@pytest.mark.parametrize(
    "prefix", [b"", b"<think>so</think> <ans", b"x<think></think><answer> tu", b"<thi"]
)
def test_any_prefix_without_a_whole_segment_may_begin_the_reply(prefix):
    rng = random.Random(4)
    whole = [b"<think>" + _near_miss(rng, True) for _ in range(2000)]
    texts = [text.removeprefix(prefix) for text in whole]
    texts += [
        b"nk>a</think><answer>left</answer>",
        b"rn||up</answer>",
        b"wer>u</answer>",
    ]
    table = tuple(bytes([byte]) for byte in range(256))
    tables = reply_parser.reply_tables(table, NAMES, prefix, True)
    expected = _parse_all(table, texts, True, prefix)
    assert any(parsed.is_valid for parsed in expected)
    _check_on_device(tables, [[*text] for text in texts], expected)


def test_a_closed_reply_never_changes_again():
    pieces = (b"u||up</answer>", b"||", b"left</answer>", b"<answer>left", b"x||")
    tables = reply_parser.reply_tables(pieces, NAMES, b"<answer>", False)
    closed = reply_parser.read_token(
        tables, reply_parser.start_reply(tables, MOST), jnp.int32(0)
    )
    np.testing.assert_array_equal(closed.actions, [4, 1, -1])
    assert reply_parser.is_valid(tables, closed)
    for token in range(len(pieces)):
        jax.tree.map(
            np.testing.assert_array_equal,
            reply_parser.read_token(tables, closed, jnp.int32(token)),
            closed,
        )


def test_actions_of_an_open_reply_are_withheld():
    tables = reply_parser.reply_tables((b"u||up",), NAMES, b"<answer>", False)
    reply = reply_parser.read_token(
        tables, reply_parser.start_reply(tables, MOST), jnp.int32(0)
    )
    assert int(reply.count) == 1
    np.testing.assert_array_equal(
        reply_parser.final_actions(tables, reply), [-1, -1, -1]
    )
    assert not reply_parser.is_closed(tables, reply)
    assert not reply_parser.is_valid(tables, reply)


def test_the_count_stops_where_the_room_for_actions_ends():
    tables = reply_parser.reply_tables((b"u||up||",), NAMES, b"<answer>", False)
    reply = reply_parser.start_reply(tables, MOST)
    for count in (2, 3, 3):
        reply = reply_parser.read_token(tables, reply, jnp.int32(0))
        assert int(reply.count) == count
    np.testing.assert_array_equal(reply.actions, [4, 1, 4])


def test_equal_states_are_merged():
    # One name of one letter. After <answer>: blank, u, other text; a `|` after each
    # of them; `<` to `</answer` after each (8 x 3); closed.
    built = reply_automaton.build_automaton(["u"], b"<answer>", thinking=False)
    assert len(built.next_state) == 3 + 3 + 8 * 3 + 1


@pytest.mark.parametrize(
    "names", [("left", "LEFT "), ("left", " "), ("a|b",), ("<a",), ("a>",)]
)
def test_rejects_names_that_a_reply_cannot_distinguish(names):
    with pytest.raises(ValueError, match="rename"):
        reply_parser.reply_tables((b"a",), names, b"<think>", True)


def test_long_names_are_told_apart_in_a_few_rounds(monkeypatch):
    group_rows, rounds = reply_automaton._group_rows, []
    monkeypatch.setattr(
        reply_automaton, "_group_rows", lambda x: rounds.append(0) or group_rows(x)
    )
    names = ["left" * 100, "left" * 50, "right"]
    built = reply_automaton.build_automaton(names, b"<answer>", thinking=False)
    assert len(rounds) < 12
    # Beginnings; after each name blank, for one it is the end of; other text; a `|` and
    # a beginning of `</answer>` after each name, nothing and other text; closed.
    assert len(built.next_state) == (1 + 400 + 5) + 1 + 1 + 9 * 5 + 1


def test_too_many_names_are_refused_before_their_states_are_built(monkeypatch):
    monkeypatch.delattr(reply_automaton, "_explore")
    names = [f"w{number}" for number in range(4000)]
    with pytest.raises(
        ValueError, match="^4000 action names give at least 40[0-9]* st"
    ):
        reply_parser.reply_tables((b"a",), names, b"<think>", True)


def test_rejects_a_prefix_that_already_holds_an_action():
    with pytest.raises(ValueError, match="end it in <think> or <answer>"):
        reply_parser.reply_tables((b"a",), NAMES, b"<answer>left||", False)


def test_rejects_a_turn_without_actions():
    tables = reply_parser.reply_tables((b"a",), NAMES, b"<answer>", False)
    with pytest.raises(ValueError, match="max_actions=0"):
        reply_parser.start_reply(tables, 0)


def _parse_all(table, tokens, thinking, prefix):
    return [
        reference_parser.parse_reply(
            prefix, b"".join([table[i] for i in ids]), NAMES, MOST, thinking
        )
        for ids in tokens
    ]


def _check_has_every_outcome(expected):
    """Fails if the inputs of a fuzz test are too one-sided to find a mistake."""
    closed = sum(parsed.is_closed for parsed in expected)
    valid = sum(parsed.is_valid for parsed in expected)
    full = sum(len(parsed.actions) == MOST for parsed in expected)
    assert 0.2 < closed / len(expected) < 0.9
    assert 0.05 < valid / len(expected) < 0.6
    assert full > 0.02 * len(expected)


def _check_on_device(tables, tokens, expected):
    padded = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    actions, is_valid, is_closed = _read_all(tables, padded, lengths)

    expected_actions = [
        parsed.actions + (-1,) * (MOST - len(parsed.actions)) for parsed in expected
    ]
    np.testing.assert_array_equal(actions, expected_actions)
    np.testing.assert_array_equal(is_valid, [parsed.is_valid for parsed in expected])
    np.testing.assert_array_equal(is_closed, [parsed.is_closed for parsed in expected])


@jax.jit
def _read_all(tables, tokens, lengths):
    """int32[B, MOST] actions, bool[B] is valid, bool[B] is closed."""

    def read_one(tokens, length):
        def step(reply, at):
            position, token = at
            read = reply_parser.read_token(tables, reply, token)
            keep = functools.partial(jnp.where, position < length)
            return jax.tree.map(keep, read, reply), None

        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        start = reply_parser.start_reply(tables, MOST)
        reply, _ = jax.lax.scan(step, start, (positions, tokens))
        return (
            reply_parser.final_actions(tables, reply),
            reply_parser.is_valid(tables, reply),
            reply_parser.is_closed(tables, reply),
        )

    return jax.vmap(read_one)(tokens, lengths)


TAGS = (b"<think>", b"</think>", b"<answer>", b"</answer>")
WORDS = (b"left", b"Up", b"TURN", b"turn left", b"u", b"turn", b"up", b"uP", b"LEFT")
SPACES = (b"", b"", b"", b" ", b" ", b"\n", b"\t ", b"\v\f", b"\r")
NOISE = (
    *TAGS, *WORDS, b"<", b"<<", b"</", b"|", b"|||", b"||||", b">", b"</ans", b"</thi",
    b"<ans", b"\xff", b"\xc3", b"\xe2\x82", b"\xa0", b"\x00", b"\x1c", b"jump", b"tur",
    b"turn  left", b"</Answer>", b" ", b"x",
)  # fmt: skip


def _near_miss(rng, thinking):
    """A reply in the right form, most often broken in a place or two. Bytes."""
    names = [
        rng.choice(SPACES) + rng.choice(WORDS) + rng.choice(SPACES)
        for _ in range(min(rng.randint(0, 5), rng.randint(0, 5)))
    ]
    parts = [b"||".join(names), b"</answer>"]
    if thinking:
        parts[:0] = [
            rng.choice((b"", b"go", b"<", b"u||")), b"</think>",
            rng.choice(SPACES), b"<answer>",
        ]  # fmt: skip
    if rng.random() < 0.3:
        parts.append(rng.choice(NOISE))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        kind = rng.randrange(5)
        at = rng.randrange(len(parts))
        if kind == 0:  # Noise between two parts.
            parts.insert(at, rng.choice(NOISE))
        elif kind == 1 and len(parts) > 1:  # A part too few ...
            del parts[at]
        elif kind == 2:  # ... or twice.
            parts.insert(at, parts[at])
        else:  # Noise inside a part, or (kind 4) in place of one byte of it.
            cut = rng.randint(0, len(parts[at]))
            rest = parts[at][cut + (kind == 4) :]
            parts[at] = parts[at][:cut] + rng.choice(NOISE) + rest
    text = b"".join(parts)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.1 else text


@functools.cache
def _merged_vocabulary():
    """The bytes of a BPE's tokens, which begin and end anywhere in the form."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    rng = random.Random(0)
    corpus = [_near_miss(rng, i % 2 == 0) for i in range(2000)]
    bpe.train_from_iterator([text.decode(errors="ignore") for text in corpus], trainer)
    return token_bytes.token_bytes(PreTrainedTokenizerFast(tokenizer_object=bpe))


class _Cutter:
    """Cuts a text into tokens at random: far more ways than encoding knows."""

    def __init__(self, table):
        self.id_of = {token: index for index, token in enumerate(table) if token}
        self.silent = [index for index, token in enumerate(table) if not token]
        self.longest = max(map(len, table))

    def __call__(self, text, rng):
        ids = []
        while text:
            ends = [
                end
                for end in range(1, self.longest + 1)
                if end <= len(text) and text[:end] in self.id_of
            ]
            # Long tokens more often, so that most cuts hide inside of tokens.
            end = max(rng.choice(ends), rng.choice(ends))
            ids.append(self.id_of[text[:end]])
            text = text[end:]
            if rng.random() < 0.05:
                ids.append(rng.choice(self.silent))
        return ids
