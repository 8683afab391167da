"""Simulates a rollout to count its passes at a given mean reply length.

It follows the rules of the engine (rollout/engine.py, rollout/env_step.py) with random
reply lengths in place of a policy: slots decode in chunks, environments step when
enough slots wait, a finished slot takes the next episode. Several environments are
simulated as one. roofline.py multiplies the counts with the cost of each pass.
"""

import dataclasses

import numpy as np

from ragen_jax.training.run import Run

_SHORTEST = 5  # tokens of a reply
# Rollouts of a shard that are simulated for a mean. Their passes vary by a tenth: for
# 128 episodes of 5 turns and replies of 150 tokens, 1,295 decode passes with a standard
# deviation of 125.
_DRAWN = 64
_LEAST = 8  # rollouts of all shards, however many, for the mean of the slowest
_IDLE, _DECODING, _WAITING = range(3)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of one shard's rollout; most are as in RolloutPlan."""

    episodes: int
    slots: int
    extend_width: int  # most slots whose environments step at a time
    extend_share: int
    decode_chunk: int
    buckets: tuple[int, ...]
    context: int
    turns: int
    first: int  # tokens of the prompt, first observation included
    message: int  # tokens of each later observation
    reply_tokens: int  # most tokens of a reply


@dataclasses.dataclass(frozen=True)
class Script:
    """What the policy and the environments of one shard's E episodes do."""

    replies: np.ndarray  # int[E, K], tokens of each reply
    turns: np.ndarray  # int[E], turns that each episode lasts, 1 to K


@dataclasses.dataclass(frozen=True)
class Passes:
    """The counts of one shard's simulated rollout."""

    by_bucket: tuple[int, ...]  # decode passes with each length of the cache
    rounds: int  # chunks of decode passes
    extends: int  # passes in which environments step and messages are prefilled
    tokens: int  # sampled
    filled: float  # share of the cache that decoding slots fill, mean over rounds
    rows: np.ndarray  # int[E], tokens of each episode
    replies: np.ndarray  # int[E], how many of them were sampled

    @property
    def decodes(self) -> int:
        """Decode passes over all slots."""
        return sum(self.by_bucket)


def sizes_of(run: Run) -> Sizes:
    """The sizes of one shard of a run's rollout, with messages of maximal length."""
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
    """Simulates rollouts on several shards in parallel, several times.

    Args:
      sizes, reply, ends: as for `simulate`.
      shards: that decode in parallel; the update waits for the slowest.

    Returns:
      The slowest shard's passes, means over the draws rounded to whole numbers, with
      `rows`, `replies` and `tokens` of the first draw; and all shards' of that draw.
    """
    is_random = reply < sizes.reply_tokens or ends > 0
    iterations = max(_LEAST, _DRAWN // shards) if is_random else 1
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
        extends=round(np.mean([each.extends for each in longest])),
        filled=float(np.average([each.filled for each in longest], weights=decodes)),
    )
    return mean, drawn[0]


def simulate(sizes: Sizes, reply: float, ends: float, seed: int = 0) -> Passes:
    """Simulates one shard's rollout.

    Args:
      sizes: from `sizes_of`.
      reply: mean tokens of a reply, gamma-distributed with shape 2; from
        `sizes.reply_tokens` on, every reply has exactly that length.
      ends: probability that an episode ends with a turn that is not its last.
      seed: of the random numbers.
    """
    return play(sizes, draw(sizes, reply, ends, seed))


def draw(sizes: Sizes, reply: float, ends: float, seed: int) -> Script:
    """Draws the lengths of replies and episodes. Args: as for `simulate`."""
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
    """Runs one shard's rollout with given lengths of replies and episodes."""
    # Of each slot: what it does, its episode and turn, the tokens in its cache, and
    # those left of its reply.
    status = np.full(sizes.slots, _DECODING)
    episode, next_episode = np.arange(sizes.slots), sizes.slots
    turn = np.zeros(sizes.slots, int)
    length, left = np.full(sizes.slots, sizes.first), script.replies[episode, 0].copy()
    rows, replies = (np.zeros(sizes.episodes, int) for _ in range(2))
    by_bucket, rounds, extends, held = [0] * len(sizes.buckets), 0, 0, 0
    while (status != _IDLE).any():
        decoding = status == _DECODING
        needed = (length[decoding].max() if decoding.any() else 0) + sizes.decode_chunk
        # At most the whole cache: a window drops turns before it exceeds the context.
        bucket = min(np.searchsorted(sizes.buckets, needed), len(by_bucket) - 1)
        by_bucket[bucket] += sizes.decode_chunk
        rounds += 1
        held += int(length[decoding].sum())
        sampled = np.where(decoding, np.minimum(left, sizes.decode_chunk), 0)
        length, left = length + sampled, left - sampled
        np.add.at(replies, episode[decoding], sampled[decoding])
        status[decoding & (left <= 0)] = _WAITING
        if not _is_due(sizes, status):
            continue
        extends += 1
        for slot in np.flatnonzero(status == _WAITING)[: sizes.extend_width]:
            turn[slot] += 1
            if turn[slot] < script.turns[episode[slot]]:
                length[slot] = min(length[slot] + sizes.message, sizes.context)
            else:
                rows[episode[slot]] = length[slot]
                if next_episode >= sizes.episodes:
                    status[slot] = _IDLE
                    continue
                episode[slot], turn[slot], length[slot] = next_episode, 0, sizes.first
                next_episode += 1
            status[slot] = _DECODING
            left[slot] = script.replies[episode[slot], turn[slot]]
    tokens = int(replies.sum())
    filled = held / (rounds * sizes.slots * sizes.context)
    return Passes(tuple(by_bucket), rounds, extends, tokens, filled, rows, replies)


def _is_due(sizes: Sizes, status: np.ndarray) -> bool:
    """Whether environments step now, by the rule of `engine.env_step_due`."""
    enough = sizes.extend_width
    if sizes.extend_share:
        share = -(-int((status != _IDLE).sum()) // sizes.extend_share)
        enough = min(max(share, 1), enough)
    return (status == _WAITING).sum() >= enough or not (status == _DECODING).any()
