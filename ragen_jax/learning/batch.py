"""What the losses read: the kept rows with their advantages, returns and old values."""

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import advantages, filters, reduce, rewards, shaping
from ragen_jax.learning.forward import Forward, reply_lengths
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class Batch:
    """Kept rows with everything that the losses read. Rows of weight 0 are padding."""

    tokens: jax.Array  # int32[C, T]
    is_reply: jax.Array  # bool[C, T]
    old_logprobs: jax.Array  # float32[C, T], nats, under the sampling policy
    ref_logprobs: jax.Array  # float32[C, T], nats, 0 without a reference
    old_values: jax.Array  # float32[C, T], units of reward
    advantages: jax.Array  # float32[C, T]
    returns: jax.Array  # float32[C, T], units of reward
    weight: jax.Array  # float32[C]


def choose_groups(settings: Settings, episodes: Episodes):
    """bool[P] groups to train on, and float32[P] in-group std of the task return."""
    chosen, penalty = settings.filter, settings.reward.format_penalty
    groups = settings.rollout.prompts
    plain = rewards.returns(episodes)
    std = filters.group_statistics(plain, episodes.group, groups).std
    score = std
    if chosen.with_penalty:
        score = filters.group_statistics(
            rewards.returns(episodes, penalty), episodes.group, groups
        ).std
    keep = filters.keep_groups(
        score,
        strategy=chosen.strategy,
        fraction=chosen.fraction,
        keep_zero=chosen.keep_zero,
    )
    return keep, std


def prepare(
    forward: Forward,
    critic,
    reference,
    rows: Rows,
    episodes: Episodes,
    keep: jax.Array,
) -> Batch:
    """Gathers the kept rows and computes what their losses need.

    Args:
      forward: runs the models.
      critic: its trainable tree, {} without one.
      reference: the frozen policy of the KL term, {} without one.
      rows, episodes: the record.
      keep: bool[P], groups to train on.
    """
    settings = forward.settings
    rows, weight = _kept(settings, rows, episodes, keep)
    rows = forward.share_rows(rows)
    is_reply = rows.is_reply
    zeros = jnp.zeros(rows.tokens.shape, jnp.float32)
    old_values = ref_logprobs = zeros
    if settings.estimator == "ppo":
        old_values = forward.map_rows(
            lambda tokens, _: forward.values(critic, tokens),
            rows.tokens,
            is_reply,
            weight,
        )
    if settings.loss.kl > 0:
        ref_logprobs = forward.map_rows(
            lambda *piece: forward.reference_logprobs(reference, *piece),
            rows.tokens,
            is_reply,
            weight,
        )
    by_turn = shaping.turn_rewards(settings.reward, episodes, settings.rollout.prompts)
    earned = rewards.at_turn_ends(rows, by_turn)
    if settings.loss.kl > 0 and settings.loss.kl_in == "reward":
        earned = rewards.penalize_kl(
            earned,
            rows.logprobs,
            ref_logprobs,
            is_reply,
            settings.loss.kl,
            settings.loss.kl_kind,
        )
    totals = by_turn.sum(axis=1)
    gains, returns = _advantages(settings, earned, totals, old_values, rows, episodes)
    if settings.advantage.whiten:
        gains = advantages.whiten(gains, is_reply, weight)
    return Batch(
        tokens=rows.tokens,
        is_reply=is_reply,
        old_logprobs=rows.logprobs,
        ref_logprobs=ref_logprobs,
        old_values=old_values,
        advantages=gains,
        returns=returns,
        weight=weight,
    )


def _kept(
    settings: Settings, rows: Rows, episodes: Episodes, keep: jax.Array
) -> tuple[Rows, jax.Array]:
    """The kept groups' rows in room for all that can be kept, and float32[C] weights.

    Longest first, padding rows last: microbatches of like length.
    """
    most = filters.most_kept(
        settings.rollout.prompts,
        strategy=settings.filter.strategy,
        fraction=settings.filter.fraction,
    )
    minibatch = settings.optimizer.minibatch
    capacity = most * settings.rollout.group_size
    if settings.rollout.window_turns:  # A row a turn.
        capacity *= episodes.reward.shape[1]
    capacity = -(-capacity // minibatch) * minibatch
    is_kept = filters.kept_rows(rows, episodes, keep)
    rows, weight = filters.gather_rows(rows, is_kept, capacity)
    order = jnp.argsort(-reply_lengths(rows.is_reply), stable=True)
    return jax.tree.map(lambda x: x[order], (rows, weight))


def _advantages(
    settings: Settings, earned, totals, old_values, rows: Rows, episodes: Episodes
):
    """(advantages, returns), float32[C, T] each, from rewards by token and episode."""
    chosen = settings.advantage
    if settings.estimator == "ppo":
        along = dict(gamma=chosen.gamma, lam=chosen.lam)
        if settings.rollout.window_turns:
            most = (*episodes.reward.shape, settings.rollout.reply_tokens)
            result = advantages.gae_across_rows(earned, old_values, rows, most, **along)
        else:
            result = advantages.gae(earned, old_values, rows.is_reply, **along)
        return result.advantages, result.returns
    gain = advantages.group_advantages(
        totals,
        episodes.group,
        settings.rollout.prompts,
        divide_by_std=chosen.divide_by_std,
    )
    tokens = advantages.broadcast_to_tokens(gain, rows)
    return tokens, jnp.zeros_like(tokens)


def explained_variance(batch: Batch) -> jax.Array:
    """1 - Var(returns - old values) / Var(returns), over the kept reply tokens."""
    mask = batch.is_reply & (batch.weight > 0)[:, None]

    def variance(x: jax.Array) -> jax.Array:
        mean = reduce.token_mean(x, mask).value()
        return reduce.token_mean((x - mean) ** 2, mask).value()

    total = variance(batch.returns)
    rest = variance(batch.returns - batch.old_values)
    return jnp.where(total > 1e-12, 1 - rest / jnp.maximum(total, 1e-12), 0.0)
