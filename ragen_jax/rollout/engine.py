"""The sampling engine: slots that decode replies and wait for what the world answers.

Two pure functions move it on: `advance` decodes until slots wait, `feed` gives waiting
slots the world's answer. A slot is independent of all others; a finished one takes the
queue's next episode. All of it runs on one shard: arrays here are that shard's own.

A slot's cache holds `length` tokens; one more, `pending`, is known but not yet run
through the model. That is the last sampled token, or the last token fed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import hearing, keys, record, sampling, windows
from ragen_jax.rollout.cache import Cache, Policy
from ragen_jax.rollout.slots import (
    DECODING,
    IDLE,
    WAITING,
    Answer,
    Inputs,
    Part,
    Plan,
    RolloutState,
    Slots,
    Written,
    last_token,
    row_of,
)
from ragen_jax.text import replies
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    END_OF_TURN,
    NO_REPLY,
    PADDING,
    REPLY_BUDGET,
    UNFINISHED,
    Episodes,
    Rows,
)


def start(plan: Plan, policy: Policy, inputs: Inputs) -> RolloutState:
    """The state in which the first S episodes have their prompts and are decoding."""
    group = inputs.prompts.group
    prompts, lengths = inputs.prompts.tokens[group], inputs.prompts.lengths[group]
    width = prompts.shape[1]
    in_prompt = jnp.arange(plan.context)[None] < lengths[:, None]
    tokens = (
        jnp.zeros((plan.episodes, plan.context), jnp.int32).at[:, :width].set(prompts)
    )
    zeros = jnp.zeros((plan.episodes, plan.context), jnp.float32)
    rows = Written(
        tokens=jnp.where(in_prompt, tokens, 0),
        logprobs=zeros,
        entropy=zeros,
        mark=jnp.where(in_prompt, 0, PADDING),
    )
    if plan.window:
        rows = jax.tree.map(
            lambda x, blank: windows.make_room(x, blank, plan.turns),
            rows,
            Written(tokens=0, logprobs=0, entropy=0, mark=PADDING),
        )
    # Each part's first episodes.
    first = np.concatenate([p.first_episode + np.arange(p.slots) for p in plan.parts])
    longer = [(0, 0), (0, 0), (0, 0), (0, plan.context - width)]
    extend = lambda x: jnp.pad(x[group[first]], longer)  # noqa: E731
    zero, none = jnp.zeros(plan.slots, jnp.int32), jnp.zeros((), jnp.int32)
    heads = [part.first_episode + part.slots for part in plan.parts]
    return RolloutState(
        slots=Slots(
            status=jnp.full(plan.slots, DECODING, jnp.int32),
            episode=jnp.asarray(first, jnp.int32),
            turn=zero,
            length=lengths[first] - 1,
            pending=last_token(prompts, lengths)[first],
            sampled=zero,
            reply=_blank_replies(plan, inputs, [part.slots for part in plan.parts]),
            reply_end=zero,
        ),
        cache=jax.tree.map(extend, inputs.prompt_cache),
        rows=rows,
        episodes=record.blank_episodes(plan, inputs.prompts),
        next_episode=jnp.array(heads, jnp.int32),
        decode_passes=none,
        feed_passes=none,
    )


def advance(plan: Plan, policy: Policy, inputs: Inputs, state: RolloutState):
    """Decodes in chunks until W slots wait, or none decodes any more."""

    return jax.lax.while_loop(
        lambda state: ~is_due(plan, state),
        lambda state: decode_chunk(plan, policy, inputs, state),
        state,
    )


def is_due(plan: Plan, state: RolloutState) -> jax.Array:
    """bool[], whether the worlds should now answer.

    A pass for few is as dear as one for many: it is put off until some world's part of
    it is full, or until nothing decodes any more.
    """
    status = state.slots.status
    is_waiting = status == WAITING
    is_full = [
        is_waiting[part.first_slot : part.first_slot + part.slots].sum()
        >= part.feed_width
        for part in plan.parts
    ]
    return jnp.stack(is_full).any() | ~(status == DECODING).any()


def decode_chunk(plan: Plan, policy: Policy, inputs: Inputs, state: RolloutState):
    """`Plan.decode_chunk` decode passes, reading as much of the cache as they need."""

    def passes(bucket: int):
        def one(state: RolloutState, _):
            return _decode_pass(plan, policy, inputs, state, bucket), None

        return lambda state: jax.lax.scan(one, state, length=plan.decode_chunk)[0]

    slots = state.slots
    longest = jnp.where(slots.status == DECODING, slots.length, 0).max()
    needed = longest + plan.decode_chunk
    # The last bucket is the whole context, which no row outgrows.
    index = sum((needed > b).astype(jnp.int32) for b in plan.buckets[:-1])
    for number, bucket in enumerate(plan.buckets):
        # Loops of one round or none: branches of a conditional would copy the cache.
        state, _ = jax.lax.while_loop(
            lambda carry: carry[1],
            lambda carry, bucket=bucket: (passes(bucket)(carry[0]), False),
            (state, index == number),
        )
    return state


def _decode_pass(
    plan: Plan, policy: Policy, inputs: Inputs, state: RolloutState, bucket: int
) -> RolloutState:
    """Samples one token in every decoding slot."""
    slots, rows = state.slots, state.rows
    # A slot that does not decode may be longer than the bucket: it writes nothing.
    active = slots.status == DECODING
    place = jnp.where(active, slots.length, plan.context)
    logits, cache = kv.decode(
        inputs.weights, policy, state.cache, slots.pending, place, bucket
    )
    episode = inputs.prompts.number[jnp.minimum(slots.episode, plan.episodes - 1)]
    token_keys = jax.vmap(keys.token_key, (None, 0, 0, 0))(
        inputs.key, episode, slots.turn, slots.sampled
    )
    drawn = sampling.sample(token_keys, logits, inputs.temperature, greedy=plan.greedy)
    row = jnp.where(active, row_of(plan, slots), plan.rows)  # out of range is dropped
    at = slots.length + 1
    rows = Written(
        tokens=rows.tokens.at[row, at].set(drawn.token, mode="drop"),
        logprobs=rows.logprobs.at[row, at].set(drawn.logprob, mode="drop"),
        entropy=rows.entropy.at[row, at].set(drawn.entropy, mode="drop"),
        mark=rows.mark.at[row, at].set(2 * slots.turn + 1, mode="drop"),
    )
    read, closed = _read_tokens(plan, inputs, slots.reply, drawn.token)
    sampled = slots.sampled + 1
    reply_end = jnp.where(
        inputs.is_stop[drawn.token],
        END_OF_TURN,
        jnp.where(
            closed & plan.stop_at_answer,
            ANSWER_CLOSED,
            jnp.where(sampled >= plan.reply_tokens, REPLY_BUDGET, NO_REPLY),
        ),
    )
    ends = active & (reply_end != NO_REPLY)
    keep = lambda new, old: _where(active, new, old)  # noqa: E731
    slots = slots.replace(
        status=jnp.where(ends, WAITING, slots.status),
        length=keep(at, slots.length),
        pending=keep(drawn.token, slots.pending),
        sampled=keep(sampled, slots.sampled),
        reply=jax.tree.map(keep, read, slots.reply),
        reply_end=keep(reply_end, slots.reply_end),
    )
    return state.replace(
        slots=slots, cache=cache, rows=rows, decode_passes=state.decode_passes + 1
    )


def _read_tokens(plan: Plan, inputs: Inputs, reply: replies.ReplyState, token):
    """Every slot's reply after its token, by its world's tables; bool[S] if closed."""

    def one(part: Part, tables: replies.ReplyTables):
        own = slice(part.first_slot, part.first_slot + part.slots)
        read = jax.vmap(replies.read_token, (None, 0, 0))(
            tables, jax.tree.map(lambda x: x[own], reply), token[own]
        )
        return read, jax.vmap(replies.is_closed, (None, 0))(tables, read)

    return _joined(map(one, plan.parts, inputs.tables))


def choose_waiting(plan: Plan, state: RolloutState) -> tuple[jax.Array, jax.Array]:
    """int32[W] slots to answer next, lower ones first; bool[W] whether they wait.

    The answers of a part are to its own slots, in its own range of W.
    """

    def one(part: Part):
        own = slice(part.first_slot, part.first_slot + part.slots)
        is_waiting = state.slots.status[own] == WAITING
        slot = jnp.argsort(~is_waiting, stable=True)[: part.feed_width]
        return part.first_slot + slot.astype(jnp.int32), is_waiting[slot]

    return _joined(map(one, plan.parts))


def feed(
    plan: Plan, policy: Policy, inputs: Inputs, state: RolloutState, answer: Answer
) -> tuple[RolloutState, jax.Array]:
    """Gives waiting slots the world's answer; ended episodes make room for the next.

    Returns:
      The state, and int32[W], the episode on this shard that a slot newly took up
      from the queue, -1 where it did not.
    """
    slots = jax.tree.map(lambda x: x[answer.slot], state.slots)
    goes_on = answer.is_used & (answer.end == UNFINISHED)
    episodes = record.record_turn(plan, state.episodes, slots, answer)
    state = state.replace(episodes=episodes)
    hear = hearing.in_window if plan.window else hearing.in_full
    heard = hear(plan, policy, inputs, state, slots, answer, goes_on)
    taken_up, is_new, next_episode = _take_up(
        plan, state.next_episode, answer.is_used & ~goes_on
    )
    fed = _copy_prompts(plan, inputs, heard.entries, taken_up, is_new)
    # Entries of slots that neither go on nor start anew are never attended to again.
    cache = jax.tree.map(
        lambda whole, part: whole.at[_only(answer.slot, answer.is_used, plan)].set(
            part, mode="drop"
        ),
        state.cache,
        fed,
    )
    group = inputs.prompts.group[jnp.where(is_new, taken_up, 0)]
    prompts, lengths = inputs.prompts.tokens[group], inputs.prompts.lengths[group]
    after = Slots(
        status=jnp.where(goes_on | is_new, DECODING, IDLE),
        episode=jnp.where(
            goes_on, slots.episode, jnp.where(is_new, taken_up, plan.episodes)
        ),
        turn=jnp.where(goes_on, slots.turn + 1, 0),
        length=jnp.where(goes_on, heard.length, lengths - 1),
        pending=jnp.where(goes_on, heard.pending, last_token(prompts, lengths)),
        sampled=jnp.zeros_like(slots.sampled),
        reply=_blank_replies(plan, inputs, [part.feed_width for part in plan.parts]),
        reply_end=jnp.zeros_like(slots.reply_end),
    )
    where = _only(answer.slot, answer.is_used, plan)
    new_slots = jax.tree.map(
        lambda whole, part: whole.at[where].set(part, mode="drop"), state.slots, after
    )
    state = state.replace(
        slots=new_slots,
        cache=cache,
        rows=heard.rows,
        next_episode=next_episode,
        feed_passes=state.feed_passes + heard.passes,
    )
    return state, jnp.where(is_new, taken_up, -1)


def _take_up(plan: Plan, heads: jax.Array, is_free: jax.Array):
    """Episodes from the queues for the slots that became free.

    Args:
      heads: int32[parts].
      is_free: bool[W].

    Returns:
      int32[W] episodes on this shard, bool[W] whether there was one, int32[parts] the
      queues' heads after it.
    """

    def one(index: int, part: Part):
        own = is_free[part.first_answer : part.first_answer + part.feed_width]
        taken_up = heads[index] + jnp.cumsum(own) - 1
        is_new = own & (taken_up < part.first_episode + part.episodes)
        return taken_up, is_new, heads[index][None] + own.sum()

    return _joined(one(index, part) for index, part in enumerate(plan.parts))


def reply_tokens(
    plan: Plan, state: RolloutState, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The replies that slots have just sampled.

    Args:
      slot: int32[n].

    Returns:
      int32[n, plan.reply_tokens] tokens and int32[n] how many of them are the reply's.
    """
    slots = jax.tree.map(lambda x: x[slot], state.slots)
    row = jnp.minimum(row_of(plan, slots), plan.rows - 1)
    first = slots.length + 1 - slots.sampled
    at = first[:, None] + jnp.arange(plan.reply_tokens)[None]
    tokens = state.rows.tokens[row[:, None], jnp.clip(at, 0, plan.context - 1)]
    return tokens, slots.sampled


