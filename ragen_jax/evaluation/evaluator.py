"""Evaluates a policy on held-out levels: success, pass@k, returns and standard errors.

Used for validation and the final test in training, and by launch/evaluate.py.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import plan as plan_lib
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout.rollout import Rollout, RolloutContext
from ragen_jax.rollout.tasks import Task, TaskTokens, refuse_cut_messages
from ragen_jax.rollout.types import RolloutArgs, RolloutOptions
from ragen_jax.text.prompts import DialogueTokens
from ragen_jax.trajectory import Episodes, Rows, is_played


@dataclasses.dataclass(frozen=True)
class Score:
    """Results of n episodes from each of P levels.

    Standard errors treat levels as the independent samples; for one level they are NaN.
    """

    success: float  # mean over all episodes
    success_standard_error: float
    pass_at_k: tuple[float, ...]  # at k = 1..n, unbiased
    pass_at_k_standard_error: tuple[float, ...]  # at k = 1..n
    turns: float  # per episode
    actions: float  # per episode
    reply_tokens: float  # per turn
    valid_reply_rate: float  # of turns
    mean_return: float  # the environment's reward, per episode
    mean_return_standard_error: float
    by_level: np.ndarray  # bool[P, n], each episode's success

    def metrics(self) -> dict[str, float]:
        """By metric name, without a prefix; pass@k only if n is above 1."""
        values = {
            "success": self.success,
            "success_standard_error": self.success_standard_error,
            "turns": self.turns,
            "actions": self.actions,
            "reply_tokens": self.reply_tokens,
            "valid_reply_rate": self.valid_reply_rate,
            "return": self.mean_return,
            "return_standard_error": self.mean_return_standard_error,
        }
        rollouts = len(self.pass_at_k)
        for k in reported_k(rollouts) if rollouts > 1 else ():
            values[f"pass_at_{k}"] = self.pass_at_k[k - 1]
            error = self.pass_at_k_standard_error[k - 1]
            values[f"pass_at_{k}_standard_error"] = error
        return values


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A compiled rollout for evaluation, and the batches to run it in."""

    label: str  # of the environment
    rollout: Callable[..., Rollout]
    tokens: TaskTokens
    prompts: int  # levels in one call
    rollouts: int  # n, episodes of each


def make_evaluator(
    rollout_context: RolloutContext,
    task: Task,
    tokens: DialogueTokens,
    options: RolloutOptions,
    *,
    prompts: int,
    rollouts: int,
    slots: int,
    shards: int,
) -> Evaluator:
    """Makes an evaluator, whose rollout is compiled at its first call.

    Args:
      rollout_context: as for training rollouts; its tasks are not read.
      task, tokens: the environment to play, and its texts' tokens.
      options: how to sample; greedy for temperature 0.
      prompts: levels of the smallest evaluation that will be asked for.
      rollouts: n, episodes of each level.
      slots: the most episodes decoded at a time, but at least one on each device; 0:
        no limit.
      shards: devices among which rows are divided.
    """
    each = _levels_at_a_time(prompts, rollouts, slots, shards)
    task = dataclasses.replace(task, prompts=each)
    rollout_context = dataclasses.replace(rollout_context, tasks=(task,))
    plan = plan_lib.make_plan(
        (task,),
        (tokens,),
        options,
        group_size=rollouts,
        slots=min(slots, each * rollouts),
        shards=shards,
    )
    rollout = rollout_lib.make_rollout(rollout_context, plan)
    return Evaluator(task.label, rollout, (tokens,), each, rollouts)


def _levels_at_a_time(prompts: int, rollouts: int, slots: int, shards: int) -> int:
    """Levels of one call: all, or as many as `slots` (0: no limit) have room for.

    Every shard must get the same number of episodes: whole levels, or an equal part of
    one level's. This may take more levels than were asked for, or more than there is
    room for; then episodes wait for a slot.
    """

    def is_even(levels: int) -> bool:
        """Whether the episodes of so many levels divide equally among the shards."""
        return levels % shards == 0 or (
            shards % levels == 0 and levels * rollouts % shards == 0
        )

    # The search ends: multiples of `shards` divide equally.
    whole = next(filter(is_even, itertools.count(prompts)))
    room = slots // rollouts if slots else whole
    if whole <= room:
        return whole
    fewer = next(filter(is_even, range(room, 0, -1)), None)
    return fewer or next(filter(is_even, itertools.count(1)))


