"""Reads the drawings and walks of Sokoban's rooms back from the tokens of rows.

For the labels of walls.py and relabel.py. "Row" is a row of a batch or of a drawing, by
context. Functions are of one row of a batch, int32[T]; callers `vmap` them.

The example of all three modules is a row with one drawing, and a reply to it in which
each place, as " (1, 2)", is two tokens, its row " (1" and its column ", 2)":

   # # # # #
   # P X O #    At (1, 1), box (1, 2), target (1, 3): Down (2, 1), Up (1, 1),
   # _ _ _ #    Right (1, 2).</think><answer>Down || Up || Right</answer>
   # # # # #
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.types import MEANINGS, Sokoban

SIDE = 10  # Most rows and columns of a drawing: 0 to 9 have tokens.
MARGIN = 2  # Cells around a drawing that may be looked up.
REPLIES = 16  # The most replies of a row.
WALL = MEANINGS.index("wall")
BOXES = tuple(MEANINGS.index(name) for name in ("box", "box on target"))
TARGETS = tuple(
    MEANINGS.index(name) for name in ("target", "box on target", "you on target")
)


class Words(NamedTuple):
    """Tokens of drawings and places. Tables of V entries read them; others write."""

    meaning: jax.Array  # int32[V], a drawn cell as index into MEANINGS; -1: none
    row: jax.Array  # int32[V], the row that a token names; -1: none
    column: jax.Array  # int32[V], likewise
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
        """int32[24], the tokens of all choices: actions, rows, columns."""
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
    """The drawing that each reply of a row was shown.

    Of the example, board[0, 3, 3:6] is the row "P X O", since the margin moves its
    first cell, (1, 1), to [3, 3]; all tokens belong to reply 0.

    Args:
      tokens: int32[T], a row of rooms in Sokoban's own symbols, 10 x 10 at most.
      is_reply: bool[T].
      words: of the tokenizer.
      replies: K, the most replies of a row.

    Returns:
      int32[K, 14, 14], indices into MEANINGS, by reply, with a margin of MARGIN cells
      around; all wall beyond a drawing. int32[T], the reply that each token belongs to.
    """
    starts = is_reply & ~before(is_reply)
    reply = jnp.cumsum(starts)  # Replies begun so far; a drawing precedes its reply.
    is_cell = (words.meaning[tokens] >= 0) & ~is_reply
    lines = jnp.cumsum((tokens == words.newline) & before(is_cell))
    row = lines - latest(starts, lines)
    column = columns(is_cell)
    side = SIDE + 2 * MARGIN
    # Out of bounds is dropped. An instruction that explains symbols stands before the
    # first drawing and looks like cells too: of two tokens the later one counts.
    cell = (
        jnp.where(is_cell & (row < SIDE) & (column < SIDE), reply, replies),
        jnp.minimum(row, SIDE) + MARGIN,
        jnp.minimum(column, SIDE) + MARGIN,
    )
    # int32[K, 14, 14], the position in the row of the token that draws each cell.
    position = jnp.full((replies, side, side), -1)
    position = position.at[cell].max(jnp.arange(tokens.shape[0]), mode="drop")
    board = jnp.where(position >= 0, words.meaning[tokens[position]], WALL)
    return board, jnp.clip(reply - 1, 0, replies - 1)


def named_places(
    tokens: jax.Array, is_reply: jax.Array, words: Words
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The places that replies name, each at its last token.

    Of the example these are six, numbered 1 to 6: the player's (1, 1), the box's
    (1, 2), the target's (1, 3), and the walk's (2, 1), (1, 1) and (1, 2).

    Returns:
      bool[T], the last token of each place.
      int32[T], there, its number in the reply: 1 for the player, 2 for the box, 3 for
      the target, and more along the walk; 0 elsewhere.
      int32[T, 2], there, row and column.
    """
    is_place = is_reply & (words.column[tokens] >= 0)
    is_place &= before(words.row[tokens] >= 0)
    count = jnp.cumsum(is_place)  # Places of the whole row so far.
    in_earlier_replies = latest(is_reply & ~before(is_reply), count - is_place)
    place = jnp.stack([before(words.row[tokens]), words.column[tokens]], 1)
    return is_place, jnp.where(is_place, count - in_earlier_replies, 0), place


class Replies(NamedTuple):
    """The drawings that a row's replies were shown, and the places that they name."""

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
    """Reads a row; the arguments are those of `boards`.

    Of the example, `player`, `box` and `target` are [(1, 1)], [(1, 2)] and [(1, 3)].
    """
    board, which = boards(tokens, is_reply, words, replies)
    is_place, nth, place = named_places(tokens, is_reply, words)

    def of_replies(n: int) -> jax.Array:
        """int32[K, 2], the n-th place of each reply."""
        index = jnp.where(nth == n, which, replies)  # Out of bounds is dropped.
        return jnp.zeros((replies, 2), jnp.int32).at[index].set(place, mode="drop")

    inner = board[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    player, box, target = (of_replies(n) for n in (1, 2, 3))
    after = walked(nth, place, box[which])
    return Replies(inner, which, is_place, nth, place, player, box, target, *after)


def walked(
    nth: jax.Array, place: jax.Array, named: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[T, 2] each, where the player and the named box are after each token.

    The player is at the latest place that the reply gives it. Where the player comes to
    the box's cell, it has pushed the box on in the direction of its step. Of the
    example the player is at (1, 1) from the first place on, then at (2, 1), (1, 1) and
    (1, 2); with this last place of the walk the box goes from (1, 2) to (1, 3).

    Args:
      nth, place: from `named_places`.
      named: int32[T, 2], the box that the token's reply names, where it is at first.
    """

    def one_token(carry, inputs):
        player, box = carry
        nth, place, named = inputs
        box = jnp.where(nth == 1, named, box)
        is_push = (nth > 3) & (place == box).all()
        box = jnp.where(is_push, 2 * place - player, box)
        player = jnp.where((nth == 1) | (nth > 3), place, player)
        return (player, box), (player, box)

    nowhere = jnp.full(2, -1)
    return jax.lax.scan(one_token, (nowhere, nowhere), (nth, place, named))[1]


def columns(is_cell: jax.Array) -> jax.Array:
    """int32[T], how many cells stand directly before each cell: its column; -1 else.

    For cells at [F T T T F T] it is [-1 0 1 2 -1 0].
    """
    position = jnp.arange(is_cell.shape[0])
    return position - jax.lax.cummax(jnp.where(is_cell, -1, position)) - 1


def before(values: jax.Array) -> jax.Array:
    """[T], `values` moved one position to the right; 0 at the first: the previous."""
    return jnp.pad(values, (1, 0))[:-1]


def latest(marks: jax.Array, values: jax.Array) -> jax.Array:
    """[T], the value at the latest mark, 0 before the first; values must not fall.

    For marks [F T F T F] and values [5 6 7 8 9] it is [0 6 6 8 8].
    """
    return jax.lax.cummax(jnp.where(marks, values, 0))
