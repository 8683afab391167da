"""A whole batch of episodes as one compiled program: levels, prompts, loop, record.

`make_plan` fixes the sizes, `make_rollout` compiles; `starpo.iterate` and the evaluator
call the result. The loop alternates `engine.decode_chunk` and `env_step`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from ragen_jax.envs.base import TRAIN
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import cache_attention, engine, prng, record, windows
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.rollout.env_step import EnvInputs, step_environments
from ragen_jax.rollout.tasks import Task, TaskTokens, longest_row
from ragen_jax.rollout.types import (
    IDLE,
    EngineInputs,
    EnvShard,
    Prompts,
    RolloutPlan,
    concatenate,
)
from ragen_jax.settings import Settings
from ragen_jax.text.prompts import first_message, message_tokens
from ragen_jax.trajectory import Episodes, Rows


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """What rollouts of one run have in common. Static."""

    config: ModelConfig
    dtype: Any  # of the rollout's weights, cache and computation
    tasks: tuple[Task, ...]  # the environments that share a batch, and their texts
    mesh: Mesh
    layout: str  # "replicated" or "tensor"
    # Whether thoughts are searched for the landmarks that they name; costs time.
    with_grounding: bool = False
    decode_attention: str = "auto"  # or "xla", "cudnn": the kernel
    row_attention: str = "auto"  # the same of whole prompts
    decode_weights: str = "same"  # or "int8", "float8": the sampler's weights
    cuda_graph: bool = False  # the whole rollout as one graph, on NVIDIA GPUs


Scalar = Any  # a NumPy scalar outside a compiled program, a traced array inside


@struct.dataclass
class RolloutArgs:
    """What differs from one rollout of a compiled program to the next."""

    seed: Scalar  # uint32[]
    split: Scalar  # int32[], TRAIN, VALIDATION or TEST
    iteration: Scalar  # int32[]; an evaluation's is 0, so that its levels are fixed
    first_prompt: Scalar  # int32[], for batches too large for one call; else 0
    temperature: Scalar  # float32[], above 0; not read when greedy
    policy_version: Scalar  # int32[], real updates made so far


def training_args(
    settings: Settings, iteration: Scalar, policy_version: Scalar = 0
) -> RolloutArgs:
    """The arguments of an iteration's training rollout.

    Args:
      settings: of the run: seed and temperature.
      iteration: int32[], whose levels and noise are drawn.
      policy_version: int32[], real updates made so far.
    """
    return RolloutArgs(
        seed=np.uint32(settings.seed),
        split=np.int32(TRAIN),
        iteration=iteration,
        first_prompt=np.int32(0),
        temperature=np.float32(settings.rollout.temperature),
        policy_version=policy_version,
    )


@struct.dataclass
class PassCounts:
    """How many forward passes each shard's loop took."""

    decode_steps: jax.Array  # int32[shards], of one token for all slots of a shard
    extend_steps: jax.Array  # int32[shards], of messages for the slots that waited

    def total(self) -> jax.Array:
        """int32[], of all shards."""
        return (self.decode_steps + self.extend_steps).sum()


@struct.dataclass
class Rollout:
    """The result of a rollout: the record, and what the loop counted."""

    rows: Rows
    episodes: Episodes
    passes: PassCounts
    # int32[shards, environments], messages that were too long and so were cut. Above 0
    # the rows do not hold what the environments showed: `tasks.check_room` refuses
    # them.
    too_long: jax.Array


