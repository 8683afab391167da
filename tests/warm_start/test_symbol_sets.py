"""Rooms in other symbols: what is drawn, and its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban.types import Sokoban
from ragen_jax.errors import SettingsError
from ragen_jax.models.io import sources
from ragen_jax.models.presets import SHAPES, TINY
from ragen_jax.text import chat_template, tiny_tokenizer
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.phrases import encode
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.warm_start import STAGES, checks, symbol_sets

LAYERS = SHAPES["tiny_symbols"].layers
LIMITS = TurnLimits(turns=5, actions_per_turn=5, actions=10, reply_tokens=64)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer.with_cells(
        sources.locate("tiny").read_tokenizer(), symbol_sets.SYMBOLS
    )


@pytest.fixture(scope="module")
def drawn():
    return symbol_sets.draw(Sokoban(), 40, seed=3)


def test_every_fourth_set_is_the_rooms_own_and_no_other_one_is(drawn):
    own = sokoban.make(Sokoban()).instruction
    assert [one.env.instruction == own for one in drawn] == [True, *[False] * 3] * 10


def test_no_set_shares_the_meaning_of_two_symbols_with_the_test(drawn):
    held_out = cli.load_config(f"{ROOT / 'configs' / 'sokoban.py'}:newvocab")
    assert tuple(held_out.env.symbols) == symbol_sets.HELD_OUT
    for symbols in _drawn_symbols(400):
        pairs = zip(symbols, symbol_sets.HELD_OUT, strict=True)
        assert sum(a == b for a, b in pairs) < 2 and symbols[0] not in "_OP"


@pytest.mark.slow
def test_each_symbol_of_the_test_is_drawn_for_what_it_means_there_too():
    # Else each would say what it is not. Of 300 sets a symbol has a given meaning in 5.
    counts = np.zeros(7)
    for symbols in _drawn_symbols(4000):
        counts += [a == b for a, b in zip(symbols, symbol_sets.HELD_OUT, strict=True)]
    expected = 3000 / len(symbol_sets.SYMBOLS)
    assert (np.abs(counts - expected) < 4 * expected**0.5).all()


def _drawn_symbols(count):
    """Drawn symbols, without the environments, which take their time."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbol_sets.sokoban, "make", lambda settings: settings.symbols)
        for index, one in enumerate(symbol_sets.draw(Sokoban(), count, seed=0)):
            if index % 4:
                made.append(one.env)
    return made


def test_every_symbol_is_one_token_behind_a_space(tokenizer):
    assert len(set(symbol_sets.SYMBOLS)) == len(symbol_sets.SYMBOLS) == 63
    ids = [encode(tokenizer, f" {symbol}") for symbol in symbol_sets.SYMBOLS]
    assert all(len(one) == 1 for one in ids) and len({one[0] for one in ids}) == 63
    assert len(tokenizer) == TINY.vocabulary
    for symbol, one in zip(symbol_sets.SYMBOLS, ids, strict=True):
        assert tokenizer.decode(one) == f" {symbol}"
        assert encode(tokenizer, f", {symbol} wall,")[1] == one[0]


def test_cells_leave_the_texts_of_the_environments_as_they_were(tokenizer):
    before = sources.locate("tiny").read_tokenizer()
    pieces = chat_template.cut_pieces(before, "tiny")
    env = sokoban.make(Sokoban())
    texts = prompts_lib.make_dialogue(env, LIMITS, pieces, thinking=True)
    changed = 0
    for text in texts.phrases:
        old, new = encode(before, text), encode(tokenizer, text)
        assert tokenizer.decode(new) == text
        changed += old != new
    assert changed <= 1, "the system prompt alone may have other pieces"


def test_cells_that_are_there_are_not_added_again(tokenizer):
    again = tiny_tokenizer.with_cells(tokenizer, symbol_sets.SYMBOLS)
    assert again.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("index", [0, 1, 17, 39])
def test_a_dialogue_in_other_symbols_has_the_tokens_of_its_own_texts(
    tokenizer, drawn, index
):
    pieces = chat_template.cut_pieces(tokenizer, "tiny")
    dialogues = [
        prompts_lib.make_dialogue(one.env, LIMITS, pieces, thinking=True)
        for one in drawn
    ]
    first, wanted = (
        prompts_lib.tokenize_dialogue(
            dialogues[i], drawn[i].env, pieces, tokenizer, TINY.vocabulary
        )
        for i in (0, index)
    )
    tables = symbol_sets.tokenize(dialogues, tokenizer)
    found = symbol_sets.with_symbols(
        first, tables, jnp.int32(index), dialogues[0].env_offset
    ).phrases
    np.testing.assert_array_equal(found.lengths, wanted.phrases.lengths)
    for row, other, length in zip(
        found.tokens, wanted.phrases.tokens, np.asarray(found.lengths), strict=True
    ):
        np.testing.assert_array_equal(row[:length], other[:length])
    # Room enough in any symbols.
    assert wanted.first_capacity <= first.first_capacity
    assert wanted.next_capacity <= first.next_capacity


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(read_layers=LAYERS), f"of the model's {LAYERS} .* up to {LAYERS - 1}"),
        (dict(places_weight=5.0), "read_layers = 3 learns none: set it to 1"),
    ],
)
def test_reading_that_teaches_no_layer_or_weighs_replies_is_refused(changes, message):
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:symbols")
    stage = next(x for x in STAGES["tiny_symbols"] if config[x].read_layers)
    checks.check(config, [stage], 1024)
    config[stage].update(changes)
    with pytest.raises(SettingsError, match=message):
        checks.check(config, [stage], 1024)


def test_a_tokenizer_without_the_symbols_is_refused():
    plain = sources.locate("tiny").read_tokenizer()
    pieces = chat_template.cut_pieces(plain, "tiny")
    dialogues = [
        prompts_lib.make_dialogue(one.env, LIMITS, pieces, thinking=True)
        for one in symbol_sets.draw(Sokoban(), 8, seed=0)
    ]
    with pytest.raises(ValueError, match="more than one token"):
        symbol_sets.tokenize(dialogues, plain)


@pytest.mark.slow
def test_symbols_change_the_texts_alone(drawn):
    key = jax.random.key(5)
    one, other = drawn[0].env, drawn[1].env
    states = [env.reset(key, jnp.int32(0)) for env in (one, other)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    np.testing.assert_array_equal(one.observe(states[0]), other.observe(states[1]))
    texts = ("name", "action_names", "observation_phrases")
    assert all(getattr(one, name) == getattr(other, name) for name in texts)
    assert len(one.phrases) == len(other.phrases) and one.phrases != other.phrases
    assert drawn[1].legend in other.instruction
