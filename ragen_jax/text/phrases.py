"""Phrases to tokens: tokenized once on the host, joined on device."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.utils.scatter import put_where


@struct.dataclass
class PhraseTokens:
    """The tokens of n phrases, right-padded with 0."""

    tokens: jax.Array  # int32[n, longest]
    lengths: jax.Array  # int32[n]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text's tokens and no others; control tokens in it are recognized.

    Raises:
      UserError: if the tokenizer fails on it, as when the regular expression that
        splits text exceeds its library's limit of backtracking.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the Rust library is no Exception.
        where = tokenizer.name_or_path or "the model"
        raise UserError(
            f"{where}: the tokenizer cannot cut {text[:40]!r} into tokens"
            f" ({type(error).__name__}: {error}".splitlines()[0]
            + "); choose another model, or copy its maker's tokenizer.json again"
        ) from None


def tokenize_phrases(
    tokenizer: PreTrainedTokenizerFast, phrases: tuple[str, ...]
) -> PhraseTokens:
    """Tokenizes each phrase by itself. Raises: as `encode`."""
    encoded = [encode(tokenizer, phrase) for phrase in phrases]
    longest = max(1, max(len(ids) for ids in encoded))
    tokens = np.zeros((len(phrases), longest), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    return PhraseTokens(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


def join_phrases(
    table: PhraseTokens, ids: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens of a sequence of phrases, one after the other.

    Args:
      table: the tokenized phrases.
      ids: int32[M], phrases in order; a negative id stands for nothing.
      capacity: length of the result; what does not fit is left out.

    Returns:
      int32[capacity] tokens, 0 behind the end, and int32[] their number.
    """
    lengths = jnp.where(ids >= 0, table.lengths[ids], 0)
    starts = jnp.cumsum(lengths) - lengths
    within = jnp.arange(table.tokens.shape[1])[None]
    positions = starts[:, None] + within
    is_real = (within < lengths[:, None]) & (positions < capacity)
    blank = jnp.zeros(capacity, jnp.int32)
    joined = put_where(blank, positions, table.tokens[ids], is_real)
    return joined, lengths.sum()
