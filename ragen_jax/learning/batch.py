"""The kept rows, and the batch of them that the losses read."""

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import advantages, aggregation, filters, gather
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class KeptRows:
    """C rows of the groups that the filter kept, longest first; the rest is padding."""

    rows: Rows
    weight: jax.Array  # float32[C], 1 for a kept row, 0 for padding behind them


@struct.dataclass
class OldScores:
    """What the models say of the kept rows before they learn from them."""

    old_values: jax.Array  # float32[C, T], units of reward; 0 without a critic
    ref_logprobs: jax.Array  # float32[C, T], nats; 0 without a reference
    old_logprobs: jax.Array  # float32[C, T], nats
    sampler_logprobs: jax.Array | None = None  # None: as `old_logprobs`


@struct.dataclass
class Batch:
    """Kept rows with everything that the losses read. Rows of weight 0 are padding."""

    tokens: jax.Array  # int32[C, T]
    is_reply: jax.Array  # bool[C, T]
    old_logprobs: jax.Array  # float32[C, T], nats, before the first update
    ref_logprobs: jax.Array  # float32[C, T], nats, 0 without a reference
    old_values: jax.Array  # float32[C, T], units of reward
    advantages: jax.Array  # float32[C, T]
    returns: jax.Array  # float32[C, T], units of reward
    weight: jax.Array  # float32[C]
    # None: as `old_logprobs`, which the sampler recorded.
    sampler_logprobs: jax.Array | None = None  # float32[C, T], nats
    # None: all reply tokens.
    is_target: jax.Array | None = None  # bool[C, T], whose value the critic learns
    has_bonus: jax.Array | None = None  # bool[C, T], with an entropy bonus


@struct.dataclass
class ScoredRecord:
    """A record of episodes, scored: what to learn from, and how much."""

    chosen: filters.Selection  # of the record's B episodes
    kept: KeptRows  # their rows as recorded
    batch: Batch  # the same rows as the losses read them


def gather_kept_rows(
    settings: Settings, rows: Rows, episodes: Episodes, keep: jax.Array
) -> KeptRows:
    """The kept episodes' rows in room for all that can be kept, in whole minibatches.

    Longest first, padding rows last: microbatches of like length.

    Args:
      settings: of the run.
      rows, episodes: the record.
      keep: bool[B], episodes to train on.
    """
    minibatch = settings.optimizer.minibatch
    capacity = filters.most_kept_episodes(settings)
    if settings.rollout.window_turns:  # A row a turn.
        capacity *= episodes.reward.shape[1]
    capacity = -(-capacity // minibatch) * minibatch
    is_kept = gather.kept_rows(rows, keep)
    rows, weight = gather.gather_rows(rows, is_kept, capacity)
    order = jnp.argsort(-reply_lengths(rows.is_reply), stable=True)
    rows, weight = jax.tree.map(lambda x: x[order], (rows, weight))
    return KeptRows(rows=rows, weight=weight)


def bonus_tokens(settings: Settings, rows: Rows, episodes: Episodes) -> jax.Array:
    """bool[C, T], the reply tokens with an entropy bonus: of thoughts or of answers.

    A thought is what stands before the answer's text begins, tags included.

    Args:
      settings: of the run.
      rows: C rows.
      episodes: all B, with how long their thoughts are.
    """
    count, turns = episodes.reward.shape
    most = count, turns, settings.rollout.reply_tokens
    nth = advantages.find_replies(rows, most).nth
    place = jnp.maximum(rows.episode, 0), jnp.maximum(rows.turn, 0)
    is_thought = nth < episodes.thought_tokens[place]
    wanted = is_thought if settings.loss.entropy_on == "thought" else ~is_thought
    return rows.is_reply & wanted


def make_batch(
    settings: Settings,
    kept: KeptRows,
    episodes: Episodes,
    scores: OldScores,
    estimate: advantages.Estimate,
    gains: jax.Array,
) -> Batch:
    """The batch of C kept rows of T tokens.

    Args:
      settings: of the run.
      kept: the rows.
      episodes: all B.
      scores: what the models said of the rows.
      estimate: returns, and which tokens the critic learns.
      gains: float32[C, T], advantages as the losses read them.
    """
    rows = kept.rows
    has_bonus = None
    if settings.loss.entropy_on != "reply":
        has_bonus = bonus_tokens(settings, rows, episodes)
    return Batch(
        tokens=rows.tokens,
        is_reply=rows.is_reply,
        old_logprobs=scores.old_logprobs,
        ref_logprobs=scores.ref_logprobs,
        old_values=scores.old_values,
        advantages=gains,
        returns=estimate.returns,
        weight=kept.weight,
        sampler_logprobs=scores.sampler_logprobs,
        is_target=estimate.is_target,
        has_bonus=has_bonus,
    )


def reply_lengths(is_reply: jax.Array) -> jax.Array:
    """int32[rows], up to the last reply token; what stands behind has no loss."""
    index = jnp.arange(1, is_reply.shape[1] + 1)[None]
    return jnp.where(is_reply, index, 0).max(axis=1)


def explained_variance(batch: Batch) -> jax.Array:
    """1 - Var(returns - old values) / Var(returns), over the critic's tokens."""
    is_target = batch.is_reply if batch.is_target is None else batch.is_target
    mask = is_target & (batch.weight > 0)[:, None]

    def variance(x: jax.Array) -> jax.Array:
        mean = aggregation.token_mean(x, mask).value()
        return aggregation.token_mean((x - mean) ** 2, mask).value()

    total = variance(batch.returns)
    rest = variance(batch.returns - batch.old_values)
    return jnp.where(total > 1e-12, 1 - rest / jnp.maximum(total, 1e-12), 0.0)
