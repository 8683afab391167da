"""A compiled program as a tree: its loops and conditions, and the kernels of each."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from ragen_jax.planning import hlo, kernels
from ragen_jax.planning.hlo import Computation, Instruction, Module
from ragen_jax.planning.kernels import Kernel

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices."""

    kind: str  # "all-reduce"
    dtypes: frozenset[str]  # "f32"
    bytes: int  # of the whole array on one device, the larger of before and after
    group: tuple[int, ...]  # devices of the first group, by their numbers in the mesh
    place: str  # in the Python program, as JAX names it


@dataclasses.dataclass(frozen=True)
class Block:
    """What is done one after the other, each time that its loop comes round."""

    name: str
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    loops: tuple["Loop", ...]
    choices: tuple["Choice", ...]

    def inside(self) -> Iterator["Block"]:
        """This block and all within it, however deep."""
        yield self
        for loop in self.loops:
            yield from loop.body.inside()
        for choice in self.choices:
            for branch in choice.branches:
                yield from branch.inside()

    def without_loops(self) -> Iterator["Block"]:
        """This block and the branches within it, loops left out."""
        yield self
        for choice in self.choices:
            for branch in choice.branches:
                yield from branch.without_loops()

    def all_loops(self) -> Iterator["Loop"]:
        """Every loop within, however deep, outer ones first."""
        for block in self.inside():
            yield from block.loops

    def bytes(self) -> int:
        """That its own kernels read and write; no loops, no branches."""
        return sum(kernel.bytes for kernel in self.kernels)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop."""

    body: Block
    trips: int | None  # how many, where the compiler knows
    place: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """A condition, of which one branch is taken."""

    branches: tuple[Block, ...]  # in the order of lax.switch; of lax.cond false, true
    place: str


def read(text: str) -> Block:
    """The tree of an optimized program, from `jax.stages.Compiled.as_text`."""
    module = hlo.parse(text)
    return _block(module, module.entry)


def _block(module: Module, name: str) -> Block:
    found: tuple[list, list, list, list] = ([], [], [], [])
    _collect(module, module.computations[name], *found)
    return Block(name, *(tuple(each) for each in found))


def _collect(module, computation: Computation, launched, exchanged, loops, choices):
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode == "while":
            loops.append(_loop(module, instruction))
        elif opcode == "conditional":
            branches = tuple(_block(module, name) for name in _branches(instruction))
            choices.append(Choice(branches, instruction.place))
        elif opcode.removesuffix("-start") in _COLLECTIVES:
            exchanged.append(_collective(computation, instruction))
        elif opcode in ("call", "async-start") and instruction.called:
            inner = module.computations[instruction.called]
            _collect(module, inner, launched, exchanged, loops, choices)
        elif kernels.is_kernel(instruction) and not opcode.endswith("-done"):
            launched.append(kernels.measure(module, computation, instruction))


def _loop(module: Module, instruction: Instruction) -> Loop:
    trips = instruction.attribute(r'"known_trip_count":\s*\{"n":"(\d+)"')
    body = _block(module, instruction.attribute(r"body=%?([\w.\-]+)"))
    test = _block(module, instruction.attribute(r"condition=%?([\w.\-]+)"))
    body = dataclasses.replace(body, kernels=body.kernels + test.kernels)
    return Loop(body, int(trips) if trips else None, instruction.place)


def _branches(instruction: Instruction) -> list[str]:
    several = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    if several:
        return [name.strip().lstrip("%") for name in several.split(",")]
    return [
        instruction.attribute(rf"{value}_computation=%?([\w.\-]+)")
        for value in ("false", "true")
    ]


def _collective(computation: Computation, instruction: Instruction) -> Collective:
    sources = [computation[a] for a in instruction.arguments if a in computation]
    given = sum(source.bytes for source in sources)
    # A start gives (what it was given, what it will give).
    starts = instruction.opcode in ("all-gather-start", "collective-permute-start")
    result = instruction.bytes - (given if starts else 0)
    return Collective(
        kind=instruction.opcode.removesuffix("-start"),
        dtypes=frozenset(a.dtype for source in sources for a in source.arrays),
        bytes=max(given, result),
        group=_group(instruction),
        place=instruction.place,
    )


def _group(instruction: Instruction) -> tuple[int, ...]:
    """The first of `replica_groups`: written out, axes of a mesh, or a range.

    Of a permutation, all devices of the first pairs from one to the next.
    """
    pairs = instruction.attribute(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
    if pairs:
        return _chain(pairs)
    written = instruction.attribute(r"replica_groups=\{\{([\d,]*)\}")
    if written:
        return tuple(int(n) for n in written.split(","))
    axes = instruction.attribute(r"replica_groups=mesh\[([^\]]*)\]")
    if axes:
        taken = instruction.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}")
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        own = [slice(None) if f"'{name}'" in taken else 0 for name in sizes]
        return tuple(np.ravel(numbers[tuple(own)]).tolist())
    found = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.line
    )
    if found is None:
        return ()
    shape, sizes = ([int(n) for n in part.split(",")] for part in found.groups()[:2])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if found[3]:
        numbers = numbers.transpose([int(n) for n in found[3].split(",")])
    return tuple(numbers.reshape(shape)[0].tolist())


def _chain(pairs: str) -> tuple[int, ...]:
    """The devices along the pairs {from,to} that begin at the first one's source."""
    follows = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    found = [next(iter(follows))]
    while (after := follows.get(found[-1])) is not None and after not in found:
        found.append(after)
    return tuple(found)


# What tests and reports ask ----------------------------------------------------------


def collectives_in_loops(program: Block) -> list[Collective]:
    """All that stand in any loop, however deep."""
    blocks = (block for loop in program.all_loops() for block in loop.body.inside())
    found = {id(c): c for block in blocks for c in block.collectives}
    return list(found.values())


def copies_in_loops(program: Block, least: int) -> list[Kernel]:
    """Kernels that only copy, in any loop, and write at least so many bytes."""
    blocks = (block for loop in program.all_loops() for block in loop.body.inside())
    found = {
        id(kernel): kernel
        for block in blocks
        for kernel in block.kernels
        if kernel.kind in ("copy", "copy-start") and kernel.written >= least
    }
    return list(found.values())


def has_cudnn_attention(block: Block) -> bool:
    """Whether cuDNN's attention is anywhere within."""
    return any(
        "fmha" in kernel.kind for inner in block.inside() for kernel in inner.kernels
    )


def vocabulary_loops(program: Block, vocabulary: int) -> list[Loop]:
    """The innermost loops whose products have the vocabulary as a dimension.

    In the update these go over chunks of positions; in a rollout over tokens.
    """

    def scores(block: Block) -> bool:
        return any(
            vocabulary in kernel.has_product_of
            for inner in block.without_loops()
            for kernel in inner.kernels
        )

    return [loop for loop in program.all_loops() if scores(loop.body)]


def large_vocabulary_collectives(
    program: Block, vocabulary: int, most: int = _MIB
) -> list[Collective]:
    """Exchanges of more than `most` bytes within the loops over the vocabulary."""
    return [
        collective
        for loop in vocabulary_loops(program, vocabulary)
        for block in loop.body.inside()
        for collective in block.collectives
        if collective.bytes > most
    ]
