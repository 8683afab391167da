"""Rows of Sokoban's rooms for the embedded model that reads them."""

import functools

import numpy as np

from ragen_jax.models.io import sources
from ragen_jax.warm_start import drawings


@functools.cache
def tokenizer():
    return sources.locate("tiny_rooms").read_tokenizer()


@functools.cache
def words() -> drawings.Words:
    return drawings.find_words(tokenizer(), 1024)


def tokenize(*parts: str) -> tuple[np.ndarray, np.ndarray]:
    """int32[1, T], texts shown and replied in turn; bool[1, T], which are replies."""
    pieces = [tokenizer()(part)["input_ids"] for part in parts]
    is_reply = [[k % 2 == 1] * len(piece) for k, piece in enumerate(pieces)]
    return np.array([sum(pieces, [])]), np.array([sum(is_reply, [])])
