"""The best actions in place of those that were taken, as what is imitated.

Demonstrations with many random actions show more of what can happen, most of it not to
be imitated. Here a model sees what was done, and learns what should have been: the
expert's labels on states that it would not have come to, as in DAgger (Ross et al.,
arXiv:1011.0686). What each action, and each box and target that can be named, loses
beside the best is told as well.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.sokoban import demonstrations, distances
from ragen_jax.envs.sokoban.generator import MOVES
from ragen_jax.warm_start import drawings
from ragen_jax.warm_start.batches import NO_CHOICE, Batch

# A box that can reach its target no longer counts as this many actions that are lost.
_MOST_LOST = 10
# One that moves nothing: it itself, and those behind it in a walk that counts on it.
_LOST_IN_VAIN = 4
_NEVER = 8 * distances.UNSOLVABLE  # Stands for a choice that is not there.


def with_best_actions(
    key: jax.Array, batch: Batch, words: drawings.Words, replies: int
) -> Batch:
    """Rows in which the actions of walks are imitated as they should have been.

    Of equally good actions any one. Where no play leads to the target any longer,
    nothing is imitated, nor is the naming of a box and a target where no pair of two
    solves the room, nor the rest of a reply that claims a step which was none. `regret`
    tells how many actions each choice loses beside the best, 10 at most. An action
    loses 4 if nothing moves, 10 if no play leads to the target afterwards, or if it
    runs against another box.

    Args:
      key: consumed.
      batch: rows as demonstrated, of rooms with 10 x 10 cells at most.
      words: of the tokenizer.
      replies: K, in a row at most.
    """
    look = functools.partial(drawings.read_replies, words=words, replies=replies)
    seen = jax.vmap(look)(batch.tokens, batch.is_reply)
    costs, is_choice = jax.vmap(action_costs, (0, 0, 0, None))(
        batch.tokens, batch.is_reply, seen, words
    )
    is_astray = jax.vmap(after_false_step)(batch.is_reply, seen)
    best = jnp.argmin(costs + jax.random.uniform(key, costs.shape), axis=-1)
    can_solve = costs.min(-1) < distances.UNSOLVABLE
    lost = costs - costs.min(-1, keepdims=True)
    lost = jnp.where(
        costs >= 2 * distances.UNSOLVABLE, _LOST_IN_VAIN, jnp.minimum(lost, _MOST_LOST)
    )
    lost = jnp.where((is_choice & can_solve)[..., None], lost, NO_CHOICE)
    # An action stands behind the choice of it.
    shift = lambda x, fill: jnp.full_like(x, fill).at[:, 1:].set(x[:, :-1])
    is_choice, best = shift(is_choice, False), shift(best, 0)
    best = jnp.where(shift(can_solve, False), words.actions[best], -1)
    of_names, is_vain = jax.vmap(name_regret)(seen)
    regret = jnp.concatenate([shift(lost, NO_CHOICE), of_names], -1)
    regret = jnp.where(is_astray[..., None], NO_CHOICE, regret).astype(jnp.float32)
    imitated = jnp.where(is_choice, best, batch.tokens)
    imitated = jnp.where(is_vain | is_astray, -1, imitated)
    return batch._replace(imitated=imitated, regret=regret)


def after_false_step(is_reply: jax.Array, seen: drawings.Replies) -> jax.Array:
    """bool[T], from where on a reply says that it has come to where it could not go.

    Args:
      is_reply: bool[T].
      seen: of the row.
    """
    is_open, _ = _open_cells(seen)
    player = drawings.before(_cell(seen.player_after))
    box = drawings.before(_cell(seen.box_after))
    reached, _ = jax.vmap(demonstrations.after)(player, box, is_open[seen.which])
    said = _cell(seen.place)
    could = (said == player) | (said[:, None] == reached).any(1)
    is_false = (seen.nth > 3) & ~could
    is_false = jnp.pad(is_false, (0, 1))[1:]  # A place's row stands before its column.
    count = jnp.cumsum(is_false)
    starts = is_reply & ~drawings.before(is_reply)
    return is_reply & (count > drawings.latest(starts, count - is_false))


def _cell(at: jax.Array) -> jax.Array:
    """int32[...], row * 10 + column of int32[..., 2]."""
    return at[..., 0] * drawings.SIDE + at[..., 1]


def _open_cells(seen: drawings.Replies) -> tuple[jax.Array, jax.Array]:
    """bool[K, 100], where player and named box can go; where another box stands."""
    is_box = jnp.isin(seen.board, jnp.array(drawings.BOXES)).reshape(
        -1, drawings.SIDE**2
    )
    named = jnp.arange(is_box.shape[1])[None] == _cell(seen.box)[:, None]
    is_other = is_box & ~named
    return (seen.board != drawings.WALL).reshape(is_box.shape) & ~is_other, is_other


def action_costs(
    tokens: jax.Array,
    is_reply: jax.Array,
    seen: drawings.Replies,
    words: drawings.Words,
) -> tuple[jax.Array, jax.Array]:
    """What each action would cost where a walk's next one is chosen.

    Args:
      tokens: int32[T], one row.
      is_reply: bool[T].
      seen: what `drawings.read_replies` reads in it.
      words: of the tokenizer.

    Returns:
      int32[T, 4], the fewest actions that are left after each one, until the named box
      is on the named target, every other box being a wall; `distances.UNSOLVABLE` where
      that is impossible, or another box stands in the way, and twice that where nothing
      would move.
      bool[T], the colons and commas behind which an action is chosen.
    """
    side = drawings.SIDE
    is_open, is_other = _open_cells(seen)
    left = jax.vmap(distances.measure)(
        is_open.reshape(-1, side, side), _cell(seen.target)
    )

    def after(which, player, box):
        next_player, next_box = demonstrations.after(player, box, is_open[which])
        its = jax.tree.map(lambda leaf: leaf[which], left)
        cost = distances.actions_left(its, next_player, next_box)
        is_still = next_player == player
        # Another box would be pushed, and nothing is known of where that leads.
        is_against = is_other[which, player + MOVES @ np.array([side, 1])]
        cost = jnp.where(is_still, 2 * distances.UNSOLVABLE, cost)
        return jnp.where(is_against, distances.UNSOLVABLE, cost)

    given = seen.which, _cell(seen.player_after), _cell(seen.box_after)
    costs = jax.vmap(after)(*given)
    is_behind = drawings.before(seen.is_place)
    is_choice = is_behind & (tokens == words.colon)
    is_choice |= is_behind & (tokens == words.comma) & (drawings.before(seen.nth) > 3)
    return costs, is_choice & is_reply


def name_regret(seen: drawings.Replies) -> tuple[jax.Array, jax.Array]:
    """What is lost by naming either box and either target of a room with two.

    Args:
      seen: of one row.

    Returns:
      int32[T, 20], at the row and the column of a reply's box and target: of each row,
      then of each column that could be named there, the actions that are lost beside
      the best, 10 at most; NO_CHOICE where it is of no box or target, and elsewhere.
      bool[T], of such tokens, whether no box and target solve the room.
    """
    given = seen.board, seen.player, seen.box, seen.target
    tables, is_vain = jax.vmap(_one_board)(*given)
    nth, which = seen.nth, seen.which
    following = jnp.pad(nth, (0, 1))[1:]  # A row's token stands before its column's.
    is_kind = jnp.stack([following == 2, nth == 2, following == 3, nth == 3], -1)
    is_name, kind = is_kind.any(-1), jnp.argmax(is_kind, -1)
    regret = jnp.where(is_name[:, None], tables[which, kind], NO_CHOICE)
    return regret, is_name & is_vain[which]


def _one_board(board, player, box, target) -> tuple[jax.Array, jax.Array]:
    """int32[4, 20], by box's row, its column, target's row, its column; and bool[].

    Args:
      board: int32[10, 10], indices into MEANINGS.
      player, box, target: int32[2], the row and column that the reply names.
    """
    side = drawings.SIDE
    is_box = jnp.isin(board, jnp.array(drawings.BOXES))
    is_home = jnp.isin(board, jnp.array(drawings.TARGETS))
    is_two = (is_box.sum() == 2) & (is_home.sum() == 2)
    stand = jnp.argwhere(is_box, size=2, fill_value=0)
    homes = jnp.argwhere(is_home, size=2, fill_value=0)
    cost = demonstrations.pairs(
        board != drawings.WALL, _cell(player), _cell(stand), _cell(homes)
    ).cost.reshape(2, 2)

    def tables(cost, places, named):
        """int32[2, 20], where a row and where a column is named."""
        is_near = places[:, 0] == named[0]
        of_row = _lost(cost, places[:, 0])
        of_column = _lost(jnp.where(is_near, cost, _NEVER), places[:, 1])
        nothing = jnp.full(side, NO_CHOICE)
        row = jnp.concatenate([of_row, nothing])
        return jnp.stack([row, jnp.concatenate([nothing, of_column])])

    its = cost[jnp.argmax(_cell(stand) == _cell(box))]
    made = jnp.concatenate(
        [tables(cost.min(1), stand, box), tables(its, homes, target)]
    )
    can_solve = cost.min() < distances.UNSOLVABLE
    return jnp.where(is_two & can_solve, made, NO_CHOICE), is_two & ~can_solve


def _lost(cost: jax.Array, number: jax.Array) -> jax.Array:
    """int32[10], what naming each number loses; NO_CHOICE where it names nothing.

    Args:
      cost: int32[2], of two places; _NEVER: it is not to be chosen from.
      number: int32[2], the row or the column of each.
    """
    of_number = jnp.full(drawings.SIDE, _NEVER).at[number].min(cost)
    lost = jnp.minimum(of_number - of_number.min(), _MOST_LOST)
    return jnp.where(of_number == _NEVER, NO_CHOICE, lost)