def finish(
    plan: Plan, inputs: Inputs, state: RolloutState, policy_version: jax.Array
) -> tuple[Rows, Episodes]:
    """The record of a finished rollout."""
    written = state.rows
    is_reply = (written.mark >= 0) & (written.mark % 2 == 1)
    turn = jnp.where(written.mark >= 0, written.mark // 2, PADDING)
    following = jnp.pad(written.mark[:, 1:], ((0, 0), (0, 1)), constant_values=PADDING)
    episode = inputs.prompts.first_place + jnp.arange(plan.episodes)
    if plan.window:
        episode = jnp.repeat(episode, plan.rows_each)
    rows = Rows(
        tokens=written.tokens,
        is_reply=is_reply,
        logprobs=written.logprobs,
        entropy=written.entropy,
        episode=jnp.where(written.mark >= 0, episode[:, None], PADDING).astype(
            jnp.int32
        ),
        turn=turn,
        turn_end=is_reply & (following != written.mark),
        policy_version=jnp.full(plan.rows, policy_version, jnp.int32),
    )
    return rows, state.episodes


def _copy_prompts(plan: Plan, inputs: Inputs, entries: Cache, episode, is_new) -> Cache:
    group = inputs.prompts.group[jnp.where(is_new, episode, 0)]

    def copy(entry, prompts):
        width = prompts.shape[-1]
        head = _where(is_new, prompts[group], entry[..., :width])
        return entry.at[..., :width].set(head)

    return jax.tree.map(copy, entries, inputs.prompt_cache)


def _blank_replies(plan: Plan, inputs: Inputs, counts: list[int]):
    """Replies of no token yet, as many of each part as `counts` says."""

    def one(tables: replies.ReplyTables, count: int):
        blank = replies.start_reply(tables, plan.actions_per_turn)
        return jax.tree.map(lambda x: jnp.stack([x] * count), blank)

    return _joined(map(one, inputs.tables, counts))


def _joined(parts) -> Any:
    """Pytrees of like structure, joined along their arrays' first axis."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _only(slot: jax.Array, is_used: jax.Array, plan: Plan) -> jax.Array:
    """Slots to write to; out of range, so dropped, where not used."""
    return jnp.where(is_used, slot, plan.slots)


def _where(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`jnp.where` along the leading axis."""
    shape = condition.shape + (1,) * (new.ndim - condition.ndim)
    return jnp.where(condition.reshape(shape), new, old)
