"""The sampling engine: slots that decode replies, then wait for their environments.

Pure functions over `RolloutState`: `decode_chunk` samples a few tokens in every
decoding slot, `extend` gives waiting slots their feedback. `rollout.py` composes both
in one compiled loop; a host may call `advance` (decodes until slots wait) and `extend`
in turn and gets the identical record.

Slots are independent; a finished one takes the next episode from its environment's
queue. All of this runs on one shard: arrays are that shard's own. A slot's cache holds
`length` tokens; one more, `pending`, is known but not yet run through the model: the
last token that was sampled, or the last of a message.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.rollout import context_update, prng, record, token_sampling, windows
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.kv_cache import ShardedModel
from ragen_jax.rollout.types import (
    DECODING,
    IDLE,
    WAITING,
    EngineInputs,
    EnvFeedback,
    EnvShard,
    RolloutPlan,
    RolloutState,
    RowBuffers,
    Slots,
    concatenate,
    last_token,
    row_of,
    run_if,
    where_first,
)
from ragen_jax.text import reply_parser
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    NO_REPLY,
    PADDING,
    REPLY_BUDGET,
    UNFINISHED,
)


def start(plan: RolloutPlan, model: ShardedModel, inputs: EngineInputs) -> RolloutState:
    """The state in which S episodes, the first of each environment, are decoding."""
    group = inputs.prompts.group
    prompts, lengths = inputs.prompts.tokens[group], inputs.prompts.lengths[group]
    first = np.concatenate(
        [shard.first_episode + np.arange(shard.slots) for shard in plan.env_shards]
    )
    queue_heads = [shard.first_episode + shard.slots for shard in plan.env_shards]
    cache = jax.tree.map(lambda x: x[group[first]], inputs.prompt_cache)
    zeros, zero = jnp.zeros(plan.slots, jnp.int32), jnp.zeros((), jnp.int32)
    return RolloutState(
        slots=Slots(
            status=jnp.full(plan.slots, DECODING, jnp.int32),
            episode=jnp.asarray(first, jnp.int32),
            turn=zeros,
            length=lengths[first] - 1,
            pending=last_token(prompts, lengths)[first],
            sampled=zeros,
            reply=_blank_replies(
                plan, inputs, [shard.slots for shard in plan.env_shards]
            ),
            reply_end=zeros,
        ),
        cache=kv.with_context(cache, model, plan.context),
        rows=_prompt_rows(plan, prompts, lengths),
        episodes=record.blank_episodes(plan, inputs.prompts),
        next_episode=jnp.array(queue_heads, jnp.int32),
        decode_steps=zero,
        extend_steps=zero,
        too_long=jnp.zeros(len(plan.env_shards), jnp.int32),
    )


def _prompt_rows(
    plan: RolloutPlan, prompts: jax.Array, lengths: jax.Array
) -> RowBuffers:
    """Rows that hold the prompts (int32[B, Tp], right-padded, and int32[B]) alone."""
    shape = (plan.episodes, plan.context)
    in_prompt = jnp.arange(plan.context)[None] < lengths[:, None]
    tokens = jnp.zeros(shape, jnp.int32).at[:, : prompts.shape[1]].set(prompts)
    zeros = jnp.zeros(shape, jnp.float32)
    rows = RowBuffers(
        tokens=jnp.where(in_prompt, tokens, 0),
        logprobs=zeros,
        entropy=zeros,
        turn=jnp.where(in_prompt, 0, PADDING),
        is_reply=jnp.zeros(shape, bool),
    )
    if not plan.window:
        return rows
    room = lambda x, blank: windows.make_room(x, blank, plan.turns)
    return RowBuffers(
        tokens=room(rows.tokens, 0),
        logprobs=room(rows.logprobs, 0),
        entropy=room(rows.entropy, 0),
        turn=room(rows.turn, PADDING),
        is_reply=room(rows.is_reply, False),
    )


def advance(
    plan: RolloutPlan, model: ShardedModel, inputs: EngineInputs, state: RolloutState
) -> RolloutState:
    """Decodes in chunks until environments should step. For a loop in Python."""
    return jax.lax.while_loop(
        lambda state: ~env_step_due(plan, state),
        lambda state: decode_chunk(plan, model, inputs, state),
        state,
    )


def env_step_due(plan: RolloutPlan, state: RolloutState) -> jax.Array:
    """bool[], whether the environments should step now.

    A step costs the same for few slots as for many, so it waits until some environment
    fills its part of the W entries or, if that is fewer, until 1 / `extend_share` of
    its slots that are not idle wait; or until no slot decodes.
    """
    status = state.slots.status

    def is_full(shard: EnvShard) -> jax.Array:
        env_status, most = status[shard.slot_range], shard.extend_width
        if not plan.extend_share:
            return (env_status == WAITING).sum() >= most
        enough = -(-(env_status != IDLE).sum() // plan.extend_share)
        return (env_status == WAITING).sum() >= jnp.clip(enough, 1, most)

    full = jnp.stack([is_full(shard) for shard in plan.env_shards])
    return full.any() | ~(status == DECODING).any()


def decode_chunk(
    plan: RolloutPlan, model: ShardedModel, inputs: EngineInputs, state: RolloutState
) -> RolloutState:
    """`plan.decode_chunk` steps, reading the shortest bucket of the cache that fits."""

    def steps(bucket: int):
        def one_step(state: RolloutState, _):
            return _decode_step(plan, model, inputs, state, bucket), None

        return lambda state: jax.lax.scan(one_step, state, length=plan.decode_chunk)[0]

    slots = state.slots
    longest = jnp.where(slots.status == DECODING, slots.length, 0).max()
    needed = longest + plan.decode_chunk
    # The last bucket is the whole context, which no row outgrows.
    buckets = model.buckets(plan.buckets)
    index = sum((needed > b).astype(jnp.int32) for b in buckets[:-1])
    if len(buckets) == 1:
        return steps(buckets[0])(state)

    for number, bucket in enumerate(buckets):
        state = run_if(index == number, steps(bucket), state)
    return state


def _decode_step(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    bucket: int,
) -> RolloutState:
    """Samples one token in every decoding slot."""
    slots = state.slots
    # Other slots write nothing (their length is out of range): they may be longer than
    # the bucket.
    active = slots.status == DECODING
    lengths = jnp.where(active, slots.length, plan.context)
    logits, cache = kv.decode(
        inputs.weights, model, state.cache, slots.pending, lengths, bucket
    )
    episode = inputs.prompts.number[jnp.minimum(slots.episode, plan.episodes - 1)]
    token_keys = jax.vmap(prng.token_key, (None, 0, 0, 0))(
        inputs.key, episode, slots.turn, slots.sampled
    )
    drawn = token_sampling.sample(
        token_keys, logits, inputs.temperature, greedy=plan.greedy
    )
    row = jnp.where(active, row_of(plan, slots), plan.rows)  # plan.rows: dropped
    position = slots.length + 1
    rows = _write_reply_tokens(state.rows, row, position, slots.turn, drawn)
    reply, is_closed = _read_tokens(plan, inputs, slots.reply, drawn.token)
    sampled = slots.sampled + 1
    reply_end = _reply_end(plan, inputs.stops[drawn.token], is_closed, sampled)
    ends = active & (reply_end != NO_REPLY)
    keep = lambda new, old: where_first(active, new, old)
    slots = slots.replace(
        status=jnp.where(ends, WAITING, slots.status),
        length=keep(position, slots.length),
        pending=keep(drawn.token, slots.pending),
        sampled=keep(sampled, slots.sampled),
        reply=jax.tree.map(keep, reply, slots.reply),
        reply_end=keep(reply_end, slots.reply_end),
    )
    return state.replace(
        slots=slots, cache=cache, rows=rows, decode_steps=state.decode_steps + 1
    )


def _write_reply_tokens(
    rows: RowBuffers,
    row: jax.Array,
    position: jax.Array,
    turn: jax.Array,
    drawn: token_sampling.Sampled,
) -> RowBuffers:
    """The rows with each slot's token.

    Args:
      rows: R rows.
      row, position: int32[S], where each slot writes; dropped if out of range.
      turn: int32[S], being played.
      drawn: the tokens.
    """
    put = lambda buffer, new: buffer.at[row, position].set(new, mode="drop")
    return RowBuffers(
        tokens=put(rows.tokens, drawn.token),
        logprobs=put(rows.logprobs, drawn.logprob),
        entropy=put(rows.entropy, drawn.entropy),
        turn=put(rows.turn, turn),
        is_reply=put(rows.is_reply, True),
    )


def _reply_end(
    plan: RolloutPlan, stop: jax.Array, is_closed: jax.Array, sampled: jax.Array
) -> jax.Array:
    """int32[S], why each slot's reply ends with its token; NO_REPLY: it continues.

    Args:
      plan: with the budget.
      stop: int32[S], what the token stops as, from `EngineInputs.stops`.
      is_closed: bool[S], whether the answer is closed.
      sampled: int32[S], tokens of the reply, this one included.
    """
    return jnp.where(
        stop != NO_REPLY,
        stop,
        jnp.where(
            is_closed & plan.stop_at_answer,
            ANSWER_CLOSED,
            jnp.where(sampled >= plan.reply_tokens, REPLY_BUDGET, NO_REPLY),
        ),
    )


def _read_tokens(
    plan: RolloutPlan,
    inputs: EngineInputs,
    reply: reply_parser.ReplyState,
    token: jax.Array,
) -> tuple[reply_parser.ReplyState, jax.Array]:
    """Each slot's reply after its token, and bool[S] whether its answer is closed."""

    def read(shard: EnvShard, tables: reply_parser.ReplyTables):
        slots = shard.slot_range
        after = jax.vmap(reply_parser.read_token, (None, 0, 0))(
            tables, jax.tree.map(lambda x: x[slots], reply), token[slots]
        )
        return after, jax.vmap(reply_parser.is_closed, (None, 0))(tables, after)

    return concatenate(map(read, plan.env_shards, inputs.tables))


