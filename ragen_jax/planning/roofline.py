"""Estimates the time of an iteration at a given mean reply length.

The cost of each pass of the rollout is read from its compiled program (work.py), their
number is simulated (simulation.py). The update's cost is read from its program, with
the trips of its loops computed from the lengths of simulated rows and replies.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.models.config import ModelConfig
from ragen_jax.parallel import mesh as meshes
from ragen_jax.planning import simulation, work
from ragen_jax.planning.programs import Block, Choice, Loop, vocabulary_loops
from ragen_jax.planning.simulation import Passes
from ragen_jax.planning.work import Costs, Work
from ragen_jax.settings import update_counts
from ragen_jax.training import programs as programs_lib
from ragen_jax.training.run import Run

# The share of episodes that ends at each turn; none if all replies have full length.
ENDS = 0.2


@dataclasses.dataclass(frozen=True)
class RolloutParts:
    """The costs of the parts of the rollout's program.

    After `start` it runs rounds: each is a chunk of decode passes, followed by an
    extend pass if enough slots wait.
    """

    decode: tuple[Work, ...]  # one decode pass with a full cache, for each bucket
    decode_empty: tuple[Work, ...]  # the same with an empty cache
    chunk: Work  # a round's overhead besides its decode passes and its extend pass
    extend: Work  # environments step and their messages are prefilled
    start: Work  # once: levels, prompts' prefill, the weights' decode layout


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The estimate of one iteration."""

    reply: float  # mean tokens of a reply
    passes: Passes  # of the shard with most, the mean of several draws
    tokens: int  # sampled on all devices
    rows: int  # trained on
    rollout: Work
    update: Work

    @property
    def seconds(self) -> float:
        """Seconds of rollout and update together."""
        return self.rollout.seconds + self.update.seconds


def read_rollout(run: Run, program: Block, costs: Costs) -> RolloutParts:
    """Finds the parts of the rollout's program and their costs.

    A decode pass is the body of a loop that multiplies with the vocabulary: one loop
    for each bucket, or one in all. The outermost loop around them is that of rounds.

    Raises:
      ValueError: if the program has no such loop.
    """
    passes = vocabulary_loops(program, run.model.config.vocabulary)
    bodies = {id(each.body) for each in passes}

    def holds_pass(each: Loop) -> bool:
        return any(id(block) in bodies for block in each.body.inside())

    outer = [each for each in program.loops if holds_pass(each)]
    if not passes or not outer:
        raise ValueError("the rollout's program has no loop that scores the vocabulary")
    around = outer[0].body  # one round
    others = tuple(each for each in around.loops if not holds_pass(each))
    extend = dataclasses.replace(around, kernels=(), collectives=(), loops=others)
    rest = tuple(each for each in program.loops if not holds_pass(each))
    # Branches by bucket, as of the extend pass: each bucket as often.
    by_bucket = _equal_shares(len(run.plan.buckets))
    return RolloutParts(
        decode=tuple(costs.block(p.body, _once, by_bucket) for p in passes),
        decode_empty=tuple(
            costs.block(_without_cache(p.body), _once, by_bucket) for p in passes
        ),
        chunk=costs.own(around),
        extend=costs.block(extend, _once, by_bucket),
        start=costs.block(dataclasses.replace(program, loops=rest), _once, by_bucket),
    )


def _without_cache(body: Block) -> Block:
    """A decode pass with an empty cache, which only cuDNN's attention takes note of."""
    bare_kernels = (
        dataclasses.replace(kernel, read=kernel.written, operations=0.0)
        if "fmha" in kernel.kind
        else kernel
        for kernel in body.kernels
    )
    return dataclasses.replace(body, kernels=tuple(bare_kernels))


def decode_at(parts: RolloutParts, bucket: int, filled: float) -> Work:
    """A decode pass with a share of the cache filled: linear between empty and full.

    Attention by plain operations reads the whole cache, filled or not.

    Args:
      parts: of the rollout's program.
      bucket: an index into the plan's buckets.
      filled: 0 to 1.
    """
    # Attention that knows lengths has one loop, and no buckets.
    index = min(bucket, len(parts.decode) - 1)
    return filled * parts.decode[index] + (1 - filled) * parts.decode_empty[index]


def estimate(
    run: Run, parts: RolloutParts, update: Block, costs: Costs, reply: float
) -> Iteration:
    """Estimates an iteration whose replies have `reply` tokens on average."""
    sizes = simulation.sizes_of(run)
    ends = 0.0 if reply >= sizes.reply_tokens else ENDS
    settings, shards = run.settings, meshes.row_shards(run.model.mesh)
    passes, simulated = simulation.expect(sizes, reply, ends, shards)
    total = parts.start + passes.rounds * parts.chunk + passes.extends * parts.extend
    for index, count in enumerate(passes.by_bucket):
        total += count * decode_at(parts, index, passes.filled)
    # The kept episodes are taken to be like all: the first `kept` of them, repeated
    # if there are fewer.
    kept = update_counts.room_for_episodes(settings)
    lengths = np.resize(np.concatenate([each.rows for each in simulated]), kept)
    replies = np.resize(np.concatenate([each.replies for each in simulated]), kept)
    if run.plan.window:  # A row for each turn, each taken to be as long as the last.
        lengths = np.repeat(lengths, sizes.turns)
        replies = np.repeat(replies / sizes.turns, sizes.turns)
    return Iteration(
        reply=reply,
        passes=passes,
        tokens=sum(each.tokens for each in simulated),
        rows=len(lengths),
        rollout=total,
        update=settings.optimizer.reuse * _update(run, update, costs, lengths, replies),
    )


