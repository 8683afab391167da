"""Simulation of the passes that an iteration takes at given reply lengths.

The engine's own rules (rollout/engine.py, rollout/env_step.py) with random numbers for
the policy: slots decode in chunks, environments step when enough slots wait, a finished
slot takes the next episode. Several environments are taken as one.
"""

import dataclasses

import numpy as np

from ragen_jax.training.run import Run

_SHORTEST = 5  # tokens of a reply
# Shards drawn in all for a mean. One shard's passes scatter by a tenth (128 episodes of
# 5 turns, replies of 150 tokens: 1,295 decode passes with a deviation of 125).
_DRAWN = 64
_IDLE, _DECODING, _WAITING = range(3)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the rules need of a run; everything of one shard."""

    episodes: int
    slots: int
    extend_width: int  # slots whose environments step at a time
    extend_share: int  # as RolloutPlan.extend_share
    decode_chunk: int
    buckets: tuple[int, ...]
    context: int
    turns: int
    first: int  # tokens of a prompt
    message: int  # tokens of a later message
    reply_tokens: int  # most of one reply


@dataclasses.dataclass(frozen=True)
class Script:
    """What the policy of one shard does."""

    replies: np.ndarray  # int[E, K], tokens of each episode's replies
    turns: np.ndarray  # int[E], 1..K that each plays


@dataclasses.dataclass(frozen=True)
class Passes:
    """What was simulated."""

    by_bucket: tuple[int, ...]  # decode passes
    rounds: int  # chunks of decode passes
    feeds: int
    tokens: int  # sampled, on this shard
    filled: float  # of the cache, what the slots that decode hold, mean over passes
    rows: np.ndarray  # int[E], tokens of each episode
    replies: np.ndarray  # int[E], of them sampled

    @property
    def decodes(self) -> int:
        """Decode passes over all slots."""
        return sum(self.by_bucket)


def sizes_of(run: Run) -> Sizes:
    """The sizes of one shard of a run's rollout; messages as long as they may be."""
    plan = run.plan
    return Sizes(
        episodes=plan.episodes,
        slots=plan.slots,
        extend_width=plan.extend_width,
        extend_share=plan.extend_share,
        decode_chunk=plan.decode_chunk,
        buckets=plan.buckets,
        context=plan.context,
        turns=plan.turns,
        first=max(tokens.first_capacity for tokens in run.tokens),
        message=max(tokens.next_capacity for tokens in run.tokens),
        reply_tokens=plan.reply_tokens,
    )


def expect(
    sizes: Sizes, reply: float, ends: float, shards: int
) -> tuple[Passes, tuple[Passes, ...]]:
    """An iteration's rollout on several shards, the mean of many draws.

    Args:
      sizes, reply, ends: as for `simulate`.
      shards: that decode side by side; the next program waits for the slowest.

    Returns:
      The passes of the shard that takes most, means rounded to whole passes, with the
      rows of one draw; and what each shard does in one draw.
    """
    is_random = reply < sizes.reply_tokens or ends > 0
    iterations = max(1, _DRAWN // shards) if is_random else 1
    drawn = [
        tuple(
            simulate(sizes, reply, ends, iteration * shards + shard)
            for shard in range(shards)
        )
        for iteration in range(iterations)
    ]
    longest = [max(each, key=lambda shard: shard.decodes) for each in drawn]
    decodes = np.array([each.decodes for each in longest])
    mean = dataclasses.replace(
        longest[0],
        by_bucket=tuple(
            round(count) for count in np.mean([x.by_bucket for x in longest], axis=0)
        ),
        rounds=round(np.mean([each.rounds for each in longest])),
        feeds=round(np.mean([each.feeds for each in longest])),
        filled=float(np.average([each.filled for each in longest], weights=decodes)),
    )
    return mean, drawn[0]


def simulate(sizes: Sizes, reply: float, ends: float, seed: int = 0) -> Passes:
    """One shard's rollout.

    Args:
      sizes: from `sizes_of`.
      reply: mean tokens of a reply, gamma-distributed with shape 2; at the most or
        above all are as long as they may be.
      ends: chance that an episode ends with a turn before its last.
      seed: of the random numbers.
    """
    return play(sizes, draw(sizes, reply, ends, seed))


def draw(sizes: Sizes, reply: float, ends: float, seed: int) -> Script:
    """Random replies and turns. Args: as for `simulate`."""
    rng, shape = np.random.default_rng(seed), (sizes.episodes, sizes.turns)
    if reply >= sizes.reply_tokens:
        replies = np.full(shape, sizes.reply_tokens)
    else:
        drawn = np.round(rng.gamma(2.0, reply / 2, shape)).astype(int)
        shortest = min(_SHORTEST, sizes.reply_tokens)
        replies = np.clip(drawn, shortest, sizes.reply_tokens)
    is_last = rng.random(shape) < ends
    is_last[:, -1] = True
    return Script(replies, 1 + is_last.argmax(axis=1))


def play(sizes: Sizes, script: Script) -> Passes:
    """One shard's rollout of replies that are known."""
    status = np.full(sizes.slots, _DECODING)
    episode, taken = np.arange(sizes.slots), sizes.slots
    turn = np.zeros(sizes.slots, int)
    length, left = np.full(sizes.slots, sizes.first), script.replies[episode, 0].copy()
    rows, replies = (np.zeros(sizes.episodes, int) for _ in range(2))
    by_bucket, rounds, feeds, held = [0] * len(sizes.buckets), 0, 0, 0
    while (status != _IDLE).any():
        decoding = status == _DECODING
        needed = (length[decoding].max() if decoding.any() else 0) + sizes.decode_chunk
        # A window drops turns rather than outgrow the context.
        bucket = min(np.searchsorted(sizes.buckets, needed), len(by_bucket) - 1)
        by_bucket[bucket] += sizes.decode_chunk
        rounds += 1
        held += int(length[decoding].sum())
        said = np.where(decoding, np.minimum(left, sizes.decode_chunk), 0)
        length, left = length + said, left - said
        np.add.at(replies, episode[decoding], said[decoding])
        status[decoding & (left <= 0)] = _WAITING
        if not _is_due(sizes, status):
            continue
        feeds += 1
        for slot in np.flatnonzero(status == _WAITING)[: sizes.extend_width]:
            turn[slot] += 1
            if turn[slot] < script.turns[episode[slot]]:
                length[slot] = min(length[slot] + sizes.message, sizes.context)
            else:
                rows[episode[slot]] = length[slot]
                if taken >= sizes.episodes:
                    status[slot] = _IDLE
                    continue
                episode[slot], turn[slot], length[slot] = taken, 0, sizes.first
                taken += 1
            status[slot] = _DECODING
            left[slot] = script.replies[episode[slot], turn[slot]]
    tokens = int(replies.sum())
    filled = held / (rounds * sizes.slots * sizes.context)
    return Passes(tuple(by_bucket), rounds, feeds, tokens, filled, rows, replies)


def _is_due(sizes: Sizes, status: np.ndarray) -> bool:
    """`engine.env_step_due`."""
    enough = sizes.extend_width
    if sizes.extend_share:
        share = -(-int((status != _IDLE).sum()) // sizes.extend_share)
        enough = min(max(share, 1), enough)
    return (status == _WAITING).sum() >= enough or not (status == _DECODING).any()
