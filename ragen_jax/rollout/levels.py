"""The levels that a shard's episodes start from, and their prompts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import prng, windows
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.rollout.arrays import concatenate, take
from ragen_jax.rollout.tasks import Task, TaskTokens
from ragen_jax.rollout.types import Prompts, RolloutArgs, RolloutPlan
from ragen_jax.text.prompts import DialogueTokens, first_message, message_tokens


def draw_levels(
    tasks: tuple[Task, ...],
    plan: RolloutPlan,
    tokens: TaskTokens,
    key: jax.Array,
    args: RolloutArgs,
) -> tuple[tuple[Any, ...], Prompts, jax.Array]:
    """Draws this shard's levels, and makes their prompts.

    Groups and episodes are numbered through the whole batch, environment by environment
    and within one over all shards. Their noise is keyed by these numbers, and so does
    not depend on the mesh.

    Args:
      tasks: the environments of the batch.
      plan: of the rollout.
      tokens: of the tasks' texts.
      key: key[], from `prng.iteration_key`.
      args: the split and the first prompt.

    Returns:
      The levels (States) of each environment, the prompts of all, and
      int32[environments] prompts that were too long and so were cut.
    """
    shard_index = jax.lax.axis_index((meshes.DATA, meshes.FSDP)).astype(jnp.int32)
    size = plan.group_size
    capacity = max(texts.first_capacity for texts in tokens)
    levels, too_long = [], []
    pieces: list[dict[str, jax.Array]] = []  # fields of `Prompts`, by environment
    global_groups = args.first_prompt  # and those of earlier environments
    for task, env_shard, texts in zip(tasks, plan.env_shards, tokens, strict=True):
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
                group=env_shard.first_group + number // size - first // size,
                group_in_batch=number // size,
                episode_in_batch=number,
            )
        )
        too_long.append((lengths > texts.first_capacity).sum(dtype=jnp.int32))
        levels.append(states)
        global_groups += env_shard.prompts
    first_index = args.first_prompt * size + shard_index * plan.episodes
    cuts = None
    if plan.window:
        cuts = windows.make_cuts(
            tokens, [env_shard.groups for env_shard in plan.env_shards]
        )
    prompts = Prompts(first_index=first_index, cuts=cuts, **concatenate(pieces))
    return tuple(levels), prompts, jnp.stack(too_long)


def _first_prompt(
    task: Task, tokens: DialogueTokens, level: Any
) -> tuple[jax.Array, jax.Array]:
    """A level's prompt: int32[Tp], right-padded, and int32[] how long it is."""
    ids = first_message(task.dialogue, task.env.observe(level))
    return message_tokens(tokens, ids, is_first=True)


def start_env_episodes(
    plan: RolloutPlan, prompts: Prompts, levels: tuple[Any, ...]
) -> tuple[turn_lib.EnvEpisode, ...]:
    """For each environment, the episodes that its slots begin with: the first ones.

    Args:
      plan: of the rollout.
      prompts, levels: from `draw_levels`.
    """
    env_episodes = []
    for env_shard, env_levels in zip(plan.env_shards, levels, strict=True):
        groups = prompts.group[env_shard.first_episode :]
        group = groups[: env_shard.slots] - env_shard.first_group
        starts = take(env_levels, group)
        env_episodes.append(jax.vmap(turn_lib.start_env_episode)(starts))
    return tuple(env_episodes)