def _update(
    run: Run, program: Block, costs: Costs, lengths: np.ndarray, replies: np.ndarray
) -> Work:
    """The cost of one use of the episodes.

    Args:
      run: of the settings, the model and the mesh.
      program: of the update.
      costs: of the devices.
      lengths: int[R], tokens of each row.
      replies: [R], how many of them were sampled.
    """
    chosen, compiled = run.settings.optimizer, programs_lib.update_lengths(run)
    pieces = _microbatches(lengths, chosen.minibatch, chosen.microbatch)
    # Each microbatch takes the branch of the shortest compiled length that holds it.
    longest = [lengths[piece].max() for piece in pieces]
    used = np.minimum(np.searchsorted(compiled, longest), len(compiled) - 1)
    by_length = (np.bincount(used, minlength=len(compiled)) / len(pieces)).tolist()
    minibatches = math.ceil(len(lengths) / chosen.minibatch)
    own_replies = [replies[p].sum() / meshes.row_shards(run.model.mesh) for p in pieces]
    scored = ScoredTokens(run.model.config, program, own_replies)
    scoring = math.ceil(len(lengths) / chosen.microbatch)
    rounds = _rounds(program, scored, scoring, len(pieces), minibatches)

    def shares(choice: Choice):
        if len(choice.branches) == len(compiled):
            return by_length
        return ()

    return costs.block(
        program, lambda each: scored.trips(each, rounds[id(each.body)]), shares
    )


def _microbatches(
    lengths: np.ndarray, minibatch: int, microbatch: int
) -> list[np.ndarray]:
    """The rows of each microbatch, int[microbatch] or fewer.

    As in learning/minibatches.py minibatches are of like size, and the longest rows of
    each come first.
    """
    pieces = []
    count = math.ceil(len(lengths) / minibatch)
    for rows in np.array_split(np.arange(len(lengths)), count):
        longest_first = rows[np.argsort(-lengths[rows])]
        for start in range(0, len(rows), microbatch):
            pieces.append(longest_first[start : start + microbatch])
    return pieces


def _rounds(
    program: Block,
    scored: "ScoredTokens",
    scoring: int,
    learning: int,
    minibatches: int,
) -> dict[int, float]:
    """The trips of the update's loops over rows, by the ids of their bodies.

    Old values and reference scores take one loop over `scoring` microbatches. Learning
    takes a loop over minibatches, and in it one over the microbatches of each, all
    together `learning`. The loops over the vocabulary within a microbatch are left to
    `scored`.
    """
    times: dict[int, float] = {}

    def is_over_rows(each: Loop) -> bool:
        return each.trips is None and not scored.is_over_vocabulary(each)

    def visit(block: Block, microbatches: float) -> None:
        for each in block.loops:
            times[id(each.body)], within = microbatches, microbatches
            if is_over_rows(each) and any(map(is_over_rows, each.body.loops)):
                times[id(each.body)] = minibatches
                within = learning / minibatches
            visit(each.body, within)
        for choice in block.choices:
            for branch in choice.branches:
                visit(branch, microbatches)

    visit(program, scoring)
    return times


class ScoredTokens:
    """The trips of the update's loops over the vocabulary.

    Such a loop computes the logits of one chunk of a microbatch's reply tokens a trip.
    """

    def __init__(self, config: ModelConfig, program: Block, tokens: Sequence[float]):
        """`tokens` are the reply tokens of each microbatch on one device."""
        self.tokens, self.numbers = tokens, config.vocabulary * config.width
        self.vocabulary = config.vocabulary
        loops = vocabulary_loops(program, config.vocabulary)
        self.loops = {id(each.body): each for each in loops}

    def is_over_vocabulary(self, each: Loop) -> bool:
        """Whether a loop is one of these."""
        return id(each.body) in self.loops

    def trips(self, each: Loop, others: float) -> float:
        """Mean trips of a loop over the vocabulary; of any other loop `others`."""
        if not self.is_over_vocabulary(each):
            return others
        chunk = self.chunk(each)
        return sum(math.ceil(n / chunk) for n in self.tokens) / len(self.tokens)

    def chunk(self, each: Loop) -> int:
        """The tokens of a chunk, from the FLOP of its largest product: 2 tokens V D."""
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
    """`Shares` by which conditionals of `count` branches take each equally often."""
    return lambda choice: (
        [1 / count] * count if len(choice.branches) == count > 1 else ()
    )


def assumptions() -> str:
    """The sentence of the report that names the assumptions behind its times."""
    return (
        f"Assumed, not measured: kernels reach {work.BANDWIDTH_SHARE:.0%} of the"
        f" memory's bandwidth or {work.MATMUL_SHARE:.0%} of the peak FLOP/s, each takes"
        f" {work.KERNEL_SECONDS * 1e6:.1f} us to start (within CUDA graphs), and"
        f" {ENDS:.0%} of the episodes end at each turn (none where replies have the"
        " most tokens)."
    )
