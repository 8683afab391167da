"""The best actions in place of those that were taken, as what is imitated.

Demonstrations with many random actions show more of what can happen, most of it not to
be imitated. Here a model sees what was done, and learns what should have been: the
expert's labels on states that it would not have come to, as in DAgger (Ross et al.,
arXiv:1011.0686).
"""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.sokoban import demonstrations, distances
from ragen_jax.envs.sokoban.generator import MOVES
from ragen_jax.warm_start import drawings
from ragen_jax.warm_start.batches import Batch

# A box that can reach its target no longer counts as this many actions that are lost.
_MOST_LOST = 10


def with_best_actions(
    key: jax.Array, batch: Batch, words: drawings.Words, replies: int
) -> Batch:
    """Rows in which the actions of walks are imitated as they should have been.

    Of equally good actions any one. Where no play leads to the target any longer,
    nothing is imitated. `regret` tells how many actions each one loses beside the best,
    10 at most: 1 if nothing moves, 10 if no play leads to the target afterwards, or
    if it runs against another box.

    Args:
      key: consumed.
      batch: rows as demonstrated, of rooms with 10 x 10 cells at most.
      words: of the tokenizer.
      replies: K, in a row at most.
    """
    costs, is_choice = jax.vmap(action_costs, (0, 0, None, None))(
        batch.tokens, batch.is_reply, words, replies
    )
    best = jnp.argmin(costs + jax.random.uniform(key, costs.shape), axis=-1)
    can_solve = costs.min(-1) < distances.UNSOLVABLE
    lost = costs - costs.min(-1, keepdims=True)
    lost = jnp.where(
        costs >= 2 * distances.UNSOLVABLE, 1, jnp.minimum(lost, _MOST_LOST)
    )
    lost = jnp.where((is_choice & can_solve)[..., None], lost, 0)
    # An action stands behind the choice of it.
    shift = lambda x: jnp.zeros_like(x).at[:, 1:].set(x[:, :-1])
    is_choice, best, can_solve = shift(is_choice), shift(best), shift(can_solve)
    best = jnp.where(can_solve, words.actions[best], -1)
    return batch._replace(
        imitated=jnp.where(is_choice, best, batch.tokens),
        regret=shift(lost).astype(jnp.float32),
    )


def action_costs(
    tokens: jax.Array, is_reply: jax.Array, words: drawings.Words, replies: int
) -> tuple[jax.Array, jax.Array]:
    """What each action would cost where a walk's next one is chosen.

    Args:
      tokens: int32[T], one row.
      is_reply: bool[T].
      words: of the tokenizer.
      replies: K, in a row at most.

    Returns:
      int32[T, 4], the fewest actions that are left after each one, until the named box
      is on the named target, every other box being a wall; `distances.UNSOLVABLE` where
      that is impossible, or another box stands in the way, and twice that where nothing
      would move.
      bool[T], the colons and commas behind which an action is chosen.
    """
    side = drawings.SIDE
    board, which = drawings.boards(tokens, is_reply, words, replies)
    board = board[
        :, drawings.MARGIN : -drawings.MARGIN, drawings.MARGIN : -drawings.MARGIN
    ]
    is_place, nth, place = drawings.named_places(tokens, is_reply, words)

    def by_reply(n: int) -> jax.Array:
        at = jnp.where(nth == n, which, board.shape[0])
        return jnp.full((board.shape[0], 2), 0).at[at].set(place, mode="drop")

    box, target = by_reply(2), by_reply(3)
    player, pushed = drawings.walked(nth, place, box[which])
    cell = lambda at: at[..., 0] * side + at[..., 1]
    is_open = (board != drawings.WALL).reshape(board.shape[0], -1)
    is_box = jnp.isin(board, jnp.array(drawings.BOXES)).reshape(is_open.shape)
    named = jnp.arange(side * side)[None] == cell(box)[:, None]
    is_other = is_box & ~named
    is_open &= ~is_other
    left = jax.vmap(distances.measure)(is_open.reshape(-1, side, side), cell(target))

    def after(which, player, box):
        next_player, next_box = demonstrations.after(player, box, is_open[which])
        its = jax.tree.map(lambda leaf: leaf[which], left)
        cost = distances.actions_left(its, next_player, next_box)
        is_still = next_player == player
        # Another box would be pushed, and nothing is known of where that leads.
        is_against = is_other[which, player + MOVES @ np.array([side, 1])]
        cost = jnp.where(is_still, 2 * distances.UNSOLVABLE, cost)
        return jnp.where(is_against, distances.UNSOLVABLE, cost)

    costs = jax.vmap(after)(which, cell(player), cell(pushed))
    is_behind = drawings.before(is_place)
    is_choice = is_behind & (tokens == words.colon)
    is_choice |= is_behind & (tokens == words.comma) & (drawings.before(nth) > 3)
    return costs, is_choice & is_reply