def choose_waiting(
    plan: RolloutPlan, state: RolloutState
) -> tuple[jax.Array, jax.Array]:
    """int32[W], slots that get feedback next; bool[W], whether they really wait.

    Lower slots come first. Each environment has its own range of the W entries.
    """

    def choose(shard: EnvShard):
        is_waiting = state.slots.status[shard.slot_range] == WAITING
        slot = jnp.argsort(~is_waiting, stable=True)[: shard.extend_width]
        return shard.first_slot + slot.astype(jnp.int32), is_waiting[slot]

    return concatenate(map(choose, plan.env_shards))


def extend(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    feedback: EnvFeedback,
) -> tuple[RolloutState, jax.Array]:
    """Gives waiting slots their feedback; slots of ended episodes take the next ones.

    Returns:
      The state, and int32[W], the episode on this shard that was newly admitted from
      the queue to the slot, -1 where none was.
    """
    slots = jax.tree.map(lambda x: x[feedback.slot], state.slots)
    continues = feedback.is_used & (feedback.end == UNFINISHED)
    episodes = record.record_turn(plan, state.episodes, slots, feedback)
    state = state.replace(episodes=episodes)
    update_context = (
        context_update.slide_window if plan.window else context_update.append_message
    )
    context = update_context(plan, model, inputs, state, slots, feedback, continues)
    admitted, is_new, next_episode = _admit(
        plan, state.next_episode, feedback.is_used & ~continues
    )
    group = inputs.prompts.group[jnp.where(is_new, admitted, 0)]
    prompts, lengths = inputs.prompts.tokens[group], inputs.prompts.lengths[group]
    # Cache entries of slots that become idle keep what they hold: nothing reads them.
    entries = kv.with_prompts(
        context.entries, model, inputs.prompt_cache, group, is_new
    )
    after = Slots(
        status=jnp.where(continues | is_new, DECODING, IDLE),
        episode=jnp.where(
            continues, slots.episode, jnp.where(is_new, admitted, plan.episodes)
        ),
        turn=jnp.where(continues, slots.turn + 1, 0),
        length=jnp.where(continues, context.length, lengths - 1),
        pending=jnp.where(continues, context.pending, last_token(prompts, lengths)),
        sampled=jnp.zeros_like(slots.sampled),
        reply=_blank_replies(
            plan, inputs, [shard.extend_width for shard in plan.env_shards]
        ),
        reply_end=jnp.zeros_like(slots.reply_end),
    )
    # Out of range, so dropped, where fewer than W slots waited.
    where = jnp.where(feedback.is_used, feedback.slot, plan.slots)
    put = lambda old, new: old.at[where].set(new, mode="drop")
    state = state.replace(
        slots=jax.tree.map(put, state.slots, after),
        cache=jax.tree.map(put, state.cache, entries),
        rows=context.rows,
        next_episode=next_episode,
        extend_steps=state.extend_steps + context.steps,
    )
    return state, jnp.where(is_new, admitted, -1)


