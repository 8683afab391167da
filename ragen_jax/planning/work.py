"""The cost of running part of a compiled program on a device: a roofline model.

A kernel takes max(bytes / bandwidth, FLOP / peak) seconds, plus a constant for its
launch. Bandwidth and peak are those of the data sheet times the shares below, which are
assumptions. Source of the model: Williams, Waterman and Patterson 2009, "Roofline".
"""

import dataclasses
from collections.abc import Callable, Sequence

from ragen_jax.planning import reads
from ragen_jax.planning.devices import Figures
from ragen_jax.planning.kernels import Kernel
from ragen_jax.planning.programs import Block, Choice, Collective, Loop

BANDWIDTH_SHARE = 0.8  # of the memory bandwidth
MATMUL_SHARE = 0.5  # of the dense peak, for matrix products and attention
CACHE_SHARE = 0.5  # of the L2 cache: it has two halves, and data may be in both
KERNEL_SECONDS = 1.5e-6  # from one kernel to the next within a CUDA graph
COLLECTIVE_SECONDS = 15e-6  # latency of a collective


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does, and how long that takes."""

    kernels: float = 0.0  # launches
    bytes: float = 0.0  # read and written
    operations: float = 0.0  # FLOP of matrix products and attention
    exchanged: float = 0.0  # bytes of arrays in collectives
    seconds: float = 0.0  # without L2: as if all bytes moved from and to memory
    cached: float = 0.0  # those of the bytes read that L2 may still hold

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(_values(self), _values(other), strict=True)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * value for value in _values(self)))

    __rmul__ = __mul__


def _values(work: Work) -> tuple[float, ...]:
    return dataclasses.astuple(work)


NOTHING = Work()
Trips = Callable[[Loop], float]  # how often a loop runs if the compiler does not know
# How often each branch runs, shares that sum to 1; empty if that is not known.
Shares = Callable[[Choice], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of kernels, collectives and blocks on devices of one kind."""

    figures: Figures
    per_host: int  # devices of a host
    l2_cache: float = 0.0  # bytes

    def kernel(self, kernel: Kernel) -> Work:
        """One launch of a kernel."""
        figures = self.figures
        peak = figures.matmul_float32 if kernel.is_wide else figures.matmul_bfloat16
        moving = kernel.bytes / (BANDWIDTH_SHARE * figures.memory_bandwidth)
        multiplying = kernel.operations / (MATMUL_SHARE * peak)
        seconds = max(moving, multiplying) + KERNEL_SECONDS
        return Work(1, kernel.bytes, kernel.operations, 0, seconds)

    def collective(self, collective: Collective) -> Work:
        """One collective by a ring algorithm.

        Of n devices each sends (n - 1) / n of the array, in an all-reduce twice (first
        a reduce-scatter, then an all-gather); in a permutation each sends all it has.
        Across hosts, all devices of a host send at once.
        """
        count = len(collective.group)
        if count < 2:
            return NOTHING
        hosts = len({number // self.per_host for number in collective.group})
        bandwidth = self.figures.within_host
        if hosts > 1:
            between = self.figures.between_hosts * count / hosts
            bandwidth = min(bandwidth, between)
        rounds = 2 if collective.kind == "all-reduce" else 1
        sent = rounds * (count - 1) / count * collective.bytes
        if collective.kind == "collective-permute":
            sent = collective.bytes
        seconds = sent / bandwidth + COLLECTIVE_SECONDS
        return Work(0, 0, 0, collective.bytes, seconds)

    def block(self, block: Block, trips: Trips, shares: Shares) -> Work:
        """One pass through a block, loops and conditionals included."""
        total = self.own(block)
        for loop in block.loops:
            count = trips(loop) if loop.trips is None else loop.trips
            total += count * self.block(loop.body, trips, shares)
        for choice in block.choices:
            branches = [self.block(b, trips, shares) for b in choice.branches]
            branch_shares = shares(choice)
            if not branch_shares:  # Not known: assume the branch that takes longest.
                total += max(branches, key=lambda work: work.seconds)
                continue
            for share, branch in zip(branch_shares, branches, strict=True):
                total += share * branch
        return total

    def own(self, block: Block) -> Work:
        """A block's own kernels and collectives, without loops and conditionals."""
        total = sum(map(self.kernel, block.kernels), NOTHING)
        total = sum(map(self.collective, block.collectives), total)
        hits = reads.from_cache(block.kernels, CACHE_SHARE * self.l2_cache)
        return total + Work(cached=sum(hits))
