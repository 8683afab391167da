"""The kept rows, and the batch of them that the losses read."""

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import advantages, aggregation, filters, gather
from ragen_jax.settings import Settings, update_counts
from ragen_jax.trajectory import (
    REPLY_BUDGET,
    Episodes,
    Rows,
    look_up_turns,
    thought_mask,
)


@struct.dataclass
class KeptRows:
    """The rows that the filter kept, longest first, padded to C rows."""

    rows: Rows
    weight: jax.Array  # float32[C], 1 for a kept row, 0 for padding behind them


@struct.dataclass
class OldScores:
    """Values and log-probs of the kept rows before the first optimizer step."""

    old_values: jax.Array  # float32[C, T], units of reward; 0 without a critic
    ref_logprobs: jax.Array  # float32[C, T], nats; 0 without a reference
    old_logprobs: jax.Array  # float32[C, T], nats
    # float32[C, T], nats; None: `old_logprobs` are what the sampler recorded.
    sampler_logprobs: jax.Array | None = None


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
    # float32[C, T], nats; None: `old_logprobs` are what the sampler recorded.
    sampler_logprobs: jax.Array | None = None
    # bool[C, T] each, None: all reply tokens. Where the critic learns; which tokens
    # have an entropy bonus; which have a loss of the policy at all.
    is_target: jax.Array | None = None
    has_bonus: jax.Array | None = None
    has_loss: jax.Array | None = None

    @property
    def critic_tokens(self) -> jax.Array:
        """bool[C, T], where the critic learns."""
        return self.is_reply if self.is_target is None else self.is_target

    @property
    def policy_tokens(self) -> jax.Array:
        """bool[C, T], where the policy learns."""
        return self.is_reply if self.has_loss is None else self.has_loss


@struct.dataclass
class ScoredRecord:
    """A record of episodes, scored: what to learn from, and how much."""

    selection: filters.Selection  # of the record's B episodes
    kept: KeptRows  # their rows as recorded
    batch: Batch  # the same rows as the losses read them


def gather_kept_rows(
    settings: Settings, rows: Rows, episodes: Episodes, keep: jax.Array
) -> KeptRows:
    """Moves the kept episodes' rows into a buffer of C rows, a static size.

    C makes room for the most rows that the filter can keep, rounded up to whole
    minibatches. The longest rows come first and padding last, so that a microbatch has
    rows of similar length.

    Args:
      settings: of the run.
      rows, episodes: the record.
      keep: bool[B], episodes to train on.
    """
    minibatch = settings.optimizer.minibatch
    capacity = update_counts.room_for_episodes(settings)
    if settings.rollout.window_turns:  # A row a turn.
        capacity *= episodes.reward.shape[1]
    capacity = -(-capacity // minibatch) * minibatch
    is_kept = gather.is_kept_row(rows, keep)
    rows, weight = gather.gather_rows(rows, is_kept, capacity)
    order = jnp.argsort(-reply_lengths(rows.is_reply), stable=True)
    rows, weight = jax.tree.map(lambda x: x[order], (rows, weight))
    return KeptRows(rows=rows, weight=weight)


def bonus_tokens(settings: Settings, rows: Rows, episodes: Episodes) -> jax.Array:
    """bool[C, T], the reply tokens with an entropy bonus: of thoughts or of answers.

    A thought is what stands before the token that ends `<answer>`.

    Args:
      settings: of the run.
      rows: C rows.
      episodes: all B, with how long their thoughts are.
    """
    is_thought = thought_mask(rows, episodes)
    has_bonus = is_thought if settings.loss.entropy_on == "thought" else ~is_thought
    return rows.is_reply & has_bonus


def uncut_tokens(rows: Rows, episodes: Episodes) -> jax.Array:
    """bool[C, T], the tokens of replies that ended before the reply budget did.

    Where and how a cut reply would have ended is not known, so what it earned says
    little of its tokens.

    Source: overlong filtering, DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4;
    TRL's mask_truncated_completions. Both leave out the whole sample, and so all turns;
    here an episode's other replies stay.

    Args:
      rows: C rows.
      episodes: all B, with why each of their replies ended.
    """
    is_cut = look_up_turns(episodes.reply_end == REPLY_BUDGET, rows)
    return rows.is_reply & ~is_cut


def make_batch(
    settings: Settings,
    kept: KeptRows,
    episodes: Episodes,
    scores: OldScores,
    estimate: advantages.Estimate,
    token_advantages: jax.Array,
) -> Batch:
    """The batch of C kept rows of T tokens.

    Args:
      settings: of the run.
      kept: the rows.
      episodes: all B.
      scores: what the models said of the rows.
      estimate: returns, and which tokens the critic learns.
      token_advantages: float32[C, T], from `rescale`.
    """
    rows = kept.rows
    has_bonus = None
    if settings.loss.entropy_on != "reply":
        has_bonus = bonus_tokens(settings, rows, episodes)
    has_loss = None
    if settings.loss.cut_replies == "mask":
        has_loss = uncut_tokens(rows, episodes)
    return Batch(
        tokens=rows.tokens,
        is_reply=rows.is_reply,
        old_logprobs=scores.old_logprobs,
        ref_logprobs=scores.ref_logprobs,
        old_values=scores.old_values,
        advantages=token_advantages,
        returns=estimate.returns,
        weight=kept.weight,
        sampler_logprobs=scores.sampler_logprobs,
        is_target=estimate.is_target,
        has_bonus=has_bonus,
        has_loss=has_loss,
    )


def reply_lengths(is_reply: jax.Array) -> jax.Array:
    """int32[rows], tokens up to the last reply token; none after it has a loss."""
    index = jnp.arange(1, is_reply.shape[1] + 1)[None]
    return jnp.where(is_reply, index, 0).max(axis=1)


def explained_variance(batch: Batch) -> jax.Array:
    """1 - Var(returns - old values) / Var(returns), over the critic's tokens."""
    mask = batch.critic_tokens & (batch.weight > 0)[:, None]

    def variance(x: jax.Array) -> jax.Array:
        mean = aggregation.token_mean(x, mask).value()
        return aggregation.token_mean((x - mean) ** 2, mask).value()

    total = variance(batch.returns)
    rest = variance(batch.returns - batch.old_values)
    return jnp.where(total > 1e-12, 1 - rest / jnp.maximum(total, 1e-12), 0.0)
