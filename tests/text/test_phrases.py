"""Joining tokenized phrases equals concatenating their tokens in Python."""

import functools
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import make_tokenizer

from ragen_jax.errors import UserError
from ragen_jax.text.phrases import (
    PhraseTokens,
    encode,
    join_phrases,
    tokenize_phrases,
)

CAPACITY = 24
join = jax.jit(jax.vmap(functools.partial(join_phrases, capacity=CAPACITY), (None, 0)))


@pytest.fixture(scope="module")
def table():
    """Phrases of 0 to 6 tokens, tokens 1 to 999."""
    lengths = np.array([3, 0, 6, 1, 1, 5, 2])
    tokens = np.random.default_rng(0).integers(1, 1000, (7, 6))
    tokens[np.arange(6)[None] >= lengths[:, None]] = 0
    return PhraseTokens(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))


def test_a_join_is_worked_out_by_hand():
    table = PhraseTokens(jnp.array([[7, 8], [9, 0]]), jnp.array([2, 1]))
    tokens, length = join(table, jnp.array([[1, -1, 0, 1]]))
    assert tokens[0].tolist() == [9, 7, 8, 9] + [0] * (CAPACITY - 4)
    assert length.tolist() == [4]


def test_random_joins_equal_pythons_concatenation(table):
    ids = np.random.default_rng(1).integers(-2, 7, (2000, 4))
    tokens, lengths = map(np.asarray, join(table, jnp.asarray(ids)))
    rows, sizes = np.asarray(table.tokens), np.asarray(table.lengths)
    for sequence, joined, length in zip(ids, tokens, lengths, strict=True):
        expected = [t for i in sequence if i >= 0 for t in rows[i, : sizes[i]]]
        assert length == len(expected)
        assert joined.tolist() == expected + [0] * (CAPACITY - len(expected))


def test_what_does_not_fit_is_left_out_and_still_counted(table):
    tokens, lengths = join(table, jnp.full((1, 5), 2))
    assert lengths.tolist() == [30]
    assert tokens[0].tolist() == (table.tokens[2].tolist() * 5)[:CAPACITY]


def test_phrases_are_tokenized_one_by_one_and_control_tokens_recognized():
    tokenizer = make_tokenizer()
    phrases = ("<|im_start|>system\n", "", " _ G\n", "√", "Actions left: 10.")
    table = tokenize_phrases(tokenizer, phrases)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert table.tokens[0, 0] == start
    for phrase, row, length in zip(phrases, table.tokens, table.lengths, strict=True):
        assert tokenizer.decode(row[:length]) == phrase
        assert not row[length:].any()


class _PanicError(BaseException):
    """As the tokenizers' library in Rust raises it."""


@pytest.mark.parametrize(
    ("raised", "caught"),
    [(KeyboardInterrupt, KeyboardInterrupt), (_PanicError, UserError)],
)
def test_a_tokenizer_that_breaks_down_is_named_and_ctrl_c_still_works(raised, caught):
    def fail(*given, **options):
        raise raised("stack")

    tokenizer = types.SimpleNamespace(encode=fail, name_or_path="folder/x")
    said = "^folder/x: the tokenizer cannot cut 'a b' .*Error: stack|^stack$"
    with pytest.raises(caught, match=said):
        encode(tokenizer, "a b")


def test_joined_phrases_read_as_the_joined_texts():
    tokenizer, rng = make_tokenizer(), random.Random(3)
    alphabet = "abc √_\n|<>()12,é🙂"
    phrases = tuple(
        "".join(rng.choices(alphabet, k=rng.randint(0, 3))) for _ in range(50)
    )
    table = tokenize_phrases(tokenizer, phrases)
    ids = np.random.default_rng(2).integers(-1, 50, (200, 3))
    capacity = 3 * int(table.lengths.max())
    whole = jax.jit(jax.vmap(lambda ids: join_phrases(table, ids, capacity)))
    tokens, lengths = map(np.asarray, whole(jnp.asarray(ids)))
    for sequence, joined, length in zip(ids, tokens, lengths, strict=True):
        text = "".join(phrases[i] for i in sequence if i >= 0)
        assert tokenizer.decode(joined[:length]) == text
