"""A whole batch of episodes as one compiled program: levels, prompts, loop, record.

`plan.make_plan` fixes the sizes, `make_rollout` compiles; `starpo.iterate` and the
evaluator call the result. The loop alternates `engine.decode_chunk` and `env_step`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from ragen_jax.envs.base import TRAIN
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import cache_attention, engine, prng, record
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.arrays import run_if
from ragen_jax.rollout.env_step import EnvInputs, step_environments
from ragen_jax.rollout.levels import draw_levels, start_env_episodes
from ragen_jax.rollout.tasks import Task, TaskTokens
from ragen_jax.rollout.types import (
    IDLE,
    EngineInputs,
    RolloutArgs,
    RolloutPlan,
    Scalar,
)
from ragen_jax.settings import Settings
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


def training_rollout_args(
    settings: Settings, iteration: Scalar, policy_version: Scalar
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

    decode_passes: jax.Array  # int32[shards], of one token for all slots of a shard
    extend_passes: jax.Array  # int32[shards], of messages for the slots that waited

    def total(self) -> jax.Array:
        """int32[], of all shards."""
        return (self.decode_passes + self.extend_passes).sum()


@struct.dataclass
class Rollout:
    """The result of a rollout: the record, and what the loop counted."""

    rows: Rows
    episodes: Episodes
    passes: PassCounts
    # int32[shards, environments], messages that were too long and so were cut. Above 0
    # the rows do not hold what the environments showed:
    # `tasks.refuse_cut_messages` refuses them.
    too_long: jax.Array


def make_rollout(
    rollout_context: RolloutContext, plan: RolloutPlan
) -> Callable[..., Rollout]:
    """The compiled rollout: (parameters, `TaskTokens`, `RolloutArgs`) -> `Rollout`.

    Its rows and episodes are sharded over the mesh's data and fsdp axes.
    """
    mesh, specs = rollout_context.mesh, _decode_specs(rollout_context)
    replicated = PartitionSpec()
    model = _sharded_model(rollout_context)

    def one_shard(weights, tokens, args):
        if rollout_context.decode_weights != "same":
            weights = kv.in_eight_bits(weights, rollout_context.decode_weights)
        return _shard_rollout(rollout_context, plan, model, weights, tokens, args)

    on_shards = jax.shard_map(
        one_shard,
        mesh=mesh,
        in_specs=(specs, replicated, replicated),
        out_specs=meshes.ROWS,
        check_vma=False,
    )
    options = backend_choices.rollout_compiler_options(rollout_context.cuda_graph)

    @functools.partial(jax.jit, compiler_options=options)
    def rollout(parameters, tokens: TaskTokens, args: RolloutArgs) -> Rollout:
        with jax.named_scope("to_decode_layout"):
            weights = kv.to_decode_layout(parameters, rollout_context.dtype)
            weights = jax.lax.with_sharding_constraint(
                weights, meshes.shardings(specs, mesh)
            )
        return on_shards(weights, tokens, args)

    return rollout


def _decode_specs(rollout_context: RolloutContext):
    """PartitionSpecs of weights in the layout of `kv_cache.to_decode_layout`."""
    declared = model_parameters.declare(rollout_context.config)
    mesh, layout = rollout_context.mesh, rollout_context.layout
    specs = meshes.rollout_specs(declared, mesh, layout)
    # Stacked layers become a tuple of layers: their specs lose the leading axis L.
    layers = tuple(
        jax.tree.map(
            lambda s: PartitionSpec(*s[1:]),
            specs["layers"],
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        for _ in range(rollout_context.config.layers)
    )
    return {**specs, "layers": layers}


def _sharded_model(rollout_context: RolloutContext) -> kv.ShardedModel:
    """The model as one shard runs it, with the collectives of tensor parallelism."""
    config, mesh = rollout_context.config, rollout_context.mesh
    attention = backend_choices.decode_attention(
        rollout_context.decode_attention, rollout_context.dtype, config.head_dim
    )
    model = kv.ShardedModel(
        config,
        rollout_context.dtype,
        attention=cache_attention.by_name(attention, config),
        row_attention=rollout_context.row_attention,
    )
    size = mesh.shape[meshes.TENSOR]
    if rollout_context.layout != "tensor" or size == 1:
        return model
    all_reduce = lambda x: jax.lax.psum(x, meshes.TENSOR)
    identity = lambda x: x
    heads_are_sharded = meshes.shards_heads(config.heads, config.kv_heads, mesh)
    mlp_is_sharded = config.mlp_width % size == 0
    return dataclasses.replace(
        model,
        combine_heads=all_reduce if heads_are_sharded else identity,
        combine_mlp=all_reduce if mlp_is_sharded else identity,
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
    tasks = rollout_context.tasks
    levels, prompts, too_long = draw_levels(tasks, plan, tokens, key, args)
    inputs = EngineInputs(
        weights=weights,
        prompts=prompts,
        prompt_cache=kv.prefill_prompts(weights, model, prompts.tokens),
        tables=tuple(texts.replies for texts in tokens),
        # Of any environment: they share one model and so one chat template.
        stops=tokens[0].stops,
        key=key,
        temperature=args.temperature,
    )
    state = engine.start(plan, model, inputs).replace(too_long=too_long)
    env_episodes = start_env_episodes(plan, prompts, levels)
    with_grounding = rollout_context.with_grounding
    env_inputs = EnvInputs(tasks, plan, model, inputs, tokens, levels, with_grounding)

    def one_round(carry):
        state, env_episodes = carry
        state = engine.decode_chunk(plan, model, inputs, state)
        return run_if(
            engine.env_step_due(plan, state),
            lambda carry: step_environments(env_inputs, *carry),
            (state, env_episodes),
        )

    def any_active(carry):
        return (carry[0].slots.status != IDLE).any()

    state, _ = jax.lax.while_loop(any_active, one_round, (state, env_episodes))
    rows = record.finish_rows(plan, prompts, state.rows, args.policy_version)
    passes = PassCounts(state.decode_passes[None], state.extend_passes[None])
    return Rollout(rows, state.episodes, passes, state.too_long[None])
