"""How good a policy is on levels that were kept from training."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import sample
from ragen_jax.rollout.sample import Call, Rollout, Setting
from ragen_jax.text.dialogue import DialogueTokens
from ragen_jax.trajectory import Episodes, Rows


@dataclasses.dataclass(frozen=True)
class Score:
    """Success of n episodes from each of P levels, and what they were like."""

    success: float  # mean over all episodes
    success_standard_error: float  # of that mean, levels being the independent draws
    pass_at_k: tuple[float, ...]  # at k = 1..n, unbiased
    turns: float  # per episode
    actions: float  # per episode
    reply_tokens: float  # per turn
    valid_reply_rate: float  # of turns
    mean_return: float  # the world's reward, per episode
    by_level: np.ndarray  # bool[P, n], each episode's success

    def metrics(self) -> dict[str, float]:
        """For the sinks, without a prefix."""
        return {
            "success": self.success,
            "success_standard_error": self.success_standard_error,
            "turns": self.turns,
            "actions": self.actions,
            "reply_tokens": self.reply_tokens,
            "valid_reply_rate": self.valid_reply_rate,
            "return": self.mean_return,
        }


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A compiled rollout for evaluation, and the batches to run it in."""

    rollout: Callable[..., Rollout]
    tokens: DialogueTokens
    prompts: int  # P in one call
    rollouts: int  # n episodes from each


def make_evaluator(
    setting: Setting,
    tokens: DialogueTokens,
    *,
    prompts: int,
    rollouts: int,
    slots: int,
    shards: int,
    decode_chunk: int,
    buckets: int,
    greedy: bool,
) -> Evaluator:
    """Compiles nothing yet. Calls take at most `slots` episodes at a time (0: all).

    Args:
      setting, tokens: as for training rollouts.
      prompts: P of the smallest evaluation wanted.
      rollouts: n.
      slots: episodes decoded at a time.
      shards: devices that share rows.
      decode_chunk, buckets: as for `sample.make_plan`.
      greedy: temperature 0.
    """
    each = prompts if not slots else max(1, min(prompts, slots // rollouts))
    # Every shard takes as many episodes as the others.
    while each * rollouts % shards:
        each += 1
    plan = sample.make_plan(
        tokens,
        setting.dialogue,
        prompts=each,
        group_size=rollouts,
        slots=0,
        context=0,
        decode_chunk=decode_chunk,
        buckets=buckets,
        shards=shards,
        greedy=greedy,
    )
    return Evaluator(sample.make_rollout(setting, plan), tokens, each, rollouts)


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
      seed: decides the levels, the world's chance and the sampling.
      temperature: not read by a greedy evaluator.
      on_batch: sees each batch's first level and its record, as host arrays; called in
        order, on every process.
    """
    parts = []
    for first in range(0, prompts, evaluator.prompts):
        call = Call(
            seed=np.uint32(seed),
            split=np.int32(split),
            iteration=np.int32(0),
            first_prompt=np.int32(first),
            temperature=np.float32(max(temperature, 1e-6)),
            policy_version=np.int32(0),
        )
        result = evaluator.rollout(parameters, evaluator.tokens, call)
        wanted = min(evaluator.prompts, prompts - first) * evaluator.rollouts
        episodes = _on_host(result.episodes, wanted)
        parts.append(episodes)
        if on_batch is not None:
            on_batch(first, _on_host(result.rows, wanted), episodes)
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return score(whole, evaluator.rollouts)


def _on_host(tree, count: int):
    """The first `count` entries as NumPy arrays, on every process."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(lambda x: np.asarray(x)[:count], tree)


def score(episodes: Episodes, rollouts: int) -> Score:
    """The figures of P * n episodes, host arrays in the order of levels."""
    success = np.asarray(episodes.success).reshape(-1, rollouts)
    levels = success.mean(axis=1)
    error = levels.std(ddof=1) / len(levels) ** 0.5 if len(levels) > 1 else 0.0
    played = np.arange(episodes.reward.shape[1])[None] < episodes.turns[:, None]
    return Score(
        success=float(levels.mean()),
        success_standard_error=float(error),
        pass_at_k=pass_at_k(success.sum(axis=1), rollouts),
        turns=float(episodes.turns.mean()),
        actions=float(episodes.actions.sum(axis=1).mean()),
        reply_tokens=float(episodes.reply_tokens[played].mean()),
        valid_reply_rate=float(episodes.is_valid[played].mean()),
        mean_return=float(episodes.reward.sum(axis=1).mean()),
        by_level=success,
    )


def pass_at_k(solved: np.ndarray, rollouts: int) -> tuple[float, ...]:
    """Chance that at least one of k episodes of a level succeeds, for k = 1..n.

    Unbiased: 1 - C(n - c, k) / C(n, k), with c of n episodes solved, as a product so
    that nothing overflows. Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.

    Args:
      solved: int[P], episodes solved of each level.
      rollouts: n.
    """
    result, none_solved = [], np.ones(len(solved))
    for k in range(1, rollouts + 1):
        # C(n-c, k) / C(n, k) = prod_{i<k} (n - c - i) / (n - i), 0 once n - c < k.
        left = np.maximum(rollouts - np.asarray(solved) - (k - 1), 0)
        none_solved = none_solved * left / (rollouts - (k - 1))
        result.append(float((1 - none_solved).mean()))
    return tuple(result)


def paired_difference(before: Score, after: Score) -> tuple[float, float]:
    """Gain in success on the same levels, and its standard error over levels."""
    gain = after.by_level.mean(axis=1) - before.by_level.mean(axis=1)
    return float(gain.mean()), float(gain.std(ddof=1) / len(gain) ** 0.5)
