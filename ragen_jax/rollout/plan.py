"""The sizes of a rollout: rows, slots, cache lengths, and what each environment has."""

from collections.abc import Sequence

from ragen_jax.parallel import backend_choices
from ragen_jax.rollout.tasks import Task, TaskTokens, longest_row
from ragen_jax.rollout.types import EnvShard, RolloutOptions, RolloutPlan


def make_plan(
    tasks: Sequence[Task],
    tokens: TaskTokens,
    options: RolloutOptions,
    *,
    group_size: int,
    slots: int,
    shards: int,
) -> RolloutPlan:
    """Sizes of one shard's rollout.

    Args:
      tasks: the environments, each with its prompts of the batch.
      tokens: of the tasks' texts, for their capacities.
      options: how to sample.
      group_size: N.
      slots: of the whole batch, divided among tasks and shards as the episodes are; 0:
        one for every episode.
      shards: how many devices share the batch; divides each task's episodes.
    """
    limits = [task.dialogue.limits for task in tasks]
    context = _row_length(options, longest_row(tasks, tokens, options.window))
    device = backend_choices.choices()
    longest_prompt = max(texts.first_capacity for texts in tokens)
    buckets = options.buckets or device.buckets
    env_shards = _divide(tasks, group_size, slots, shards, device.extend_share)
    return RolloutPlan(
        env_shards=env_shards,
        episodes=sum(env_shard.episodes for env_shard in env_shards),
        slots=sum(env_shard.slots for env_shard in env_shards),
        extend_width=sum(env_shard.extend_width for env_shard in env_shards),
        group_size=group_size,
        context=context,
        turns=max(limit.turns for limit in limits),
        actions_per_turn=max(limit.actions_per_turn for limit in limits),
        # All alike: `rollout.reply_tokens` holds for every environment.
        reply_tokens=max(limit.reply_tokens for limit in limits),
        decode_chunk=options.decode_chunk or device.decode_chunk,
        extend_share=device.extend_share if device.counts_busy else 0,
        buckets=_cache_lengths(context, buckets, longest_prompt),
        greedy=options.greedy,
        stop_at_answer=options.stop_at_answer,
        window=options.window,
    )


def _row_length(options: RolloutOptions, longest: int) -> int:
    """T, given the tokens that a row can need at most.

    Rows of windows may be shorter than that: they drop whole turns. Rows of full
    history may be longer.
    """
    if 0 < options.context < longest:
        return options.context
    needed = longest if options.window else max(options.context, longest)
    return backend_choices.row_length(needed)


def _cache_lengths(context: int, buckets: int, longest_prompt: int) -> tuple[int, ...]:
    """The cache's lengths to compile for: `buckets` even steps up to `context`.

    Those too short for every prompt are left out.
    """
    step = -(-context // buckets)
    lengths = {min(context, step * (i + 1)) for i in range(buckets)}
    return tuple(sorted({n for n in lengths if n >= longest_prompt} | {context}))


def _divide(
    tasks: Sequence[Task], group_size: int, slots: int, shards: int, extend_share: int
) -> tuple[EnvShard, ...]:
    """Each task's ranges on one shard.

    Args:
      tasks, group_size, slots, shards: as for `make_plan`.
      extend_share: W of a task is its slots over this, rounded up.
    """
    prompts = sum(task.prompts for task in tasks)
    env_shards: list[EnvShard] = []
    for task in tasks:
        episodes = task.prompts * group_size // shards
        env_slots = episodes
        if slots:
            env_slots = min(episodes, -(-slots * task.prompts // (prompts * shards)))
        last = env_shards[-1] if env_shards else None
        env_shards.append(
            EnvShard(
                first_episode=last.first_episode + last.episodes if last else 0,
                episodes=episodes,
                first_group=last.first_group + last.groups if last else 0,
                groups=max(1, episodes // group_size),
                first_slot=last.slot_range.stop if last else 0,
                slots=env_slots,
                first_feedback=last.feedback_range.stop if last else 0,
                extend_width=max(1, -(-env_slots // extend_share)),
                prompts=task.prompts,
            )
        )
    return tuple(env_shards)
