"""A whole batch of episodes as one compiled program: levels, prompts, loop, record."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax.envs.base import World
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import engine, keys, turns, windows
from ragen_jax.rollout.engine import Answer, Inputs, Plan, Prompts, RolloutState
from ragen_jax.text import replies
from ragen_jax.text.dialogue import (
    Dialogue,
    DialogueTokens,
    first_message,
    message_tokens,
)
from ragen_jax.trajectory import UNFINISHED, Episodes, Rows


@dataclasses.dataclass(frozen=True)
class Setting:
    """What rollouts of one run have in common. Static."""

    config: ModelConfig
    dtype: Any  # of the rollout's weights, cache and computation
    world: World
    dialogue: Dialogue
    mesh: Mesh
    layout: str  # "replicated" or "tensor"


@struct.dataclass
class Call:
    """What differs from one rollout of a compiled program to the next."""

    seed: jax.Array  # uint32[]
    split: jax.Array  # int32[], TRAIN, VALIDATION or TEST
    iteration: jax.Array  # int32[]; an evaluation's is 0, so that its levels are fixed
    first_prompt: jax.Array  # int32[], for batches too large for one call; else 0
    temperature: jax.Array  # float32[], above 0; not read when greedy
    policy_version: jax.Array  # int32[], real updates made so far


@struct.dataclass
class Passes:
    """How many passes each shard's loop took."""

    decode: jax.Array  # int32[shards], each over all slots of the shard
    feed: jax.Array  # int32[shards]


@struct.dataclass
class Rollout:
    """What a rollout leaves behind."""

    rows: Rows
    episodes: Episodes
    passes: Passes


