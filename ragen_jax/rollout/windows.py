"""Windows: replies sampled from the last turns alone, a training row for each turn.

A row is the system prompt, the last turns that fit, and the reply. When a slot
continues to its next turn, that turn's row is made from the one before: the oldest
turns after the system prompt are dropped whole, and the environment's message is
appended. Keys are rotated by position, so what moved is run through the model again;
the system prompt's part of the cache stays.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.tasks import TaskTokens
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.trajectory import END_OF_TURN, PADDING


@struct.dataclass
class Cuts:
    """Where rows may be cut."""

    opening: jax.Array  # int32[groups], tokens of the system prompt
    closing: jax.Array  # int32[2], tokens of a message that close the reply


@struct.dataclass
class Row:
    """A row before its reply: no token of it is trained on."""

    tokens: jax.Array  # int32[T]
    turn: jax.Array  # int32[T], 0-based; PADDING behind the row's end
    length: jax.Array  # int32[]


@struct.dataclass
class Message:
    """The tokens of a message: the environment's next one, or a reply."""

    tokens: jax.Array  # int32[M], right-padded
    length: jax.Array  # int32[]


@struct.dataclass
class _Candidates:
    """The rows that could follow a row, by the turn that they begin with.

    Each is the old row and the message joined, without what lies between the system
    prompt and `start`.
    """

    turn: jax.Array  # int32[K], 0-based
    start: jax.Array  # int32[K], position of that turn in (old row + message)
    length: jax.Array  # int32[K], tokens of the row


def make_cuts(tokens: TaskTokens, groups: Sequence[int]) -> Cuts:
    """The cuts of a shard's prompts: so many of each task.

    All tasks close a reply alike: they share one model and so one chat template.
    """
    opening = [
        jnp.broadcast_to(prompts_lib.opening_length(texts), (count,))
        for texts, count in zip(tokens, groups, strict=True)
    ]
    return Cuts(jnp.concatenate(opening), prompts_lib.closing_lengths(tokens[0]))


def make_room(x: jax.Array, blank: int, turns: int) -> jax.Array:
    """[B * K, T], the rows of all turns, from those of the first turns: [B, T]."""
    room = jnp.full((x.shape[0], turns, x.shape[1]), blank, x.dtype)
    return room.at[:, 0].set(x).reshape(-1, x.shape[1])


def closing_before(cuts: Cuts, reply_end: jax.Array) -> jax.Array:
    """int32[W, K], tokens that close the reply before each turn's message.

    Args:
      cuts: of the shard.
      reply_end: int32[W, K], why each turn's reply ended. Turn 0 has none before it,
        and its entry means nothing.
    """
    before = jnp.roll(reply_end, 1, axis=1)
    return jnp.where(before == END_OF_TURN, cuts.closing[1], cuts.closing[0])


def next_row(
    window: int,
    reply_tokens: int,
    row: Row,
    turn: jax.Array,
    opening: jax.Array,
    closing: jax.Array,
    message: Message,
) -> tuple[Row, jax.Array]:
    """The row of a slot's next turn, before its reply. `vmap` over slots.

    It begins with the oldest turn that is within the window, is in the row before, and
    leaves room for a whole reply. Unless the row before began with that turn too, the
    turn's message loses its leading tokens that close the reply before it.

    Args:
      window: k, most turns of a row.
      reply_tokens: most tokens sampled in one turn.
      row: of `turn`, with its reply.
      turn: int32[], the turn that ended.
      opening: int32[], tokens of the system prompt.
      closing: int32[K], from `closing_before`.
      message: that follows the reply.

    Returns:
      The row, and int32[], how many of its leading tokens kept their positions.
    """
    oldest = row.turn[0]
    candidates = _candidates(row, oldest, opening, closing, message)
    may_be_first = (
        (candidates.turn >= jnp.maximum(oldest, turn + 2 - window))
        & (candidates.turn <= turn + 1)
        & (candidates.length + reply_tokens <= row.tokens.shape[0])
    )
    # The latest message alone always fits: checked when the run starts.
    first = jnp.where(may_be_first.any(), jnp.argmax(may_be_first), turn + 1)
    new = _build_row(row, turn, opening, message, candidates, first)
    return new, jnp.where(first == oldest, row.length, opening)


def _candidates(
    row: Row,
    oldest: jax.Array,
    opening: jax.Array,
    closing: jax.Array,
    message: Message,
) -> _Candidates:
    """The rows that could follow `row`: one for each turn that could come first.

    Args:
      row, opening, closing, message: as for `next_row`.
      oldest: int32[], the turn that `row` begins with.
    """
    turn = jnp.arange(closing.shape[0])
    is_before = (row.turn >= 0)[None] & (row.turn[None] < turn[:, None])
    start = jnp.where(turn == oldest, opening, is_before.sum(axis=1) + closing)
    length = opening + row.length + message.length - start
    return _Candidates(turn, start, length)


def _build_row(
    row: Row,
    turn: jax.Array,
    opening: jax.Array,
    message: Message,
    candidates: _Candidates,
    first: jax.Array,
) -> Row:
    """The candidate that begins with turn `first`, int32[]: copied token by token.

    Args:
      row, turn, opening, message: as for `next_row`.
      candidates: the rows that could follow.
      first: int32[], a turn.
    """
    position = jnp.arange(row.tokens.shape[0])
    is_opening = position < opening
    # The position in (old row + message) that each token is copied from.
    source = jnp.where(
        is_opening, position, position + candidates.start[first] - opening
    )
    is_old = source < row.length
    take = lambda x, index: x[jnp.clip(index, 0, x.shape[0] - 1)]
    tokens = jnp.where(
        is_old, take(row.tokens, source), take(message.tokens, source - row.length)
    )
    turns = jnp.where(is_old, take(row.turn, source), turn + 1)
    turns = jnp.where(is_opening, first, turns)
    length = candidates.length[first]
    is_real = position < length
    return Row(
        tokens=jnp.where(is_real, tokens, 0),
        turn=jnp.where(is_real, turns, PADDING),
        length=length,
    )


def prefill(
    weights: Parameters,
    model: kv.ShardedModel,
    entries: kv.Cache,
    tokens: jax.Array,
    first: jax.Array,
    last: jax.Array,
    width: int,
    buckets: tuple[int, ...],
) -> tuple[kv.Cache, jax.Array]:
    """Runs positions `first` to `last` (exclusive) of every row through the model.

    In pieces of `width` tokens: a short stretch is cheap, and a long one takes no more
    memory than a message.

    Args:
      weights, model: as for `kv_cache.extend`.
      entries: of W slots, filled with the `first` positions of their rows.
      tokens: int32[W, T], the rows.
      first, last: int32[W].
      width: tokens of a piece.
      buckets: as for `kv_cache.extend`.

    Returns:
      The entries, and int32[], how many pieces there were.
    """
    context = tokens.shape[1]
    pieces = (-(-(last - first) // width)).max()

    def prefill_piece(index, entries):
        # Near the row's end a piece starts earlier and recomputes the same entries.
        at = jnp.minimum(first + index * width, context - width)
        where = at[:, None] + jnp.arange(width)[None]
        piece = jnp.take_along_axis(tokens, where, axis=1)
        return kv.extend(weights, model, entries, piece, at, buckets)

    return jax.lax.fori_loop(0, pieces, prefill_piece, entries), pieces
