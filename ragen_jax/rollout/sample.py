"""A whole batch of episodes as one compiled program: levels, prompts, loop, record."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import engine, keys, turns, windows
from ragen_jax.rollout.answering import Worlds, answer_waiting
from ragen_jax.rollout.scenes import Scene, SceneTokens, longest_row
from ragen_jax.rollout.slots import IDLE, Inputs, Part, Plan, Prompts
from ragen_jax.text.dialogue import first_message, message_tokens
from ragen_jax.trajectory import UNFINISHED, Episodes, Rows


@dataclasses.dataclass(frozen=True)
class Setting:
    """What rollouts of one run have in common. Static."""

    config: ModelConfig
    dtype: Any  # of the rollout's weights, cache and computation
    scenes: tuple[Scene, ...]  # the worlds that share a batch, and their texts
    mesh: Mesh
    layout: str  # "replicated" or "tensor"
    # Whether thoughts are searched for the landmarks that they name; costs time.
    with_grounding: bool = False


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
    scenes: Sequence[Scene],
    tokens: SceneTokens,
    *,
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
      scenes: the worlds with their shares of the batch.
      tokens: of the scenes' texts, for their capacities.
      group_size: N.
      slots: of the whole batch, shared out as the episodes are; 0 means one for every
        episode.
      context: T; 0 means `longest_row`. In windows a shorter one drops turns, and
        what is longer is left out.
      decode_chunk: decode passes between looks at the predicate.
      buckets: how many cache lengths to compile for.
      shards: how many devices share the batch; divides each scene's episodes.
      greedy: take the likeliest token.
      stop_at_answer: end a reply at `</answer>`.
      window: most turns of a row; 0: a row holds a whole episode.
    """
    limits = [scene.dialogue.limits for scene in scenes]
    longest = longest_row(scenes, tokens, window)
    context = min(context, longest) if context and window else context or longest
    first_capacity = max(part.first_capacity for part in tokens)
    step = -(-context // buckets)
    lengths = {min(context, step * (i + 1)) for i in range(buckets)}
    lengths = {n for n in lengths if n >= first_capacity} | {context}
    parts = _parts(scenes, group_size, slots, shards)
    return Plan(
        parts=parts,
        episodes=sum(part.episodes for part in parts),
        groups=sum(part.groups for part in parts),
        slots=sum(part.slots for part in parts),
        feed_width=sum(part.feed_width for part in parts),
        group_size=group_size,
        context=context,
        turns=max(limit.turns for limit in limits),
        actions_per_turn=max(limit.actions_per_turn for limit in limits),
        reply_tokens=max(limit.reply_tokens for limit in limits),
        decode_chunk=decode_chunk,
        buckets=tuple(sorted(lengths)),
        greedy=greedy,
        stop_at_answer=stop_at_answer,
        window=window,
    )


def _parts(
    scenes: Sequence[Scene], group_size: int, slots: int, shards: int
) -> tuple[Part, ...]:
    """The static ranges of each scene on one shard."""
    whole = sum(scene.prompts for scene in scenes)
    parts: list[Part] = []
    for scene in scenes:
        episodes = scene.prompts * group_size // shards
        share = -(-slots * scene.prompts // (whole * shards)) if slots else episodes
        own = min(episodes, share)
        last = parts[-1] if parts else None
        parts.append(
            Part(
                first_episode=last.first_episode + last.episodes if last else 0,
                episodes=episodes,
                groups=max(1, episodes // group_size),
                first_slot=last.first_slot + last.slots if last else 0,
                slots=own,
                first_answer=last.first_answer + last.feed_width if last else 0,
                # A quarter: full passes while all decode, and not too long a wait
                # (measured).
                feed_width=max(1, -(-own // 4)),
                prompts=scene.prompts,
            )
        )
    return tuple(parts)


def make_rollout(setting: Setting, plan: Plan) -> Callable[..., Rollout]:
    """A compiled function from weights to a batch of episodes.

    It takes (parameters, tokens: SceneTokens, `Call`) and returns a `Rollout` whose
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
    def rollout(parameters, tokens: SceneTokens, call: Call) -> Rollout:
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
    tokens: SceneTokens,
    call: Call,
) -> Rollout:
    """One shard's rollout, inside `shard_map`; no collective unless tensor-parallel."""
    policy = _policy(setting)
    key = keys.iteration_key(call.seed, call.split, call.iteration)
    levels, prompts = _draw_levels(setting, plan, tokens, key, call)
    inputs = Inputs(
        weights=weights,
        prompts=prompts,
        prompt_cache=kv.prefill_prompts(weights, policy, prompts.tokens),
        tables=tuple(part.replies for part in tokens),
        is_stop=tokens[0].is_stop,
        key=key,
        temperature=call.temperature,
    )
    state = engine.start(plan, policy, inputs)
    first_group, games = 0, []
    for part, own in zip(plan.parts, levels, strict=True):
        group = prompts.group[part.first_episode :][: part.slots] - first_group
        games.append(jax.vmap(turns.new_game)(jax.tree.map(lambda x: x[group], own)))  # noqa: B023
        first_group += part.groups
    world = Worlds(
        setting.scenes, plan, policy, inputs, tokens, levels, setting.with_grounding
    )

    def one_round(carry):
        state, games = carry
        state = engine.decode_chunk(plan, policy, inputs, state)
        return jax.lax.cond(
            engine.is_due(plan, state),
            lambda carry: answer_waiting(world, *carry),
            lambda carry: carry,
            (state, games),
        )

    def is_busy(carry):
        return (carry[0].slots.status != IDLE).any()

    state, _ = jax.lax.while_loop(is_busy, one_round, (state, tuple(games)))
    rows, episodes = engine.finish(plan, inputs, state, call.policy_version)
    passes = Passes(state.decode_passes[None], state.feed_passes[None])
    return Rollout(rows, episodes, passes)


def _draw_levels(
    setting: Setting, plan: Plan, tokens: SceneTokens, key: jax.Array, call: Call
) -> tuple[tuple[Any, ...], Prompts]:
    """The levels of each part, and all parts' prompts.

    Numbers of episodes and groups count through the worlds, each world's over all
    shards: they, and so the noise, do not depend on the mesh.
    """
    shard = jax.lax.axis_index((meshes.DATA, meshes.FSDP)).astype(jnp.int32)
    size = plan.group_size
    capacity = max(part.first_capacity for part in tokens)
    levels, pieces, groups, before = [], [], 0, call.first_prompt
    for scene, part, texts in zip(setting.scenes, plan.parts, tokens, strict=True):
        first = before * size + shard * part.episodes
        names = first // size + jnp.arange(part.groups)
        level_keys = jax.vmap(keys.level_key, (None, 0))(key, names)
        own = jax.vmap(scene.world.reset, (0, None))(level_keys, call.split)
        joined, lengths = jax.vmap(functools.partial(_first_prompt, scene, texts))(own)
        number = first + jnp.arange(part.episodes)
        pieces.append(
            dict(
                tokens=jnp.pad(joined, ((0, 0), (0, capacity - joined.shape[1]))),
                lengths=lengths,
                group=groups + number // size - first // size,
                group_name=number // size,
                number=number,
            )
        )
        levels.append(own)
        groups += part.groups
        before += part.prompts
    if len(pieces) > 1:
        pieces[:1] = [jax.tree.map(lambda *x: jnp.concatenate(x), *pieces)]
    place = call.first_prompt * size + shard * plan.episodes
    cuts = None
    if plan.window:
        cuts = windows.make_cuts(tokens, [part.groups for part in plan.parts])
    return tuple(levels), Prompts(first_place=place, cuts=cuts, **pieces[0])


def _first_prompt(scene: Scene, tokens, level) -> tuple[jax.Array, jax.Array]:
    ids = first_message(scene.dialogue, scene.world.observe(level))
    return message_tokens(tokens, ids, is_first=True)


def is_finished(episodes: Episodes) -> jax.Array:
    """bool[], whether every episode came to an end. Always so after a rollout."""
    return (episodes.end != UNFINISHED).all()
