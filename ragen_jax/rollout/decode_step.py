"""One decode step: every decoding slot samples a token and writes it into its row."""

import jax
import jax.numpy as jnp

from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout import prng, token_sampling
from ragen_jax.rollout.arrays import concatenate, where_first
from ragen_jax.rollout.kv_cache import ShardedModel
from ragen_jax.rollout.types import (
    DECODING,
    WAITING,
    EngineInputs,
    EnvShard,
    RolloutPlan,
    RolloutState,
    RowBuffers,
    row_of,
)
from ragen_jax.text import reply_parser
from ragen_jax.trajectory import ANSWER_CLOSED, NO_REPLY, REPLY_BUDGET


def decode_step(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    bucket: int,
) -> RolloutState:
    """Samples one token in every decoding slot.

    Args:
      plan, model, inputs: what is static, and what never changes.
      state: whose decoding slots hold at most `bucket` tokens after the step.
      bucket: how many positions of the cache are read.

    Returns:
      The state. Slots whose reply ended wait for their environments.
    """
    slots = state.slots
    active = slots.status == DECODING
    drawn, cache = _sample_tokens(plan, model, inputs, state, active, bucket)
    dropped = plan.rows + jnp.arange(active.size)  # All different: see below.
    row = jnp.where(active, row_of(plan, slots), dropped)
    position = slots.length + 1
    rows = _write_reply_tokens(state.rows, row, position, slots.turn, drawn)
    reply, is_closed = _read_tokens(plan, inputs, slots.reply, drawn.token)
    sampled = slots.sampled + 1
    reply_end = _reply_end(plan, inputs.stops[drawn.token], is_closed, sampled)
    ends = active & (reply_end != NO_REPLY)
    if_active = lambda new, old: where_first(active, new, old)
    slots = slots.replace(
        status=jnp.where(ends, WAITING, slots.status),
        length=if_active(position, slots.length),
        pending=if_active(drawn.token, slots.pending),
        sampled=if_active(sampled, slots.sampled),
        reply=jax.tree.map(if_active, reply, slots.reply),
        reply_end=if_active(reply_end, slots.reply_end),
    )
    return state.replace(
        slots=slots, cache=cache, rows=rows, decode_passes=state.decode_passes + 1
    )


def _sample_tokens(
    plan: RolloutPlan,
    model: ShardedModel,
    inputs: EngineInputs,
    state: RolloutState,
    active: jax.Array,
    bucket: int,
) -> tuple[token_sampling.Sampled, kv.Cache]:
    """Runs the pending tokens, and draws the next ones; returns them and the cache.

    Args:
      plan, model, inputs, state, bucket: as for `decode_step`.
      active: bool[S], slots that decode; the other slots' tokens mean nothing.
    """
    slots = state.slots
    # Other slots write nothing (their length is out of range): they may be longer than
    # the bucket.
    lengths = jnp.where(active, slots.length, plan.context)
    logits, cache = kv.decode(
        inputs.weights, model, state.cache, slots.pending, lengths, bucket
    )
    number = inputs.prompts.episode_in_batch[
        jnp.minimum(slots.episode, plan.episodes - 1)
    ]
    token_keys = jax.vmap(prng.token_key, (None, 0, 0, 0))(
        inputs.key, number, slots.turn, slots.sampled
    )
    drawn = token_sampling.sample(
        token_keys, logits, inputs.temperature, greedy=plan.greedy
    )
    return drawn, cache


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
      row, position: int32[S], where each slot writes, two nowhere alike; dropped if
        out of range.
      turn: int32[S], being played.
      drawn: the tokens.
    """

    def put(buffer, new):
        # Else a deterministic program on a GPU would sort before it writes.
        where = buffer.at[row, position]
        return where.set(new, mode="drop", unique_indices=True)

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
