"""Drawings and walks of Sokoban's rooms, read back from the tokens of rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.types import MEANINGS, Sokoban

SIDE = 10  # Rows and columns that have names.
MARGIN = 2  # Cells beyond a drawing that are looked at.
REPLIES = 16  # of a row at most
WALL = MEANINGS.index("wall")
BOXES = tuple(MEANINGS.index(name) for name in ("box", "box on target"))
TARGETS = tuple(
    MEANINGS.index(name) for name in ("target", "box on target", "you on target")
)


class Words(NamedTuple):
    """Tokens of drawings and places."""

    meaning: jax.Array  # int32[V], index into MEANINGS; -1: no cell
    row: jax.Array  # int32[V], the row that a token names; -1: none
    column: jax.Array  # int32[V]
    rows: jax.Array  # int32[10], the token that names each row
    columns: jax.Array  # int32[10]
    newline: int
    at: int
    box: int
    target: int
    comma: int
    colon: int
    actions: jax.Array  # int32[4], in the order of texts.ACTION_NAMES

    @property
    def choices(self) -> jax.Array:
        """int32[24], of which some are chosen from: actions, rows, columns."""
        return jnp.concatenate([self.actions, self.rows, self.columns])


def find_words(tokenizer, vocabulary: int) -> Words:
    """The tokens of rooms in Sokoban's own symbols.

    Raises:
      ValueError: if a symbol or a part of a place is not one token.
    """

    def token(text: str) -> int:
        ids = tokenizer(text)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens and has to be one")
        return ids[0]

    def table(ids) -> jax.Array:
        return jnp.full(vocabulary, -1).at[jnp.array(ids)].set(jnp.arange(len(ids)))

    cells = [token(f" {symbol}") for symbol in Sokoban().symbols]
    rows = [token(f" ({n}") for n in range(SIDE)]
    columns = [token(f", {n})") for n in range(SIDE)]
    return Words(
        *(table(cells), table(rows), table(columns)),
        *(jnp.array(rows), jnp.array(columns)),
        *(token(text) for text in ("\n", " At", " box", " target", ",", ":")),
        jnp.array([token(f" {name}") for name in texts.ACTION_NAMES]),
    )


def boards(
    tokens: jax.Array, is_reply: jax.Array, words: Words, replies: int = REPLIES
) -> tuple[jax.Array, jax.Array]:
    """What each reply of a row was shown.

    Args:
      tokens: int32[T], a row of rooms in Sokoban's own symbols, 10 x 10 at most.
      is_reply: bool[T].
      words: of the tokenizer.
      replies: K, in a row at most.

    Returns:
      int32[K, 14, 14], indices into MEANINGS, by reply, behind a margin of two cells;
      all wall beyond a drawing. int32[T], the reply that each token belongs to.
    """
    starts = is_reply & ~before(is_reply)
    reply = jnp.cumsum(starts)  # Replies begun; drawings stand before theirs.
    is_cell = (words.meaning[tokens] >= 0) & ~is_reply
    lines = jnp.cumsum((tokens == words.newline) & before(is_cell))
    row = lines - latest(starts, lines)
    column = columns(is_cell)
    side = SIDE + 2 * MARGIN
    # Out of bounds is dropped. The symbols that an instruction explains stand before
    # the first drawing, whose cells are written over them: the later position counts.
    at = (
        jnp.where(is_cell & (row < SIDE) & (column < SIDE), reply, replies),
        jnp.minimum(row, SIDE) + MARGIN,
        jnp.minimum(column, SIDE) + MARGIN,
    )
    where = jnp.full((replies, side, side), -1)
    where = where.at[at].max(jnp.arange(tokens.shape[0]), mode="drop")
    board = jnp.where(where >= 0, words.meaning[tokens[where]], WALL)
    return board, jnp.clip(reply - 1, 0, replies - 1)


def named_places(
    tokens: jax.Array, is_reply: jax.Array, words: Words
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The places that replies name, at their last tokens.

    Returns:
      bool[T]; int32[T], 1 at a reply's first place, the player, 2 at the box, 3 at the
      target, and so on along the walk, 0 elsewhere; int32[T, 2], row and column.
    """
    is_place = is_reply & (words.column[tokens] >= 0)
    is_place &= before(words.row[tokens] >= 0)
    count = jnp.cumsum(is_place)
    earlier = latest(is_reply & ~before(is_reply), count - is_place)
    place = jnp.stack([before(words.row[tokens]), words.column[tokens]], 1)
    return is_place, jnp.where(is_place, count - earlier, 0), place


class Replies(NamedTuple):
    """What a row's replies were shown, and the places that they name."""

    board: jax.Array  # int32[K, 10, 10], as of `boards`, without the margin
    which: jax.Array  # int32[T], the reply that each token belongs to
    is_place: jax.Array  # bool[T], and the next two, as of `named_places`
    nth: jax.Array  # int32[T]
    place: jax.Array  # int32[T, 2]
    # int32[K, 2] each, rows and columns of the first three places; 0: there is none.
    player: jax.Array
    box: jax.Array
    target: jax.Array
    # int32[T, 2] each, as of `walked`: where player and box are after each token.
    player_after: jax.Array
    box_after: jax.Array


def read_replies(
    tokens: jax.Array, is_reply: jax.Array, words: Words, replies: int = REPLIES
) -> Replies:
    """Reads a row, of the same arguments as `boards`."""
    board, which = boards(tokens, is_reply, words, replies)
    is_place, nth, place = named_places(tokens, is_reply, words)

    def of_replies(n: int) -> jax.Array:
        at = jnp.where(nth == n, which, replies)
        return jnp.zeros((replies, 2), jnp.int32).at[at].set(place, mode="drop")

    inner = board[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    player, box, target = (of_replies(n) for n in (1, 2, 3))
    after = walked(nth, place, box[which])
    return Replies(inner, which, is_place, nth, place, player, box, target, *after)


def walked(
    nth: jax.Array, place: jax.Array, named: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[T, 2] each, where a reply's player and its box are after each token.

    Args:
      nth, place: as `named_places` tells them.
      named: int32[T, 2], where each reply's box is at first.
    """

    def one_token(carry, given):
        player, box = carry
        nth, place, named = given
        box = jnp.where(nth == 1, named, box)
        is_push = (nth > 3) & (place == box).all()
        box = jnp.where(is_push, 2 * place - player, box)
        player = jnp.where((nth == 1) | (nth > 3), place, player)
        return (player, box), (player, box)

    nowhere = jnp.full(2, -1)
    return jax.lax.scan(one_token, (nowhere, nowhere), (nth, place, named))[1]


def columns(is_cell: jax.Array) -> jax.Array:
    """int32[T], how many cells stand directly before each."""
    position = jnp.arange(is_cell.shape[0])
    return position - jax.lax.cummax(jnp.where(is_cell, -1, position)) - 1


def before(values: jax.Array) -> jax.Array:
    """[T], each position's predecessor; 0 for the first."""
    return jnp.pad(values, (1, 0))[:-1]


def latest(marks: jax.Array, values: jax.Array) -> jax.Array:
    """[T], the value (which never falls) at the latest mark; 0 before the first."""
    return jax.lax.cummax(jnp.where(marks, values, 0))
