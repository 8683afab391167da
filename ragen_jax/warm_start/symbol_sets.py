"""Rooms in symbols drawn anew, whose meaning a model has to read from the prompt."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from ragen_jax.envs.base import Environment
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.types import Sokoban
from ragen_jax.text.phrases import PhraseTokens, tokenize_phrases
from ragen_jax.text.prompts import Dialogue, DialogueTokens

# Each is one token behind a space (`tiny_tokenizer.with_cells`).
SYMBOLS = "W.C@*%$&!?+=DFHJKLNQUGBA#_OXPS-0123456789<EITabcdfghmnoprstuwx√"
# Those of `configs/sokoban.py:newvocab`, which are for tests: no set is drawn that
# shares the meaning of more than one of them. (Were none shared, each symbol would say
# what it is not.)
HELD_OUT = ("W", ".", "G", "B", "C", "A", "@")
_NOT_WALLS = "_OP"  # They are one token with the end of a line, which walls stand at.
_OWN_EVERY = 4  # One of so many sets is the environment's own.


class SymbolSet(NamedTuple):
    """An environment in some symbols."""

    env: Environment  # which differs from the others in its texts alone
    legend: str  # what each symbol means


class SymbolSetTokens(NamedTuple):
    """What differs between dialogues in n sets of symbols."""

    openings: jax.Array  # int32[n, S], the dialogue's first phrase
    cells: PhraseTokens  # int32[n, phrases, longest] and int32[n, phrases]


def draw(settings: Sokoban, count: int, seed: int) -> tuple[SymbolSet, ...]:
    """So many sets of symbols for rooms; every fourth is their own, the first one too.

    Args:
      settings: of the rooms.
      count: n.
      seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    drawn = []
    for index in range(count):
        symbols = settings.symbols
        while index % _OWN_EVERY and not _can_be_drawn(symbols, settings):
            symbols = tuple(
                map(str, generator.choice(list(SYMBOLS), len(HELD_OUT), False))
            )
        changed = dataclasses.replace(settings, symbols=symbols)
        drawn.append(SymbolSet(sokoban.make(changed), texts.legend(changed)))
    return tuple(drawn)


def _can_be_drawn(symbols: tuple[str, ...], settings: Sokoban) -> bool:
    shared = sum(a == b for a, b in zip(symbols, HELD_OUT, strict=True))
    return symbols != settings.symbols and symbols[0] not in _NOT_WALLS and shared < 2


def tokenize(
    dialogues: list[Dialogue], tokenizer: PreTrainedTokenizerFast
) -> SymbolSetTokens:
    """The tokens of dialogues that differ in first phrase and environment's phrases.

    Their first phrases have equally many tokens, for each symbol is one.
    """
    count, offset = len(dialogues), dialogues[0].env_offset
    openings = tokenize_phrases(tokenizer, tuple(d.phrases[0] for d in dialogues))
    if not (openings.lengths == openings.lengths[0]).all():
        raise ValueError("a symbol is more than one token: use tiny_tokenizer's cells")
    # All in one table: thousands of small ones would take minutes to put together.
    cells = tokenize_phrases(
        tokenizer, tuple(text for d in dialogues for text in d.phrases[offset:])
    )
    return SymbolSetTokens(
        openings=openings.tokens,
        cells=jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), cells),
    )


def with_symbols(
    tokens: DialogueTokens, sets: SymbolSetTokens, index: jax.Array, env_offset: int
) -> DialogueTokens:
    """A dialogue's tokens in one of the sets of symbols.

    Args:
      tokens: of the dialogue in the first one.
      sets: from `tokenize`.
      index: int32[], which of them.
      env_offset: where the environment's phrases begin.
    """
    phrases = tokens.phrases
    length, width = sets.openings.shape[1], sets.cells.tokens.shape[2]
    table = phrases.tokens.at[0, :length].set(sets.openings[index])
    table = table.at[env_offset:, :width].set(sets.cells.tokens[index])
    lengths = phrases.lengths.at[env_offset:].set(sets.cells.lengths[index])
    return tokens.replace(phrases=PhraseTokens(tokens=table, lengths=lengths))
