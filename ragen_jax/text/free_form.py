"""The text of replies on device, for answers that are not lists of named actions.

Free-form answers (an equation, the name of an arm) are cut out and handed to the
environment; thoughts are searched for the landmarks that they name. All of it is done
once, when a reply has ended, and equals `reference_parser.parse_free_form` on the same
bytes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_ACTION
from ragen_jax.text import reply_parser
from ragen_jax.text.reply_automaton import BAR, END_ANSWER, WHITE
from ragen_jax.text.reply_parser import ReplyState, ReplyTables, TextTables
from ragen_jax.utils.scatter import put_where

_THOUGHT_BYTES = 8  # for each token that a reply may have, of a thought are searched


def reply_bytes(
    text: TextTables, tokens: jax.Array, count: jax.Array, first: jax.Array, width: int
) -> jax.Array:
    """uint8[width], the bytes of a reply from its byte `first` on; 0 behind the end.

    Args:
      text: of the tokenizer.
      tokens: int32[n], the reply's, padded with anything.
      count: int32[], how many of them are the reply's.
      first: int32[].
      width: static.
    """
    is_real = jnp.arange(tokens.shape[0]) < count
    lengths = jnp.where(is_real, text.token_length[tokens], 0)
    starts = jnp.cumsum(lengths) - lengths
    within = jnp.arange(text.token_bytes.shape[1])[None]
    positions = starts[:, None] + within - first
    is_inside = (within < lengths[:, None]) & (positions >= 0) & (positions < width)
    blank = jnp.zeros(width, jnp.uint8)
    return put_where(blank, positions, text.token_bytes[tokens], is_inside)


def read_answer(
    tables: ReplyTables,
    reply: ReplyState,
    tokens: jax.Array,
    count: jax.Array,
    read_action: Callable[[jax.Array, jax.Array], jax.Array],
    answer_bytes: int,
    max_actions: int,
) -> tuple[jax.Array, jax.Array]:
    """The actions of a free-form answer.

    Args:
      tables: with text.
      reply: after its last token.
      tokens, count: int32[n] and int32[], the reply's.
      read_action: as `base.Environment.read_action`, with the state bound in.
      answer_bytes: N, the longest answer that can be read; static.
      max_actions: A, segments that are read; static.

    Returns:
      int32[A] actions (or int32[A, n], where one has n numbers), NO_ACTION behind the
      last; bool[], whether the reply is valid.
    """
    assert tables.text is not None  # Made `with_text`.
    width = answer_bytes + len(END_ANSWER)
    text = reply_bytes(tables.text, tokens, count, reply.answer_at, width)
    ends_here = jnp.ones(answer_bytes + 1, bool)
    for offset, byte in enumerate(END_ANSWER):
        ends_here &= text[offset : offset + answer_bytes + 1] == byte
    length = jnp.argmax(ends_here)  # 0 if the answer is too long: it has no segments.
    texts, lengths = _segments(text[:answer_bytes], length, max_actions)
    read_actions = jax.vmap(read_action)(texts, lengths)
    is_there = (lengths > 0) & reply_parser.is_closed(tables, reply)
    # The first number of an action says whether it is one.
    is_known = is_there & (read_actions.reshape(max_actions, -1)[:, 0] >= 0)
    is_known_number = is_known.reshape((max_actions,) + (1,) * (read_actions.ndim - 1))
    actions = jnp.where(is_known_number, read_actions, NO_ACTION).astype(jnp.int32)
    actions = actions[jnp.argsort(~is_known, stable=True)]
    is_valid = is_known.any() & (is_known == is_there).all()
    return actions, is_valid


def _segments(
    text: jax.Array, length: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """The first segments between `||` that are not empty, stripped, in lower case.

    Args:
      text: uint8[N], of which `length` (int32[]) bytes count.
      most: A; static.

    Returns:
      uint8[A, N], 0 behind each end; int32[A] lengths, 0 where there is no such one.
    """
    position = jnp.arange(text.shape[0])
    is_real = position < length
    is_bar = (text == BAR) & is_real
    # A run of bars is paired from the left, as `split` does; an odd one out is text.
    before_run = jax.lax.cummax(jnp.where(is_bar, -1, position))
    is_first = is_bar & ((position - before_run) % 2 == 1)
    is_first &= jnp.pad(is_bar[1:], (0, 1))
    is_separator = is_first | jnp.pad(is_first[:-1], (1, 0))
    segment = jnp.cumsum(is_first)
    is_white = jnp.isin(text, np.frombuffer(WHITE, np.uint8))
    is_text = is_real & ~is_separator & ~is_white
    # Number the segments that are not empty, by their first byte of text.
    is_first_byte = is_text & (segment > _previous(jnp.where(is_text, segment, -1)))
    ordinal = jnp.cumsum(is_first_byte) - 1
    ordinals = jnp.arange(most)[:, None]
    # bool[A, N]; white space at a segment's end has no byte of text after it.
    is_in_segment = is_text[None] & (ordinal[None] == ordinals)
    starts = jnp.argmax(is_in_segment, axis=1)
    ends = jnp.where(is_in_segment, position[None] + 1, 0).max(axis=1)
    lengths = jnp.maximum(ends - starts, 0) * is_in_segment.any(axis=1)
    lower = jnp.where((text >= ord("A")) & (text <= ord("Z")), text + 32, text)
    shifted = lower[starts[:, None] + position[None]]  # Beyond the text: not taken.
    texts = jnp.where(position[None] < lengths[:, None], shifted, 0)
    return texts.astype(jnp.uint8), lengths.astype(jnp.int32)


def _previous(values: jax.Array) -> jax.Array:
    """int32[N], the largest of the values before each position; -1 before the first."""
    return jnp.pad(jax.lax.cummax(values)[:-1], (1, 0), constant_values=-1)


def grounded(
    tables: ReplyTables,
    reply: ReplyState,
    tokens: jax.Array,
    count: jax.Array,
    landmarks: jax.Array,
) -> jax.Array:
    """float32[], the share of the landmarks that the thought names as "(row, column)".

    A thought is what comes before the answer's text. Only its first bytes are searched,
    eight for each token that a reply may have; 0 without any landmark.

    Args:
      tables: with text.
      reply: after its last token.
      tokens, count: int32[n] and int32[], the reply's.
      landmarks: int32[m, 2], rows and columns below 10; (-1, -1) is none.
    """
    assert tables.text is not None  # Made `with_text`.
    width = _THOUGHT_BYTES * tokens.shape[0]
    thought = reply_bytes(tables.text, tokens, count, jnp.int32(0), width)
    end = jnp.where(reply.answer_at >= 0, reply.answer_at, width)
    thought = jnp.where(jnp.arange(width) < end, thought, 0)
    row, column = (landmarks.astype(jnp.uint8) + ord("0")).T
    opening, comma, space, closing = (jnp.full_like(row, byte) for byte in b"(, )")
    pattern = [opening, row, comma, space, column, closing]
    windows = width - len(pattern) + 1
    is_named_at = jnp.ones((landmarks.shape[0], windows), bool)
    for offset, byte in enumerate(pattern):
        is_named_at &= thought[None, offset : offset + windows] == byte[:, None]
    is_landmark = (landmarks >= 0).all(axis=1)
    named = (is_named_at.any(axis=1) & is_landmark).sum()
    return named / jnp.maximum(is_landmark.sum(), 1).astype(jnp.float32)