def make_plan(
    tokens: DialogueTokens,
    dialogue: Dialogue,
    *,
    prompts: int,
    group_size: int,
    slots: int,
    context: int,
    decode_chunk: int,
    buckets: int,
    shards: int,
    greedy: bool = False,
    stop_at_answer: bool = False,
    window: int = 0,
) -> Plan:
    """Sizes of one shard's rollout.

    Args:
      tokens, dialogue: the texts, for their capacities and limits.
      prompts, group_size: P and N of the whole batch.
      slots: of the whole batch; 0 means one for every episode.
      context: T; 0 means `longest_row`. In windows a shorter one drops turns, and
        what is longer is left out.
      decode_chunk: decode passes between looks at the predicate.
      buckets: how many cache lengths to compile for.
      shards: how many devices share the batch; divides the episodes.
      greedy: take the likeliest token.
      stop_at_answer: end a reply at `</answer>`.
      window: most turns of a row; 0: a row holds a whole episode.
    """
    episodes = prompts * group_size // shards
    limits = dialogue.limits
    longest = longest_row(tokens, dialogue, window)
    context = min(context, longest) if context and window else context or longest
    slots = min(episodes, -(-slots // shards)) if slots else episodes
    step = -(-context // buckets)
    lengths = {min(context, step * (i + 1)) for i in range(buckets)}
    lengths = {n for n in lengths if n >= tokens.first_capacity} | {context}
    return Plan(
        episodes=episodes,
        group_size=group_size,
        groups=max(1, episodes // group_size),
        slots=slots,
        # A quarter: full passes while all decode, and not too long a wait (measured).
        feed_width=max(1, -(-slots // 4)),
        context=context,
        turns=limits.turns,
        actions_per_turn=limits.actions_per_turn,
        reply_tokens=limits.reply_tokens,
        decode_chunk=decode_chunk,
        buckets=tuple(sorted(lengths)),
        greedy=greedy,
        stop_at_answer=stop_at_answer,
        window=window,
    )


def longest_row(tokens: DialogueTokens, dialogue: Dialogue, window: int = 0) -> int:
    """T that the first prompt and all turns can need at most, in tokens.

    Args:
      tokens, dialogue: the texts.
      window: most turns of a row; 0: a row holds a whole episode.
    """
    return windows.longest_row(tokens, dialogue, window or dialogue.limits.turns)


def make_rollout(setting: Setting, plan: Plan) -> Callable[..., Rollout]:
    """A compiled function from weights to a batch of episodes.

    It takes (parameters, tokens: DialogueTokens, `Call`) and returns a `Rollout` whose
    rows and episodes are shared over the mesh's data and fsdp axes.
    """
    mesh = setting.mesh
    declared = model_parameters.declare(setting.config)
    specs = meshes.rollout_specs(declared, mesh, setting.layout)
    layers = tuple(
        jax.tree.map(
            lambda s: PartitionSpec(*s[1:]),
            specs["layers"],
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        for _ in range(setting.config.layers)
    )
    laid_out = {**specs, "layers": layers}
    everywhere = PartitionSpec()

    def shard(weights, tokens, call):
        return _shard_rollout(setting, plan, weights, tokens, call)

    on_shards = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(laid_out, everywhere, everywhere),
        out_specs=meshes.ROWS,
        check_vma=False,
    )

    @jax.jit
    def rollout(parameters, tokens: DialogueTokens, call: Call) -> Rollout:
        with jax.named_scope("lay_out_weights"):
            weights = kv.lay_out(parameters, setting.dtype)
            weights = jax.lax.with_sharding_constraint(
                weights, meshes.shardings(laid_out, mesh)
            )
        return on_shards(weights, tokens, call)

    return rollout


def _policy(setting: Setting) -> kv.Policy:
    if setting.layout != "tensor" or setting.mesh.shape[meshes.TENSOR] == 1:
        return kv.Policy(setting.config, setting.dtype)
    size = setting.mesh.shape[meshes.TENSOR]
    config = setting.config
    total = lambda x: jax.lax.psum(x, meshes.TENSOR)  # noqa: E731
    same = lambda x: x  # noqa: E731
    shared = meshes.shares_heads(config.heads, config.kv_heads, setting.mesh)
    return kv.Policy(
        config,
        setting.dtype,
        combine_heads=total if shared else same,
        combine_mlp=same if config.mlp_width % size else total,
    )


def _shard_rollout(
    setting: Setting,
    plan: Plan,
    weights: Parameters,
    tokens: DialogueTokens,
    call: Call,
) -> Rollout:
    """One shard's rollout, inside `shard_map`; no collective unless tensor-parallel."""
    world, policy = setting.world, _policy(setting)
    shard = jax.lax.axis_index((meshes.DATA, meshes.FSDP)).astype(jnp.int32)
    first_episode = call.first_prompt * plan.group_size + shard * plan.episodes
    first_group = first_episode // plan.group_size
    key = keys.iteration_key(call.seed, call.split, call.iteration)
    level_keys = jax.vmap(keys.level_key, (None, 0))(
        key, first_group + jnp.arange(plan.groups)
    )
    levels = jax.vmap(world.reset, (0, None))(level_keys, call.split)
    prompts = _first_prompts(setting, tokens, levels, first_group, first_episode)
    if plan.window:
        prompts = prompts.replace(cuts=windows.make_cuts(tokens, plan.groups))
    inputs = Inputs(
        weights=weights,
        prompts=prompts,
        prompt_cache=kv.prefill_prompts(weights, policy, prompts.tokens),
        tables=tokens.replies,
        is_stop=tokens.is_stop,
        key=key,
        temperature=call.temperature,
    )
    state = engine.start(plan, policy, inputs)
    group = (first_episode + jnp.arange(plan.slots)) // plan.group_size - first_group
    games = jax.vmap(turns.new_game)(jax.tree.map(lambda x: x[group], levels))

    def answer(carry):
        state, games = carry
        return answer_waiting(
            setting, plan, policy, inputs, tokens, levels, state, games
        )

    def one_round(carry):
        state, games = carry
        state = engine.decode_chunk(plan, policy, inputs, state)
        status = state.slots.status
        waiting = (status == engine.WAITING).sum()
        # A pass for few is as dear as one for many: wait for a full one, or for all.
        is_due = (waiting >= plan.feed_width) | ~(status == engine.DECODING).any()
        return jax.lax.cond(is_due, answer, lambda carry: carry, (state, games))

    def is_busy(carry):
        return (carry[0].slots.status != engine.IDLE).any()

    state, _ = jax.lax.while_loop(is_busy, one_round, (state, games))
    rows, episodes = engine.finish(plan, inputs, state, call.policy_version)
    passes = Passes(state.decode_passes[None], state.feed_passes[None])
    return Rollout(rows, episodes, passes)


def _first_prompts(setting, tokens, levels, first_group, first_episode) -> Prompts:
    def one(level):
        ids = first_message(setting.dialogue, setting.world.observe(level))
        return message_tokens(tokens, ids, is_first=True)

    joined, lengths = jax.vmap(one)(levels)
    return Prompts(joined, lengths, first_group, first_episode)


def answer_waiting(
    setting: Setting,
    plan: Plan,
    policy: kv.Policy,
    inputs: Inputs,
    tokens: DialogueTokens,
    levels: Any,
    state: RolloutState,
    games: turns.Game,
) -> tuple[RolloutState, turns.Game]:
    """Steps the world for the slots that wait and feeds them what it says.

    Args:
      levels: the world's States of the shard's groups.
      games: of the S slots.
    """
    slot, is_used = engine.choose_waiting(plan, state)
    slots = jax.tree.map(lambda x: x[slot], state.slots)
    chosen = jax.tree.map(lambda x: x[slot], games)

    def one(episode, turn, game, reply, reply_end):
        chance = keys.world_key(
            inputs.key, inputs.prompts.first_episode + episode, turn
        )
        actions = replies.final_actions(inputs.tables, reply)
        limits = setting.dialogue.limits
        after, played = turns.play_turn(chance, setting.world, limits, game, actions)
        ids = turns.answer_to_turn(
            setting.world,
            setting.dialogue,
            after,
            played,
            replies.is_valid(inputs.tables, reply),
            reply_end == engine.END_OF_TURN,
        )
        return after, played, *message_tokens(tokens, ids, is_first=False)

    after, played, message, length = jax.vmap(one)(
        slots.episode, slots.turn, chosen, slots.reply, slots.reply_end
    )
    told = Answer(
        slot=slot,
        is_used=is_used,
        tokens=message,
        length=length,
        reward=played.reward,
        taken=played.taken,
        success=after.success,
        end=after.end,
    )
    state, taken_up = engine.feed(plan, policy, inputs, state, told)
    group = (inputs.prompts.first_episode + jnp.maximum(taken_up, 0)) // plan.group_size
    fresh = jax.vmap(turns.new_game)(
        jax.tree.map(lambda x: x[group - inputs.prompts.first_group], levels)
    )
    after = jax.tree.map(
        lambda new, old: jnp.where(
            (taken_up >= 0).reshape((-1,) + (1,) * (new.ndim - 1)), new, old
        ),
        fresh,
        after,
    )
    where = jnp.where(is_used, slot, plan.slots)
    games = jax.tree.map(
        lambda whole, part: whole.at[where].set(part, mode="drop"), games, after
    )
    return state, games


def is_finished(episodes: Episodes) -> jax.Array:
    """bool[], whether every episode came to an end. Always so after a rollout."""
    return (episodes.end != UNFINISHED).all()