def _admit(plan: RolloutPlan, heads: jax.Array, is_free: jax.Array):
    """Assigns the queues' next episodes to the slots that became free.

    Args:
      heads: int32[environments], the next episode of each queue.
      is_free: bool[W].

    Returns:
      int32[W] episodes on this shard, bool[W] whether the queue had one, and the new
      heads, which may lie beyond the queues' ends.
    """

    def admit(index: int, shard: EnvShard):
        is_free_slot = is_free[shard.feedback_range]
        admitted = heads[index] + jnp.cumsum(is_free_slot) - 1
        is_new = is_free_slot & (admitted < shard.first_episode + shard.episodes)
        return admitted, is_new, heads[index][None] + is_free_slot.sum()

    return concatenate(
        admit(index, shard) for index, shard in enumerate(plan.env_shards)
    )


def reply_tokens(
    plan: RolloutPlan, state: RolloutState, slot: jax.Array
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


def _blank_replies(plan: RolloutPlan, inputs: EngineInputs, counts: list[int]):
    """Replies of no token yet, `counts` of them for each environment."""

    def blank_replies(tables: reply_parser.ReplyTables, count: int):
        blank = reply_parser.start_reply(tables, plan.actions_per_turn)
        return jax.tree.map(lambda x: jnp.stack([x] * count), blank)

    return concatenate(map(blank_replies, inputs.tables, counts))
