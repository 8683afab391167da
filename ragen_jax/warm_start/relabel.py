"""Relabels demonstrations: the best actions are imitated, not those that were taken.

Demonstrations with many random actions reach more states, but most of these actions are
not to be imitated. So a row keeps what was done, and the expert's best action is the
target: expert labels on states that the expert itself would not reach, as in DAgger
(Ross et al., arXiv:1011.0686). The regret of each action, and of naming each box and
target, is computed as well, for `walls.expected_regret`. Of stages with `relabel`.

In the example of drawings.py the walk Down, Up, Right begins with two random actions.
Relabelled, the reply to imitate has the best action at each place of the walk,

   At (1, 1), box (1, 2), target (1, 3): Right (2, 1), Up (1, 1), Right (1, 2).

and the regret of Up, Down, Left, Right is [4 2 4 0] where Right replaces Down: Right
solves the room, Down takes two actions more, and Up and Left move nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.sokoban import demonstrations, distances
from ragen_jax.envs.sokoban.types import MOVES
from ragen_jax.warm_start import drawings
from ragen_jax.warm_start.batches import NO_CHOICE, Batch

# Regret is the number of actions lost beside the best choice. Its maximum, for a choice
# that makes the room unsolvable:
_MOST_LOST = 10
# For an action that moves nothing: itself, and actions of the walk that rely on it.
_LOST_IN_VAIN = 4
_NEVER = 8 * distances.UNSOLVABLE  # The cost of a choice that does not exist.


def with_best_actions(
    key: jax.Array, batch: Batch, words: drawings.Words, replies: int
) -> Batch:
    """Rows whose walks are to imitate the best actions; sets `imitated` and `regret`.

    Among equally good actions one is drawn. Nothing is imitated
    * at an action, if no action leads to the target any more;
    * at the names of box and target, in a room with two of each, if no pairing of them
      solves it;
    * in the rest of a reply that claims an impossible step.

    `regret` is the number of actions that a choice loses beside the best, 10 at most.
    It is 4 for an action that moves nothing, and 10 for one that makes the target
    unreachable or runs into another box.

    Args:
      key: consumed.
      batch: rows as demonstrated, of rooms with 10 x 10 cells at most.
      words: of the tokenizer.
      replies: K, the most replies of a row.
    """
    read = functools.partial(drawings.read_replies, words=words, replies=replies)
    readings = jax.vmap(read)(batch.tokens, batch.is_reply)
    costs, is_choice = jax.vmap(action_costs, (0, 0, 0, None))(
        batch.tokens, batch.is_reply, readings, words
    )
    is_astray = jax.vmap(after_false_step)(batch.is_reply, readings)
    # At the token before each action: int32[R, T], the best action, drawn among equals;
    # bool[R, T], whether it leads to the target; int32[R, T, 4], what each one loses.
    best = jnp.argmin(costs + jax.random.uniform(key, costs.shape), axis=-1)
    can_solve = costs.min(-1) < distances.UNSOLVABLE
    action_regret = _action_regret(costs, is_choice, can_solve)
    # The same, moved to the action's own token.
    shift = lambda x, fill: jnp.full_like(x, fill).at[:, 1:].set(x[:, :-1])
    is_action, best = shift(is_choice, False), shift(best, 0)
    best_token = jnp.where(shift(can_solve, False), words.actions[best], -1)

    of_names, is_vain = jax.vmap(name_regret)(readings)
    regret = jnp.concatenate([shift(action_regret, NO_CHOICE), of_names], -1)
    regret = jnp.where(is_astray[..., None], NO_CHOICE, regret).astype(jnp.float32)
    imitated = jnp.where(is_action, best_token, batch.tokens)
    imitated = jnp.where(is_vain | is_astray, -1, imitated)
    return batch._replace(imitated=imitated, regret=regret)


def _action_regret(
    costs: jax.Array, is_choice: jax.Array, can_solve: jax.Array
) -> jax.Array:
    """int32[R, T, 4], the actions lost by each action; NO_CHOICE where none is chosen.

    For costs [1, 3, impossible, moves nothing] it is [0, 2, 10, 4].

    Args:
      costs: int32[R, T, 4], of `action_costs`.
      is_choice: bool[R, T], where an action is chosen.
      can_solve: bool[R, T], whether one of them leads to the target.
    """
    lost = costs - costs.min(-1, keepdims=True)
    is_still = costs >= 2 * distances.UNSOLVABLE
    lost = jnp.where(is_still, _LOST_IN_VAIN, jnp.minimum(lost, _MOST_LOST))
    return jnp.where((is_choice & can_solve)[..., None], lost, NO_CHOICE)


def after_false_step(is_reply: jax.Array, reading: drawings.Replies) -> jax.Array:
    """bool[T], the tokens of a reply from its first impossible step on.

    A step is possible if it ends where one of the four actions leads, or where the
    player already is: an action into a wall. Had the example's walk begun with
    "Down (3, 1)", into the border, all from the token " (3" on would be marked.

    Args:
      is_reply: bool[T].
      reading: of the row.
    """
    is_open, _ = _open_cells(reading)
    player = drawings.before(_cell(reading.player_after))
    box = drawings.before(_cell(reading.box_after))
    # int32[T, 4], the player's cell after each action.
    reached, _ = jax.vmap(demonstrations.after)(player, box, is_open[reading.which])
    named_cell = _cell(reading.place)
    is_possible = (named_cell == player) | (named_cell[:, None] == reached).any(1)
    is_false = (reading.nth > 3) & ~is_possible
    is_false = jnp.pad(is_false, (0, 1))[1:]  # From the row's token on.
    count = jnp.cumsum(is_false)
    starts = is_reply & ~drawings.before(is_reply)
    return is_reply & (count > drawings.latest(starts, count - is_false))


def _cell(at: jax.Array) -> jax.Array:
    """int32[...], row * 10 + column of int32[..., 2]."""
    return at[..., 0] * drawings.SIDE + at[..., 1]


def _open_cells(reading: drawings.Replies) -> tuple[jax.Array, jax.Array]:
    """bool[K, 100] each: where player and named box can go; where other boxes stand."""
    is_box = jnp.isin(reading.board, jnp.array(drawings.BOXES)).reshape(
        -1, drawings.SIDE**2
    )
    named = jnp.arange(is_box.shape[1])[None] == _cell(reading.box)[:, None]
    is_other = is_box & ~named
    return (reading.board != drawings.WALL).reshape(is_box.shape) & ~is_other, is_other


def action_costs(
    tokens: jax.Array,
    is_reply: jax.Array,
    reading: drawings.Replies,
    words: drawings.Words,
) -> tuple[jax.Array, jax.Array]:
    """The cost of each action, at the tokens behind which a walk's next one is chosen.

    Of the example these are the colon and two commas. At the colon, with the player at
    (1, 1) and the box at (1, 2), they are 2 * UNSOLVABLE for Up and Left, which move
    nothing, 2 for Down, behind which Up and Right remain, and 0 for Right.

    Args:
      tokens: int32[T], one row.
      is_reply: bool[T].
      reading: what `drawings.read_replies` reads in it.
      words: of the tokenizer.

    Returns:
      int32[T, 4], the fewest actions that remain after each one (up, down, left, right)
      until the named box is on the named target, with other boxes as walls;
      `distances.UNSOLVABLE` if that is impossible, or the action runs into another box;
      twice that if nothing moves.
      bool[T], the colons and commas behind which an action is chosen.
    """
    side = drawings.SIDE
    is_open, is_other = _open_cells(reading)
    left = jax.vmap(distances.measure)(
        is_open.reshape(-1, side, side), _cell(reading.target)
    )

    def after(reply, player, box):
        next_player, next_box = demonstrations.after(player, box, is_open[reply])
        left_of_reply = jax.tree.map(lambda leaf: leaf[reply], left)
        cost = distances.actions_left(left_of_reply, next_player, next_box)
        is_still = next_player == player
        # It would push another box, which the distances do not model.
        is_against = is_other[reply, player + MOVES @ np.array([side, 1])]
        cost = jnp.where(is_still, 2 * distances.UNSOLVABLE, cost)
        return jnp.where(is_against, distances.UNSOLVABLE, cost)

    player, box = _cell(reading.player_after), _cell(reading.box_after)
    costs = jax.vmap(after)(reading.which, player, box)
    is_behind = drawings.before(reading.is_place)
    is_choice = is_behind & (tokens == words.colon)
    is_choice |= (
        is_behind & (tokens == words.comma) & (drawings.before(reading.nth) > 3)
    )
    return costs, is_choice & is_reply


def name_regret(reading: drawings.Replies) -> tuple[jax.Array, jax.Array]:
    """The regret of naming each box and each target, in a room with two of both.

    In two tokens each, first the row: where the boxes are in (2, 1) and (4, 5), and it
    takes 3 actions more to push the first one first, naming row 2 loses 3, row 4 none.
    After row 4, column 5 is the only choice.

    Args:
      reading: of one row.

    Returns:
      int32[T, 20], the actions lost beside the best, 10 at most, by naming each of 10
      rows, then each of 10 columns, at the tokens where a reply names the row and the
      column of its box and target. NO_CHOICE for rows and columns that no box or target
      is in, and at all other tokens.
      bool[T], those tokens in rooms that no pairing of boxes and targets solves.
    """
    tables, is_vain = jax.vmap(_one_board)(
        reading.board, reading.player, reading.box, reading.target
    )
    nth, reply = reading.nth, reading.which
    following = jnp.pad(nth, (0, 1))[1:]  # At a row's token, `nth` of its column's.
    is_kind = jnp.stack([following == 2, nth == 2, following == 3, nth == 3], -1)
    is_name, kind = is_kind.any(-1), jnp.argmax(is_kind, -1)
    regret = jnp.where(is_name[:, None], tables[reply, kind], NO_CHOICE)
    return regret, is_name & is_vain[reply]


def _one_board(board, player, box, target) -> tuple[jax.Array, jax.Array]:
    """int32[4, 20], regret of naming the box's row and column, then the target's.

    And bool[], whether no pairing of boxes and targets solves a room with two of each.

    Args:
      board: int32[10, 10], indices into MEANINGS.
      player, box, target: int32[2], the row and column that the reply names.
    """
    side = drawings.SIDE
    is_box = jnp.isin(board, jnp.array(drawings.BOXES))
    is_target = jnp.isin(board, jnp.array(drawings.TARGETS))
    is_two = (is_box.sum() == 2) & (is_target.sum() == 2)
    box_places = jnp.argwhere(is_box, size=2, fill_value=0)
    target_places = jnp.argwhere(is_target, size=2, fill_value=0)
    # int32[2, 2], actions left by the box that is pushed first and its target.
    cost = demonstrations.pairs(
        board != drawings.WALL, _cell(player), _cell(box_places), _cell(target_places)
    ).cost.reshape(2, 2)

    def tables(cost, places, named):
        """int32[2, 20], regret of naming a place's row, and its column."""
        is_in_row = places[:, 0] == named[0]
        of_row = _lost(cost, places[:, 0])
        of_column = _lost(jnp.where(is_in_row, cost, _NEVER), places[:, 1])
        nothing = jnp.full(side, NO_CHOICE)
        row = jnp.concatenate([of_row, nothing])
        return jnp.stack([row, jnp.concatenate([nothing, of_column])])

    cost_of_box = cost[jnp.argmax(_cell(box_places) == _cell(box))]  # By target.
    regret = jnp.concatenate(
        [
            tables(cost.min(1), box_places, box),
            tables(cost_of_box, target_places, target),
        ]
    )
    can_solve = cost.min() < distances.UNSOLVABLE
    return jnp.where(is_two & can_solve, regret, NO_CHOICE), is_two & ~can_solve


def _lost(cost: jax.Array, number: jax.Array) -> jax.Array:
    """int32[10], regret of naming each number; NO_CHOICE for those of no place.

    For costs [7, 5] and numbers [2, 4] it is 2 at 2, 0 at 4, and NO_CHOICE elsewhere.

    Args:
      cost: int32[2], of two places; _NEVER for one that cannot be chosen.
      number: int32[2], the row or the column of each.
    """
    of_number = jnp.full(drawings.SIDE, _NEVER).at[number].min(cost)
    lost = jnp.minimum(of_number - of_number.min(), _MOST_LOST)
    return jnp.where(of_number == _NEVER, NO_CHOICE, lost)
