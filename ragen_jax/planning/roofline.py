"""The time of an iteration at given reply lengths, from the compiled programs.

The rollout's passes are simulated; what a pass costs is read off the program. So is the
update, whose loops run as far as rows and replies go.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.learning import filters
from ragen_jax.models.config import ModelConfig
from ragen_jax.parallel import mesh as meshes
from ragen_jax.planning import simulation, work
from ragen_jax.planning.programs import Block, Choice, Loop, vocabulary_loops
from ragen_jax.planning.simulation import Passes
from ragen_jax.planning.work import Costs, Work
from ragen_jax.training import programs as programs_lib
from ragen_jax.training.run import Run

ENDS = 0.2  # of the episodes end at each turn, where replies are not all full


@dataclasses.dataclass(frozen=True)
class RolloutParts:
    """What the rollout's program spends where."""

    decode: tuple[Work, ...]  # one pass, by bucket, the cache full
    decode_empty: tuple[Work, ...]  # the same with nothing in the cache
    chunk: Work  # of a round, besides its passes and the feed pass
    feed: Work  # environments step and their messages are prefilled
    start: Work  # levels, prompts, weights; once


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration at one mean length of replies."""

    reply: float  # tokens
    passes: Passes  # of the shard that takes most, in the mean
    tokens: int  # sampled on all devices
    rows: int  # trained on
    rollout: Work
    update: Work

    @property
    def seconds(self) -> float:
        """Of rollout and update."""
        return self.rollout.seconds + self.update.seconds


def read_rollout(run: Run, program: Block, costs: Costs) -> RolloutParts:
    """Takes the rollout's program apart.

    Raises:
      ValueError: if no loop over tokens is found in it.
    """
    passes = vocabulary_loops(program, run.model.config.vocabulary)
    bodies = {id(each.body) for each in passes}

    def holds_pass(each: Loop) -> bool:
        return any(id(block) in bodies for block in each.body.inside())

    outer = [each for each in program.loops if holds_pass(each)]
    if not passes or not outer:
        raise ValueError("the rollout's program has no loop that scores the vocabulary")
    around = outer[0].body
    others = tuple(each for each in around.loops if not holds_pass(each))
    feed = dataclasses.replace(around, kernels=(), collectives=(), loops=others)
    rest = tuple(each for each in program.loops if not holds_pass(each))
    by_bucket = _equal_shares(len(run.plan.buckets))
    return RolloutParts(
        decode=tuple(costs.block(p.body, _once, by_bucket) for p in passes),
        decode_empty=tuple(
            costs.block(_without_cache(p.body), _once, by_bucket) for p in passes
        ),
        chunk=costs.own(around),
        feed=costs.block(feed, _once, by_bucket),
        start=costs.block(dataclasses.replace(program, loops=rest), _once, by_bucket),
    )


def _without_cache(body: Block) -> Block:
    """A decode pass whose fused attention, which knows lengths, finds no entries."""
    own = (
        dataclasses.replace(kernel, read=kernel.written, operations=0.0)
        if "fmha" in kernel.kind
        else kernel
        for kernel in body.kernels
    )
    return dataclasses.replace(body, kernels=tuple(own))


def decode_at(parts: RolloutParts, bucket: int, filled: float) -> Work:
    """A decode pass that finds so much of the cache filled; plain operations read all.

    Args:
      parts: of the rollout's program.
      bucket: an index into the plan's buckets.
      filled: 0 to 1.
    """
    index = min(bucket, len(parts.decode) - 1)  # Fewer where buckets do not pay.
    return filled * parts.decode[index] + (1 - filled) * parts.decode_empty[index]


def estimate(
    run: Run, parts: RolloutParts, update: Block, costs: Costs, reply: float
) -> Iteration:
    """An iteration whose replies have so many tokens in the mean."""
    sizes = simulation.sizes_of(run)
    ends = 0.0 if reply >= sizes.reply_tokens else ENDS
    settings, shards = run.settings, meshes.row_shards(run.model.mesh)
    passes, simulated = simulation.expect(sizes, reply, ends, shards)
    total = parts.start + passes.rounds * parts.chunk + passes.feeds * parts.feed
    for index, count in enumerate(passes.by_bucket):
        total += count * decode_at(parts, index, passes.filled)
    kept = filters.most_kept_episodes(settings)  # They are taken to be like all.
    lengths = np.resize(np.concatenate([each.rows for each in simulated]), kept)
    replies = np.resize(np.concatenate([each.replies for each in simulated]), kept)
    if run.plan.window:  # A row a turn, each with the turns that it looks back to.
        lengths = np.repeat(lengths, sizes.turns)
        replies = np.repeat(replies / sizes.turns, sizes.turns)
    return Iteration(
        reply=reply,
        passes=passes,
        tokens=sum(each.tokens for each in simulated),
        rows=len(lengths),
        rollout=total,
        update=_update(run, update, costs, lengths, replies),
    )


def _update(
    run: Run, program: Block, costs: Costs, lengths: np.ndarray, replies: np.ndarray
) -> Work:
    """The update of rows of so many tokens, so many of them sampled."""
    chosen, compiled = run.settings.optimizer, programs_lib.update_lengths(run)
    # Each minibatch's longest rows come first.
    pieces = [
        i + np.argsort(-lengths[i : i + chosen.minibatch])[j : j + chosen.microbatch]
        for i in range(0, len(lengths), chosen.minibatch)
        for j in range(0, min(chosen.minibatch, len(lengths) - i), chosen.microbatch)
    ]
    longest = [lengths[piece].max() for piece in pieces]
    used = np.minimum(np.searchsorted(compiled, longest), len(compiled) - 1)
    by_length = (np.bincount(used, minlength=len(compiled)) / len(pieces)).tolist()
    minibatches = math.ceil(len(lengths) / chosen.minibatch)
    own_replies = [replies[p].sum() / meshes.row_shards(run.model.mesh) for p in pieces]
    scored = ScoredTokens(run.model.config, program, own_replies)
    rounds = _rounds(program, scored, len(pieces), minibatches)

    def shares(choice: Choice):
        if len(choice.branches) == len(compiled):
            return by_length
        return ()

    return costs.block(
        program, lambda each: scored.trips(each, rounds[id(each.body)]), shares
    )


def _rounds(
    program: Block, scored: "ScoredTokens", pieces: int, minibatches: int
) -> dict[int, float]:
    """Rounds of the update's loops of unknown length, by the ids of their bodies.

    Old values and reference: all microbatches in one loop. Learning: those of a
    minibatch in a loop within the one over minibatches. What goes over the vocabulary
    within a microbatch is the business of `scored`.
    """
    found: dict[int, float] = {}

    def is_over_rows(each: Loop) -> bool:
        return each.trips is None and not scored.is_over_vocabulary(each)

    def visit(block: Block, microbatches: float) -> None:
        for each in block.loops:
            found[id(each.body)], within = microbatches, microbatches
            if is_over_rows(each) and any(map(is_over_rows, each.body.loops)):
                found[id(each.body)] = minibatches
                within = pieces / minibatches
            visit(each.body, within)
        for choice in block.choices:
            for branch in choice.branches:
                visit(branch, microbatches)

    visit(program, pieces)
    return found


class ScoredTokens:
    """Rounds of the update's loops over the vocabulary: one a chunk of reply tokens."""

    def __init__(self, config: ModelConfig, program: Block, tokens: Sequence[float]):
        """`tokens`: reply tokens of each microbatch on one device."""
        self.tokens, self.numbers = tokens, config.vocabulary * config.width
        self.vocabulary = config.vocabulary
        found = vocabulary_loops(program, config.vocabulary)
        self.loops = {id(each.body): each for each in found}

    def is_over_vocabulary(self, each: Loop) -> bool:
        """Whether a loop goes over chunks of reply tokens."""
        return id(each.body) in self.loops

    def trips(self, each: Loop, others: float) -> float:
        """Of a loop of unknown length: chunks that hold replies, or `others`."""
        if not self.is_over_vocabulary(each):
            return others
        chunk = self.chunk(each)
        return sum(math.ceil(n / chunk) for n in self.tokens) / len(self.tokens)

    def chunk(self, each: Loop) -> int:
        """Tokens that one round scores, from its largest product."""
        operations = max(
            kernel.operations
            for block in each.body.without_loops()
            for kernel in block.kernels
            if self.vocabulary in kernel.has_product_of
        )
        return max(1, round(operations / (2 * self.numbers)))


def _once(_: Loop) -> float:
    return 1.0


def _equal_shares(count: int):
    """Conditions of so many branches choose each as often."""
    return lambda choice: (
        [1 / count] * count if len(choice.branches) == count > 1 else ()
    )


def assumptions() -> str:
    """What the times rest on, in a sentence."""
    return (
        f"Assumed, not measured: kernels reach {work.BANDWIDTH_SHARE:.0%} of the"
        f" memory's bandwidth or {work.MATMUL_SHARE:.0%} of the dense peak, each"
        f" starts in {work.KERNEL_SECONDS * 1e6:.1f} us (within CUDA graphs),"
        f" {ENDS:.0%} of the episodes end at each turn."
    )
