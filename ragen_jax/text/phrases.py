"""Phrases to tokens: tokenized once on the host, joined on device."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from transformers import PreTrainedTokenizerFast


@struct.dataclass
class PhraseTokens:
    """The tokens of n phrases, right-padded with 0."""

    tokens: jax.Array  # int32[n, longest]
    lengths: jax.Array  # int32[n]


def tokenize_phrases(
    tokenizer: PreTrainedTokenizerFast, phrases: tuple[str, ...]
) -> PhraseTokens:
    """Tokenizes each phrase by itself; control tokens in it are recognized."""
    encoded = [tokenizer.encode(p, add_special_tokens=False) for p in phrases]
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
    # Positions past a phrase's own length are sent out of range and dropped.
    positions = jnp.where(within < lengths[:, None], starts[:, None] + within, capacity)
    joined = jnp.zeros(capacity, jnp.int32)
    joined = joined.at[positions].set(table.tokens[ids], mode="drop")
    return joined, lengths.sum()