def evaluate(
    evaluator: Evaluator,
    parameters: Parameters,
    *,
    prompts: int,
    split: int,
    seed: int,
    temperature: float,
    on_batch: Callable[[int, Rows, Episodes], None] | None = None,
) -> Score:
    """Plays `prompts` fixed levels of a split.

    Args:
      evaluator: from `make_evaluator`.
      parameters: the policy's.
      prompts: P; the same seed and split always give the same levels.
      split: base.VALIDATION or base.TEST (or TRAIN).
      seed: decides the levels, the environment's randomness and the sampling.
      temperature: not read by a greedy evaluator.
      on_batch: called for each batch in order, on every process, with the index of its
        first level, its rows and its episodes. These are host arrays; rows are those of
        the whole batch, episodes only those of the levels that were asked for.

    Raises:
      UserError: if the environment showed longer observations than its
        `longest_observation` allows.
    """
    parts = []
    for first in range(0, prompts, evaluator.prompts):
        rollout_args = RolloutArgs(
            seed=np.uint32(seed),
            split=np.int32(split),
            iteration=np.int32(0),
            first_prompt=np.int32(first),
            temperature=np.float32(max(temperature, 1e-6)),
            policy_version=np.int32(0),
        )
        result = evaluator.rollout(parameters, evaluator.tokens, rollout_args)
        too_long = _on_host(result.too_long).sum(axis=0).tolist()
        refuse_cut_messages([evaluator.label], too_long)
        wanted = min(evaluator.prompts, prompts - first) * evaluator.rollouts
        episodes = _first(_on_host(result.episodes), wanted)
        parts.append(episodes)
        if on_batch is not None:
            on_batch(first, _on_host(result.rows), episodes)
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return score(whole, evaluator.rollouts)


def _on_host(tree):
    """The whole arrays as NumPy arrays, on every process."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)


def _first(tree, count: int):
    """The first `count` entries of every array."""
    return jax.tree.map(lambda x: x[:count], tree)


def score(episodes: Episodes, rollouts: int) -> Score:
    """The results of P * n episodes, given as host arrays in the order of levels."""
    success = np.asarray(episodes.success).reshape(-1, rollouts)
    returns = np.asarray(episodes.reward).sum(axis=1).reshape(-1, rollouts)
    played = is_played(episodes)
    within = pass_at_k(success.sum(axis=1), rollouts)
    return Score(
        success=float(success.mean()),
        success_standard_error=standard_error(success.mean(axis=1)),
        pass_at_k=tuple(float(levels.mean()) for levels in within),
        pass_at_k_standard_error=tuple(standard_error(levels) for levels in within),
        turns=float(episodes.turns.mean()),
        actions=float(episodes.actions.sum(axis=1).mean()),
        reply_tokens=float(episodes.reply_tokens[played].mean()),
        valid_reply_rate=float(episodes.is_valid[played].mean()),
        mean_return=float(returns.mean()),
        mean_return_standard_error=standard_error(returns.mean(axis=1)),
        by_level=success,
    )


def standard_error(levels: np.ndarray) -> float:
    """The standard error of the mean of P independent values: sample std / sqrt(P).

    NaN for a single value, which has no sample std.
    """
    if len(levels) < 2:
        return math.nan
    return float(np.std(levels, ddof=1) / math.sqrt(len(levels)))


def pass_at_k(solved: np.ndarray, rollouts: int) -> np.ndarray:
    """float64[n, P], the probability that one of k episodes succeeds, for k = 1..n.

    Unbiased: 1 - C(n - c, k) / C(n, k), with c of n episodes solved. Computed as a
    product, which cannot overflow. Source: Chen et al. 2021, arXiv:2107.03374, section
    2.1.

    Args:
      solved: int[P], c, the solved episodes of each level.
      rollouts: n.
    """
    drawn = np.arange(rollouts)[:, None]
    # C(n-c, k) / C(n, k) = prod_{i<k} (n - c - i) / (n - i), 0 once n - c < k.
    failed_too = np.maximum(rollouts - solved[None] - drawn, 0) / (rollouts - drawn)
    return 1 - np.cumprod(failed_too, axis=0)


def reported_k(rollouts: int) -> tuple[int, ...]:
    """The k of pass@k that are reported: powers of two below n, and n itself."""
    return (*(2**i for i in range((rollouts - 1).bit_length())), rollouts)


def paired_difference(before: Score, after: Score) -> tuple[float, float]:
    """The gain in success on the same levels, and its standard error over levels."""
    gain = after.by_level.mean(axis=1) - before.by_level.mean(axis=1)
    return float(gain.mean()), standard_error(gain)
