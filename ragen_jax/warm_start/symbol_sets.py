"""Rooms in randomly drawn symbols, whose meanings a model must read in the prompt.

For the stages of `tiny_symbols`. A set has 7 symbols, in the order of MEANINGS.
"""

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

# Each is one token together with a space before it (`tiny_tokenizer.with_cells`).
SYMBOLS = "W.C@*%$&!?+=DFHJKLNQUGBA#_OXPS-0123456789<EITabcdfghmnoprstuwx√"
# The set of `configs/sokoban.py:newvocab`, for tests: no drawn set gives more than one
# of these symbols the meaning that it has here. (If none did, each symbol would tell
# what it does not mean.)
HELD_OUT = ("W", ".", "G", "B", "C", "A", "@")
_NOT_WALLS = "_OP"  # One token with a line's end, where walls stand.
_OWN_EVERY = 4  # One in this many sets is the environment's own.


class SymbolSet(NamedTuple):
    """An environment drawn in one set of symbols."""

    env: Environment  # differs between sets in its texts alone
    legend: str  # what each symbol means


class SymbolSetTokens(NamedTuple):
    """The tokens that differ between dialogues in n sets of symbols."""

    openings: jax.Array  # int32[n, S], the dialogue's first phrase
    cells: PhraseTokens  # int32[n, phrases, longest] and int32[n, phrases]


def draw(settings: Sokoban, count: int, seed: int) -> tuple[SymbolSet, ...]:
    """`count` sets of symbols for rooms; the first, and every fourth, is their own.

    Args:
      settings: of the rooms.
      count: n.
      seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    sets = []
    for index in range(count):
        symbols = settings.symbols
        while index % _OWN_EVERY and not _can_be_drawn(symbols, settings):
            symbols = tuple(
                map(str, generator.choice(list(SYMBOLS), len(HELD_OUT), False))
            )
        changed = dataclasses.replace(settings, symbols=symbols)
        sets.append(SymbolSet(sokoban.make(changed), texts.legend(changed)))
    return tuple(sets)


def _can_be_drawn(symbols: tuple[str, ...], settings: Sokoban) -> bool:
    """Whether a set is new, has usable walls, and is not too near to HELD_OUT."""
    shared = sum(a == b for a, b in zip(symbols, HELD_OUT, strict=True))
    return symbols != settings.symbols and symbols[0] not in _NOT_WALLS and shared < 2


def tokenize(
    dialogues: list[Dialogue], tokenizer: PreTrainedTokenizerFast
) -> SymbolSetTokens:
    """The tokens of dialogues that differ in the first and the environment's phrases.

    First phrases have equally many tokens, as each symbol is one.
    """
    count, offset = len(dialogues), dialogues[0].env_offset
    openings = tokenize_phrases(tokenizer, tuple(d.phrases[0] for d in dialogues))
    if not (openings.lengths == openings.lengths[0]).all():
        raise ValueError("a symbol is more than one token: use tiny_tokenizer's cells")
    # All in one call: to stack thousands of small tables would take minutes.
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
