"""The sampling engine: slots that decode replies, then wait for their environments.

Pure functions over `RolloutState`: `decode_chunk` samples a few tokens in every
decoding slot, `give_feedback` gives waiting slots their feedback. `rollout.py` composes
both in one compiled loop; a host may call `advance` (decodes until slots wait) and
`give_feedback` in turn and gets the identical record. Their parts have files of their
own: one step of decoding (decode_step.py), how feedback enters a slot's context
(context_update.py), and which episode a free slot takes (admission.py).

Slots are independent; a finished one takes the next episode from its environment's
queue. All of this runs on one shard: arrays are that shard's own. A slot's cache holds
`length` tokens; one more, `pending`, is known but not yet run through the model: the
last token that was sampled, or the last of a message.
"""

import jax
import jax.numpy as jnp

from ragen_jax.rollout import admission, context_update, record, windows
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.admission import Admission
from ragen_jax.rollout.arrays import concatenate, last_token, run_if, take
from ragen_jax.rollout.context_update import ContextUpdate
from ragen_jax.rollout.decode_step import decode_step
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
    row_of,
)
from ragen_jax.trajectory import PADDING, UNFINISHED, first_to_hold
from ragen_jax.utils.scatter import put_where


def start(plan: RolloutPlan, model: ShardedModel, inputs: EngineInputs) -> RolloutState:
    """The state in which S episodes, the first of each environment, are decoding."""
    group = inputs.prompts.group
    prompts, lengths = inputs.prompts.tokens[group], inputs.prompts.lengths[group]
    first, queue_heads = admission.first_episodes(plan)
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
            reply=admission.blank_replies(
                plan, inputs, [shard.slots for shard in plan.env_shards]
            ),
            reply_end=zeros,
        ),
        cache=kv.with_context(cache, model, plan.context),
        rows=_prompt_rows(plan, prompts, lengths),
        episodes=record.blank_episodes(plan, inputs.prompts),
        next_episode=jnp.array(queue_heads, jnp.int32),
        decode_passes=zero,
        extend_passes=zero,
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

    def steps_within(bucket: int):
        def one_step(state: RolloutState, _):
            return decode_step(plan, model, inputs, state, bucket), None

        return lambda state: jax.lax.scan(one_step, state, length=plan.decode_chunk)[0]

    slots = state.slots
    longest = jnp.where(slots.status == DECODING, slots.length, 0).max()
    buckets = model.buckets(plan.buckets)
    shortest = first_to_hold(buckets, longest + plan.decode_chunk)
    if len(buckets) == 1:
        return steps_within(buckets[0])(state)

    for index, bucket in enumerate(buckets):
        state = run_if(shortest == index, steps_within(bucket), state)
    return state


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


def give_feedback(
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
    slots = take(state.slots, feedback.slot)
    continues = feedback.is_used & (feedback.end == UNFINISHED)
    episodes = record.record_turn(plan, state.episodes, slots, feedback)
    state = state.replace(episodes=episodes)
    update_context = (
        context_update.slide_window if plan.window else context_update.append_message
    )
    context = update_context(plan, model, inputs, state, slots, feedback, continues)
    is_free = feedback.is_used & ~continues
    admitted = admission.admit(plan, inputs, state.next_episode, is_free)
    # Cache entries of slots that become idle keep what they hold: nothing reads them.
    entries = kv.with_prompts(
        context.entries, model, inputs.prompt_cache, admitted.group, admitted.is_new
    )
    next_slots = _begin_replies(plan, inputs, slots, continues, context, admitted)
    state = _put_back(plan, state, feedback, next_slots, entries).replace(
        rows=context.rows,
        next_episode=admitted.next_episode,
        extend_passes=state.extend_passes + context.passes,
    )
    return state, jnp.where(admitted.is_new, admitted.episode, -1)


def _begin_replies(
    plan: RolloutPlan,
    inputs: EngineInputs,
    slots: Slots,
    continues: jax.Array,
    context: ContextUpdate,
    admitted: Admission,
) -> Slots:
    """W slots that decode their next replies; those without an episode are idle.

    Args:
      plan, inputs: as for `give_feedback`.
      slots: W slots after their turns.
      continues: bool[W], whether the slot's episode has a further turn.
      context: of those that continue.
      admitted: the episodes of those that do not.
    """
    is_new, lengths = admitted.is_new, admitted.prompt_length
    return Slots(
        status=jnp.where(continues | is_new, DECODING, IDLE),
        episode=jnp.where(
            continues,
            slots.episode,
            jnp.where(is_new, admitted.episode, plan.episodes),
        ),
        turn=jnp.where(continues, slots.turn + 1, 0),
        length=jnp.where(continues, context.length, lengths - 1),
        pending=jnp.where(
            continues, context.pending, last_token(admitted.prompt, lengths)
        ),
        sampled=jnp.zeros_like(slots.sampled),
        reply=admission.blank_replies(
            plan, inputs, [shard.extend_width for shard in plan.env_shards]
        ),
        reply_end=jnp.zeros_like(slots.reply_end),
    )


def _put_back(
    plan: RolloutPlan,
    state: RolloutState,
    feedback: EnvFeedback,
    slots: Slots,
    entries: kv.Cache,
) -> RolloutState:
    """The state with the W slots that got feedback, and their cache entries."""
    # Fewer than W slots may have waited.
    put = lambda old, new: put_where(old, feedback.slot, new, feedback.is_used)
    return state.replace(
        slots=jax.tree.map(put, state.slots, slots),
        cache=jax.tree.map(put, state.cache, entries),
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
    slots = take(state.slots, slot)
    row = jnp.minimum(row_of(plan, slots), plan.rows - 1)
    first = slots.length + 1 - slots.sampled
    at = first[:, None] + jnp.arange(plan.reply_tokens)[None]
    tokens = state.rows.tokens[row[:, None], jnp.clip(at, 0, plan.context - 1)]
    return tokens, slots.sampled
