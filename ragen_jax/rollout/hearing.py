"""How slots that go on take in what the world says: into the row, or into a window.

Both functions are given W slots, the answers to them, and bool[W], which of them go on;
what they say of the others means nothing.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import windows
from ragen_jax.rollout.cache import Cache, Policy
from ragen_jax.rollout.slots import (
    Answer,
    Inputs,
    Plan,
    RolloutState,
    Slots,
    Written,
    last_token,
    row_of,
)


@struct.dataclass
class Heard:
    """What W slots know once the world has answered; of those that go on."""

    entries: Cache  # of W slots
    rows: Written  # all of them
    length: jax.Array  # int32[W], tokens in the cache
    pending: jax.Array  # int32[W], the token after those
    passes: jax.Array | int  # int32[], over the W slots


def in_full(
    plan: Plan,
    policy: Policy,
    inputs: Inputs,
    state: RolloutState,
    slots: Slots,
    answer: Answer,
    goes_on: jax.Array,
) -> Heard:
    """Adds the messages to the slots' rows and caches."""
    # The pending token, then the message without its last, which is pending next.
    chunk = jnp.concatenate([slots.pending[:, None], answer.tokens[:, :-1]], axis=1)
    entries = jax.tree.map(lambda x: x[answer.slot], state.cache)
    # Slots that end may stand too near the end of the context for a whole chunk.
    place = jnp.where(goes_on, slots.length, 0)
    return Heard(
        entries=kv.feed(inputs.weights, policy, entries, chunk, place, plan.buckets),
        rows=_write_message(plan, state.rows, slots, answer, goes_on, chunk.shape[1]),
        length=slots.length + answer.length,
        pending=last_token(answer.tokens, answer.length),
        passes=1,
    )


def in_window(
    plan: Plan,
    policy: Policy,
    inputs: Inputs,
    state: RolloutState,
    slots: Slots,
    answer: Answer,
    goes_on: jax.Array,
) -> Heard:
    """Begins the rows of the next turns, without the turns that fall out of them."""
    rows, prompts = state.rows, inputs.prompts
    row = jnp.where(goes_on, row_of(plan, slots), 0)
    episode = jnp.where(goes_on, slots.episode, 0)
    closing = windows.closing_before(prompts.cuts, state.episodes.reply_end[episode])
    new, kept = jax.vmap(
        functools.partial(windows.next_row, plan.window, plan.reply_tokens)
    )(
        windows.Row(rows.tokens[row], rows.mark[row], slots.length + 1),
        slots.turn,
        prompts.cuts.opening[prompts.group[episode]],
        closing,
        windows.Message(answer.tokens, answer.length),
    )
    # What is kept is in the cache, but for the token that was pending.
    entries, passes = windows.prefill(
        inputs.weights,
        policy,
        jax.tree.map(lambda x: x[answer.slot], state.cache),
        new.tokens,
        jnp.where(goes_on, jnp.minimum(kept, slots.length), 0),
        jnp.where(goes_on, new.length - 1, 0),
        answer.tokens.shape[1],
        plan.buckets,
    )
    where = jnp.where(goes_on, row + 1, plan.rows)
    return Heard(
        entries=entries,
        rows=rows.replace(
            tokens=rows.tokens.at[where].set(new.tokens, mode="drop"),
            mark=rows.mark.at[where].set(new.mark, mode="drop"),
        ),
        length=new.length - 1,
        pending=last_token(new.tokens, new.length),
        passes=jnp.maximum(passes, 1),
    )


def _write_message(plan, rows: Written, slots: Slots, answer: Answer, goes_on, width):
    index = jnp.arange(width)[None]
    is_real = goes_on[:, None] & (index < answer.length[:, None])
    row = jnp.where(is_real, slots.episode[:, None], plan.episodes)
    at = slots.length[:, None] + 1 + index
    mark = jnp.broadcast_to(2 * (slots.turn[:, None] + 1), at.shape)
    return rows.replace(
        tokens=rows.tokens.at[row, at].set(answer.tokens, mode="drop"),
        mark=rows.mark.at[row, at].set(mark, mode="drop"),
    )
