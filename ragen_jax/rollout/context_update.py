"""How feedback enters the context of slots that continue: appended, or by a window.

`engine.give_feedback` calls one of the two functions. Both get W slots, their feedback,
and bool[W], which of them continue; what they return for the others is ignored.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout import windows
from ragen_jax.rollout.arrays import last_token, take
from ragen_jax.rollout.kv_cache import Cache, ShardedModel
from ragen_jax.rollout.types import (
    EngineInputs,
    EnvFeedback,
    RolloutPlan,
    RolloutState,
    RowBuffers,
    Slots,
    row_of,
)
from ragen_jax.utils.scatter import put_where


@struct.dataclass
class ContextUpdate:
    """The context of W slots after the feedback, for those that continue."""

    entries: Cache  # of W slots
    rows: RowBuffers  # all of them
    length: jax.Array  # int32[W], tokens in the cache
    pending: jax.Array  # int32[W], the token after those
    passes: jax.Array | int  # int32[], forward passes that it took, over the W slots


def append_message(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    slots: Slots,
    feedback: EnvFeedback,
    continues: jax.Array,
) -> ContextUpdate:
    """Appends the messages to the slots' rows and caches."""
    rows = _write_message(plan, state.rows, slots, feedback, continues)
    # Runs the pending token and the message but its last token, the next pending one.
    # Messages are padded to the widest of any environment, which may exceed the rest of
    # a row: the chunk then starts earlier, at tokens already in the cache, and computes
    # the same entries again.
    width = min(feedback.tokens.shape[1], plan.context)
    position = jnp.where(continues, jnp.minimum(slots.length, plan.context - width), 0)
    row = jnp.minimum(slots.episode, plan.episodes - 1)
    chunk = rows.tokens[row[:, None], position[:, None] + jnp.arange(width)[None]]
    entries = take(state.cache, feedback.slot)
    return ContextUpdate(
        entries=kv.extend(
            inputs.weights, model, entries, chunk, position, plan.buckets
        ),
        rows=rows,
        length=slots.length + feedback.length,
        pending=last_token(feedback.tokens, feedback.length),
        passes=1,
    )


def slide_window(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    slots: Slots,
    feedback: EnvFeedback,
    continues: jax.Array,
) -> ContextUpdate:
    """Starts the rows of the next turns, without the turns that leave the window."""
    rows, prompts = state.rows, inputs.prompts
    assert prompts.cuts is not None  # There if `plan.window`.
    row = jnp.where(continues, row_of(plan, slots), 0)
    episode = jnp.where(continues, slots.episode, 0)
    closing = windows.closing_before(prompts.cuts, state.episodes.reply_end[episode])
    new, unmoved = jax.vmap(
        functools.partial(windows.next_row, plan.window, plan.reply_tokens)
    )(
        windows.Row(rows.tokens[row], rows.turn[row], slots.length + 1),
        slots.turn,
        prompts.cuts.opening[prompts.group[episode]],
        closing,
        windows.Message(feedback.tokens, feedback.length),
    )
    # The kept tokens are in the cache, except the pending one.
    entries, passes = windows.prefill(
        inputs.weights,
        model,
        take(state.cache, feedback.slot),
        new.tokens,
        jnp.where(continues, jnp.minimum(unmoved, slots.length), 0),
        jnp.where(continues, new.length - 1, 0),
        feedback.tokens.shape[1],
        plan.buckets,
    )
    return ContextUpdate(
        entries=entries,
        rows=rows.replace(
            tokens=put_where(rows.tokens, row + 1, new.tokens, continues),
            turn=put_where(rows.turn, row + 1, new.turn, continues),
        ),
        length=new.length - 1,
        pending=last_token(new.tokens, new.length),
        passes=jnp.maximum(passes, 1),
    )


def _write_message(
    plan: RolloutPlan,
    rows: RowBuffers,
    slots: Slots,
    feedback: EnvFeedback,
    continues: jax.Array,
) -> RowBuffers:
    """The rows with each message written after its slot's reply."""
    index = jnp.arange(feedback.tokens.shape[1])[None]
    is_real = continues[:, None] & (index < feedback.length[:, None])
    row = jnp.broadcast_to(slots.episode[:, None], is_real.shape)
    position = slots.length[:, None] + 1 + index  # Behind the reply's last token.
    turn = jnp.broadcast_to(slots.turn[:, None] + 1, position.shape)
    return rows.replace(
        tokens=put_where(rows.tokens, (row, position), feedback.tokens, is_real),
        turn=put_where(rows.turn, (row, position), turn, is_real),
    )
