"""Advantages by token (GAE) and by episode (groups)."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning.groups import (
    SMALLEST_STD,
    Grouping,
    deviations,
    group_statistics,
)
from ragen_jax.parallel import backend_choices
from ragen_jax.trajectory import Rows, look_up_turns, reply_places
from ragen_jax.utils.scatter import put_where


@struct.dataclass
class Estimate:
    """What an estimator gives: advantages, and the critic's targets."""

    # float32[R, T], units of reward, or where divided by it the group's standard
    # deviations; 0 off the replies.
    advantages: jax.Array
    returns: jax.Array  # float32[R, T], A + V, units of reward; 0 off the replies
    # bool[R, T], tokens at which the critic learns, and which whitening counts; None:
    # all reply tokens.
    is_target: jax.Array | None = None


def gae(
    rewards: jax.Array,
    values: jax.Array,
    is_reply: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> Estimate:
    """Generalized advantage estimation along the reply tokens of each row.

    Over the reply tokens 1..n of a row, the observations between turns left out:
      delta_i = r_i + gamma * V_{i+1} - V_i,   V_{n+1} = 0
      A_i = delta_i + gamma * lam * A_{i+1},   A_{n+1} = 0
      return_i = A_i + V_i

    A turn's last token is thus followed by the next turn's first. The end of a row is
    always terminal, also where a budget cut the episode: the budgets are rules of the
    game.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    Args:
      rewards: float[R, T], units of reward, earned by each token.
      values: float[R, T], units of reward, the critic's estimate *before* token t is
        read: of what the tokens from t on will earn.
      is_reply: bool[R, T]; what the arrays hold elsewhere, NaN included, is not read.
      gamma: discount from one reply token to the next, in [0, 1].
      lam: in [0, 1]; 1 gives discounted return minus value, 0 the one-step error.
    """
    chex.assert_rank([rewards, values, is_reply], 2)
    chex.assert_equal_shape([rewards, values, is_reply])
    chex.assert_type([rewards, values, is_reply], [float, float, bool])
    # `where` before the scan: 0 * NaN in a carry would spread the NaN.
    rewards = jnp.where(is_reply, rewards.astype(jnp.float32), 0.0)
    values = jnp.where(is_reply, values.astype(jnp.float32), 0.0)
    has_loop = backend_choices.choices().has_token_loop
    accumulate = token_by_token if has_loop else all_tokens_at_once
    advantages = accumulate(rewards, values, is_reply, gamma, lam)
    return Estimate(advantages=advantages, returns=advantages + values)


def token_by_token(rewards, values, is_reply, gamma: float, lam: float) -> jax.Array:
    """float32[R, T], `gae` by a loop from the last token to the first.

    Args: as for `gae`; rewards and values float32, 0 off the replies.
    """

    def backwards(carry, token):
        next_advantage, next_value = carry
        reward, value, is_reply = token
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        carry = (
            jnp.where(is_reply, advantage, next_advantage),
            jnp.where(is_reply, value, next_value),
        )
        return carry, jnp.where(is_reply, advantage, 0.0)

    nothing = jnp.zeros(rewards.shape[0], jnp.float32)
    _, advantages = jax.lax.scan(
        backwards, (nothing, nothing), (rewards.T, values.T, is_reply.T), reverse=True
    )
    return advantages.T


def all_tokens_at_once(
    rewards, values, is_reply, gamma: float, lam: float
) -> jax.Array:
    """`token_by_token` as an associative scan of log T steps; sums round differently.

    A_t = delta_t + c_t A_{t+1}, where off the replies delta_t = 0 and c_t = 1, and on
    them c_t = gamma lam. Two such maps compose to a third, (c, delta) after (c',
    delta') to (c c', delta + c delta'), and that is associative (Blelloch 1990, section
    1.4).
    """
    length = is_reply.shape[1]
    # Index of the next reply token; T, out of range, after the last.
    reply_index = jnp.where(is_reply, jnp.arange(length)[None], length)
    following = jax.lax.cummin(reply_index, axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    next_value = jnp.take_along_axis(
        values, following, axis=1, mode="fill", fill_value=0.0
    )
    delta = jnp.where(is_reply, rewards + gamma * next_value - values, 0.0)
    decay = jnp.where(is_reply, jnp.float32(gamma * lam), 1.0)

    def join(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    _, advantages = jax.lax.associative_scan(join, (decay, delta), reverse=True, axis=1)
    return jnp.where(is_reply, advantages, 0.0)


@struct.dataclass
class Replies:
    """The index [episode, turn, nth] of each reply token, whatever row it is in."""

    is_reply: jax.Array  # bool[R, T], False in padding rows
    episode: jax.Array  # int32[R, T]; B, out of range, off the replies
    turn: jax.Array  # int32[R, T]
    nth: jax.Array  # int32[R, T], 0-based position within the turn's reply; else -1
    shape: tuple[int, int, int] = struct.field(pytree_node=False)  # B, K, M

    def gather(self, x: jax.Array) -> jax.Array:
        """[R, T] -> [B, K, M], 0 where there is no such token."""
        place = (self.episode, self.turn, self.nth)
        return put_where(jnp.zeros(self.shape, x.dtype), place, x, self.is_reply)

    def spread(self, x: jax.Array) -> jax.Array:
        """[B, K, M] -> [R, T], 0 off the replies."""
        place = (self.episode, self.turn, self.nth)
        return jnp.where(self.is_reply, x[place], jnp.zeros((), x.dtype))


def find_replies(rows: Rows, shape: tuple[int, int, int]) -> Replies:
    """Indexes the reply tokens by episode, turn and position in the reply.

    Each reply lies in exactly one row.

    Args:
      rows: R rows in any order; rows of some turns or episodes may be absent.
      shape: (B, K, M): episodes, turns, and the most tokens of a reply; static.
    """
    is_reply = rows.real_replies
    # Out of range off the replies, so that scatters drop it.
    episode = jnp.where(is_reply, rows.episode, shape[0])
    return Replies(is_reply, episode, rows.turn, reply_places(rows), shape)


def gae_across_rows(
    rewards: jax.Array,
    values: jax.Array,
    rows: Rows,
    shape: tuple[int, int, int],
    *,
    gamma: float,
    lam: float,
) -> Estimate:
    """`gae` along all replies of each episode, where each turn has a row of its own.

    A turn's last reply token is followed by the next turn's first, in another row.

    Args:
      rewards, values: float[R, T], as for `gae`.
      rows, shape: as for `find_replies`.
      gamma, lam: as for `gae`.
    """
    chex.assert_equal_shape([rewards, values, rows.is_reply])
    replies = find_replies(rows, shape)

    def chain(x: jax.Array) -> jax.Array:
        return replies.gather(x).reshape(shape[0], -1)

    chained = gae(
        chain(rewards), chain(values), chain(replies.is_reply), gamma=gamma, lam=lam
    )
    return jax.tree.map(lambda x: replies.spread(x.reshape(shape)), chained)


def group_advantages(
    returns: jax.Array,
    grouping: Grouping,
    terms: jax.Array | None = None,
    *,
    divide_by_std: bool = True,
) -> jax.Array:
    """GRPO: how far an episode's return lies from its group's mean, in group stds.

    A = (R - mean) / std, with the sample std (n - 1), and exactly 0 where std < 1e-6 or
    returns differ by rounding alone. Without the division it is Dr. GRPO, exactly 0
    where returns differ by rounding alone: whitening would blow that rounding up.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Dr. GRPO, Liu et al.
    2025, arXiv:2503.20783. RAGEN and verl add 1e-6 to the std instead, which turns a
    group of equal returns into amplified rounding, and give the only member of a group
    its return as it is; here that is 0, as nothing is known of the group.

    Args:
      returns: float[B], units of reward.
      grouping: the P groups of the episodes, and the episodes that are compared.
      terms: float[B], units of reward, of which the returns are sums: as for
        `group_statistics`.
      divide_by_std: False for Dr. GRPO.

    Returns:
      float32[B], standard deviations, or units of reward for Dr. GRPO.
    """
    statistics = group_statistics(returns, grouping, terms)
    centred = deviations(returns, grouping, statistics)
    if not divide_by_std:
        return centred
    std = statistics.std[grouping.group]
    is_equal = std < SMALLEST_STD
    return jnp.where(is_equal, 0.0, centred / jnp.where(is_equal, 1.0, std))


def leave_one_out(
    returns: jax.Array, grouping: Grouping, terms: jax.Array | None = None
) -> jax.Array:
    """RLOO: an episode's return minus the mean return of the others in its group.

    Equal to (R - mean) * n / (n - 1), with the mean over all n members; 0 for the only
    member of a group, and where all are equal but for rounding.

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.

    Args: as for `group_advantages`.

    Returns:
      float32[B], units of reward.
    """
    statistics = group_statistics(returns, grouping, terms)
    centred = deviations(returns, grouping, statistics)
    count = statistics.count[grouping.group].astype(jnp.float32)
    return centred * count / jnp.maximum(count - 1, 1)


def broadcast_to_tokens(advantage: jax.Array, rows: Rows) -> jax.Array:
    """Gives every reply token the advantage of its episode.

    Args:
      advantage: float[B], by row of `Episodes`.
      rows: R rows of T tokens.

    Returns:
      float32[R, T]; 0 off the replies.
    """
    chex.assert_rank(advantage, 1)
    looked_up = advantage.astype(jnp.float32)[jnp.maximum(rows.episode, 0)]
    return jnp.where(rows.real_replies, looked_up, 0.0)


def broadcast_turns(advantage: jax.Array, rows: Rows) -> jax.Array:
    """Gives every reply token the advantage of its turn.

    Args:
      advantage: float[B, K], by row of `Episodes` and turn.
      rows: R rows of T tokens.

    Returns:
      float32[R, T]; 0 off the replies.
    """
    chex.assert_rank(advantage, 2)
    looked_up = look_up_turns(advantage.astype(jnp.float32), rows)
    return jnp.where(rows.real_replies, looked_up, 0.0)


def whiten(
    values: jax.Array,
    mask: jax.Array,
    weight: jax.Array,
    counted: jax.Array | None = None,
) -> jax.Array:
    """Shifts and scales the counted values to mean 0 and standard deviation 1.

    The std is the population's, sqrt(sum w (x - mean)^2 / sum w): it needs no second
    token and takes any weights. verl and RAGEN divide by n - 1 instead, which differs
    by 1 / (2 n). Values all equal, or a single one, become exactly 0.

    Args:
      values: float[R, T].
      mask: bool[R, T], True on the tokens to whiten.
      weight: float[R], of each row, >= 0; 0 marks padding rows.
      counted: bool[R, T], the tokens that mean and std are taken over; None: `mask`.

    Returns:
      float32[R, T], standard deviations; 0 at tokens not in `mask`, whatever they held.
    """
    chex.assert_rank([values, mask], 2)
    chex.assert_equal_shape([values, mask])
    chex.assert_type([values, mask], [float, bool])
    chex.assert_shape(weight, (values.shape[0],))
    mask = mask & (weight > 0)[:, None]
    values = values.astype(jnp.float32)
    counted = mask if counted is None else mask & counted
    weights = jnp.where(counted, weight.astype(jnp.float32)[:, None], 0.0)
    count = weights.sum()
    count = jnp.where(count > 0, count, 1.0)
    # Relative to the lowest, so that equal values give exact zeros.
    lowest = jnp.min(values, where=counted, initial=jnp.inf)
    above_lowest = jnp.where(mask, values - lowest, 0.0)
    mean = (weights * above_lowest).sum() / count
    centred = above_lowest - mean
    std = jnp.sqrt((weights * jnp.square(centred)).sum() / count)
    is_equal = std < SMALLEST_STD
    whitened = centred / jnp.where(is_equal, 1.0, std)
    return jnp.where(mask & ~is_equal, whitened, 0.0)