def make_plan(
    tasks: Sequence[Task],
    tokens: TaskTokens,
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
) -> RolloutPlan:
    """Sizes of one shard's rollout.

    Args:
      tasks: the environments with their shares of the batch.
      tokens: of the tasks' texts, for their capacities.
      group_size: N.
      slots: of the whole batch, divided among tasks and shards as the episodes are; 0:
        one for every episode.
      context: T; 0: `longest_row`, rounded up to the backend's multiple. With windows a
        shorter one drops the oldest turns, and a longer one is cut to `longest_row`.
      decode_chunk: decode steps between two evaluations of the loop's condition; 0:
        what suits the backend.
      buckets: how many cache lengths to compile for; 0: what suits the backend.
      shards: how many devices share the batch; divides each task's episodes.
      greedy: take the likeliest token.
      stop_at_answer: end a reply at `</answer>`.
      window: most turns of a row; 0: a row holds a whole episode.
    """
    limits = [task.dialogue.limits for task in tasks]
    longest = longest_row(tasks, tokens, window)
    if not 0 < context < longest:  # Shorter only in windows, where it is exact.
        needed = longest if window else max(context, longest)
        context = backend_choices.row_length(needed)
    chosen = backend_choices.choices()
    buckets = buckets or chosen.buckets
    first_capacity = max(own.first_capacity for own in tokens)
    step = -(-context // buckets)
    lengths = {min(context, step * (i + 1)) for i in range(buckets)}
    lengths = {n for n in lengths if n >= first_capacity} | {context}
    env_shards = _share_out(tasks, group_size, slots, shards, chosen.extend_share)
    return RolloutPlan(
        env_shards=env_shards,
        episodes=sum(own.episodes for own in env_shards),
        slots=sum(own.slots for own in env_shards),
        extend_width=sum(own.extend_width for own in env_shards),
        group_size=group_size,
        context=context,
        turns=max(limit.turns for limit in limits),
        actions_per_turn=max(limit.actions_per_turn for limit in limits),
        reply_tokens=max(limit.reply_tokens for limit in limits),
        decode_chunk=decode_chunk or chosen.decode_chunk,
        extend_share=chosen.extend_share if chosen.counts_busy else 0,
        buckets=tuple(sorted(lengths)),
        greedy=greedy,
        stop_at_answer=stop_at_answer,
        window=window,
    )


def _share_out(
    tasks: Sequence[Task], group_size: int, slots: int, shards: int, extend_share: int
) -> tuple[EnvShard, ...]:
    """Each task's ranges on one shard; W is its slots / `extend_share`, rounded up."""
    whole = sum(task.prompts for task in tasks)
    env_shards: list[EnvShard] = []
    for task in tasks:
        episodes = task.prompts * group_size // shards
        share = -(-slots * task.prompts // (whole * shards)) if slots else episodes
        own = min(episodes, share)
        last = env_shards[-1] if env_shards else None
        env_shards.append(
            EnvShard(
                first_episode=last.first_episode + last.episodes if last else 0,
                episodes=episodes,
                groups=max(1, episodes // group_size),
                first_slot=last.slot_range.stop if last else 0,
                slots=own,
                first_feedback=last.feedback_range.stop if last else 0,
                extend_width=max(1, -(-own // extend_share)),
                prompts=task.prompts,
            )
        )
    return tuple(env_shards)


def make_rollout(
    rollout_context: RolloutContext, plan: RolloutPlan
) -> Callable[..., Rollout]:
    """The compiled rollout: (parameters, `TaskTokens`, `RolloutArgs`) -> `Rollout`.

    Its rows and episodes are sharded over the mesh's data and fsdp axes.
    """
    mesh = rollout_context.mesh
    declared = model_parameters.declare(rollout_context.config)
    specs = meshes.rollout_specs(declared, mesh, rollout_context.layout)
    # Stacked layers become a tuple of layers: their specs lose the leading axis L.
    layers = tuple(
        jax.tree.map(
            lambda s: PartitionSpec(*s[1:]),
            specs["layers"],
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        for _ in range(rollout_context.config.layers)
    )
    decode_specs = {**specs, "layers": layers}
    everywhere = PartitionSpec()
    model = _sharded_model(rollout_context)

    def one_shard(weights, tokens, args):
        if rollout_context.decode_weights != "same":
            weights = kv.in_eight_bits(weights, rollout_context.decode_weights)
        return _shard_rollout(rollout_context, plan, model, weights, tokens, args)

    on_shards = jax.shard_map(
        one_shard,
        mesh=mesh,
        in_specs=(decode_specs, everywhere, everywhere),
        out_specs=meshes.ROWS,
        check_vma=False,
    )
    options = backend_choices.rollout_options(rollout_context.cuda_graph)

    @functools.partial(jax.jit, compiler_options=options)
    def rollout(parameters, tokens: TaskTokens, args: RolloutArgs) -> Rollout:
        with jax.named_scope("to_decode_layout"):
            weights = kv.to_decode_layout(parameters, rollout_context.dtype)
            weights = jax.lax.with_sharding_constraint(
                weights, meshes.shardings(decode_specs, mesh)
            )
        return on_shards(weights, tokens, args)

    return rollout


def _sharded_model(rollout_context: RolloutContext) -> kv.ShardedModel:
    """The model as one shard runs it, with the collectives of tensor parallelism."""
    config, mesh = rollout_context.config, rollout_context.mesh
    attention = backend_choices.decode_attention(
        rollout_context.decode_attention, rollout_context.dtype, config.head_dim
    )
    model = kv.ShardedModel(
        config,
        rollout_context.dtype,
        attention=cache_attention.BY_NAME[attention],
        row_attention=rollout_context.row_attention,
    )
    size = mesh.shape[meshes.TENSOR]
    if rollout_context.layout != "tensor" or size == 1:
        return model
    all_reduce = lambda x: jax.lax.psum(x, meshes.TENSOR)
    identity = lambda x: x
    shares_heads = meshes.shares_heads(config.heads, config.kv_heads, mesh)
    shares_mlp = config.mlp_width % size == 0
    return dataclasses.replace(
        model,
        combine_heads=all_reduce if shares_heads else identity,
        combine_mlp=all_reduce if shares_mlp else identity,
    )


def _shard_rollout(
    rollout_context: RolloutContext,
    plan: RolloutPlan,
    model: kv.ShardedModel,
    weights: Parameters,
    tokens: TaskTokens,
    args: RolloutArgs,
) -> Rollout:
    """One shard's rollout, inside `shard_map`; no collective unless tensor-parallel."""
    key = prng.iteration_key(args.seed, args.split, args.iteration)
    levels, prompts, too_long = _draw_levels(rollout_context, plan, tokens, key, args)
    inputs = EngineInputs(
        weights=weights,
        prompts=prompts,
        prompt_cache=kv.prefill_prompts(weights, model, prompts.tokens),
        tables=tuple(own.replies for own in tokens),
        stops=tokens[0].stops,
        key=key,
        temperature=args.temperature,
    )
    state = engine.start(plan, model, inputs).replace(too_long=too_long)
    # Each environment's slots begin with the first of its episodes.
    first_group, env_episodes = 0, []
    for env_shard, own_levels in zip(plan.env_shards, levels, strict=True):
        own_episodes = prompts.group[env_shard.first_episode :]
        group = own_episodes[: env_shard.slots] - first_group
        starts = jax.tree.map(lambda x, group=group: x[group], own_levels)
        env_episodes.append(jax.vmap(turn_lib.start_env_episode)(starts))
        first_group += env_shard.groups
    env_inputs = EnvInputs(
        rollout_context.tasks,
        plan,
        model,
        inputs,
        tokens,
        levels,
        rollout_context.with_grounding,
    )

    def one_round(carry):
        state, env_episodes = carry
        state = engine.decode_chunk(plan, model, inputs, state)
        # Instead of `lax.cond`, which would copy the whole cache on a GPU: a loop of
        # one round or none.
        carry, _ = jax.lax.while_loop(
            lambda carry: carry[1],
            lambda carry: (step_environments(env_inputs, *carry[0]), False),
            ((state, env_episodes), engine.env_step_due(plan, state)),
        )
        return carry

    def any_active(carry):
        return (carry[0].slots.status != IDLE).any()

    state, _ = jax.lax.while_loop(any_active, one_round, (state, tuple(env_episodes)))
    rows = record.finish_rows(plan, prompts, state.rows, args.policy_version)
    passes = PassCounts(state.decode_steps[None], state.extend_steps[None])
    return Rollout(rows, state.episodes, passes, state.too_long[None])


def _draw_levels(
    rollout_context: RolloutContext,
    plan: RolloutPlan,
    tokens: TaskTokens,
    key: jax.Array,
    args: RolloutArgs,
) -> tuple[tuple[Any, ...], Prompts, jax.Array]:
    """Draws this shard's levels, and makes their prompts.

    Groups and episodes are numbered through the whole batch, environment by environment
    and within one over all shards. Their noise is keyed by these numbers, and so does
    not depend on the mesh.

    Returns:
      The levels (States) of each environment, the prompts of all, and
      int32[environments] prompts that were too long and so were cut.
    """
    shard_index = jax.lax.axis_index((meshes.DATA, meshes.FSDP)).astype(jnp.int32)
    size = plan.group_size
    capacity = max(own.first_capacity for own in tokens)
    levels, pieces, too_long = [], [], []
    # Groups of earlier environments: on this shard, and in the whole batch.
    local_groups, global_groups = 0, args.first_prompt
    for task, env_shard, texts in zip(
        rollout_context.tasks, plan.env_shards, tokens, strict=True
    ):
        first = global_groups * size + shard_index * env_shard.episodes
        group_numbers = first // size + jnp.arange(env_shard.groups)
        level_keys = jax.vmap(prng.level_key, (None, 0))(key, group_numbers)
        states = jax.vmap(task.env.reset, (0, None))(level_keys, args.split)
        ids, lengths = jax.vmap(functools.partial(_first_prompt, task, texts))(states)
        number = first + jnp.arange(env_shard.episodes)
        pieces.append(
            dict(
                tokens=jnp.pad(ids, ((0, 0), (0, capacity - ids.shape[1]))),
                lengths=lengths,
                group=local_groups + number // size - first // size,
                group_name=number // size,
                number=number,
            )
        )
        too_long.append((lengths > texts.first_capacity).sum(dtype=jnp.int32))
        levels.append(states)
        local_groups += env_shard.groups
        global_groups += env_shard.prompts
    first_index = args.first_prompt * size + shard_index * plan.episodes
    cuts = None
    if plan.window:
        cuts = windows.make_cuts(tokens, [own.groups for own in plan.env_shards])
    prompts = Prompts(first_index=first_index, cuts=cuts, **concatenate(pieces))
    return tuple(levels), prompts, jnp.stack(too_long)


def _first_prompt(task: Task, tokens, level) -> tuple[jax.Array, jax.Array]:
    ids = first_message(task.dialogue, task.env.observe(level))
    return message_tokens(tokens, ids, is_first=True)
