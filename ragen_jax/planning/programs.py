"""A compiled program as a tree of loops and conditionals, with the kernels of each.

`read` builds it from HLO text; roofline.py, report.py and the tests query it.
"""

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
# A part of the kind of its kernels, by the name of a fused attention.
_FUSED_ATTENTION = {"cuDNN": "fmha", "splash attention": "tpu_custom_call"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation."""

    kind: str  # "all-reduce"
    dtypes: frozenset[str]  # "f32"
    bytes: int  # on one device, of its arguments or of its results: the larger
    group: tuple[int, ...]  # devices of the first group, by their numbers in the mesh
    place: str  # in the Python program: JAX's name stack


@dataclasses.dataclass(frozen=True)
class Block:
    """The body of the program, a loop or a branch: what one pass through it runs."""

    name: str  # of its HLO computation
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    loops: tuple["Loop", ...]
    choices: tuple["Choice", ...]

    def inside(self) -> Iterator["Block"]:
        """This block and all blocks nested within it."""
        yield self
        for loop in self.loops:
            yield from loop.body.inside()
        for choice in self.choices:
            for branch in choice.branches:
                yield from branch.inside()

    def without_loops(self) -> Iterator["Block"]:
        """This block and the branches nested within it, but no bodies of loops."""
        yield self
        for choice in self.choices:
            for branch in choice.branches:
                yield from branch.without_loops()

    def all_loops(self) -> Iterator["Loop"]:
        """All loops nested within, outer ones first."""
        for block in self.inside():
            yield from block.loops

    def bytes(self) -> int:
        """Bytes that its own kernels read and write, without loops and branches."""
        return sum(kernel.bytes for kernel in self.kernels)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop."""

    body: Block  # with the kernels of the loop's condition
    trips: int | None  # None if the compiler does not know
    place: str  # in the Python program: JAX's name stack


@dataclasses.dataclass(frozen=True)
class Choice:
    """A conditional, which takes one of its branches."""

    branches: tuple[Block, ...]  # as in lax.switch; for lax.cond: false, true
    place: str  # in the Python program: JAX's name stack


def read(text: str) -> Block:
    """The tree of an optimized program, from `jax.stages.Compiled.as_text`."""
    module = hlo.parse(text)
    return _block(module, module.entry)


def _block(module: Module, name: str) -> Block:
    found: tuple[list, list, list, list] = ([], [], [], [])
    _collect(module, module.computations[name], *found)
    return Block(name, *(tuple(each) for each in found))


def _collect(module, computation: Computation, launched, exchanged, loops, choices):
    """Appends what a computation runs, and what it calls, to the four lists."""
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
    """The names of a conditional's computations."""
    several = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    if several:
        return [name.strip().lstrip("%") for name in several.split(",")]
    return [
        instruction.attribute(rf"{value}_computation=%?([\w.\-]+)")
        for value in ("false", "true")
    ]


def _collective(computation: Computation, instruction: Instruction) -> Collective:
    sources = [computation[a] for a in instruction.arguments if a in computation]
    source_bytes = sum(source.bytes for source in sources)
    # The result of these starts is a tuple of the arguments and the results to come.
    starts = instruction.opcode in ("all-gather-start", "collective-permute-start")
    result = instruction.bytes - (source_bytes if starts else 0)
    return Collective(
        kind=instruction.opcode.removesuffix("-start"),
        dtypes=frozenset(a.dtype for source in sources for a in source.arrays),
        bytes=max(source_bytes, result),
        group=_group(instruction),
        place=instruction.place,
    )


def _group(instruction: Instruction) -> tuple[int, ...]:
    """The devices of a collective's first group; () if the text names none.

    `replica_groups` has three notations: lists of devices, {{0,1},{2,3}}; axes of a
    mesh, mesh['a'=2,'b'=4] {'b'}; and a reshaped and transposed range,
    [2,4]<=[4,2]T(1,0). A permutation has `source_target_pairs` instead.
    """
    pairs = instruction.attribute(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
    if pairs:
        return _chain(pairs)
    written = instruction.attribute(r"replica_groups=\{\{([\d,]*)\}")
    if written:
        return tuple(int(n) for n in written.split(","))
    axes = instruction.attribute(r"replica_groups=mesh\[([^\]]*)\]")
    if axes:
        used = instruction.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}")
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        index = [slice(None) if f"'{name}'" in used else 0 for name in sizes]
        return tuple(np.ravel(numbers[tuple(index)]).tolist())
    match = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.line
    )
    if match is None:
        return ()
    shape, sizes = ([int(n) for n in part.split(",")] for part in match.groups()[:2])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if match[3]:
        numbers = numbers.transpose([int(n) for n in match[3].split(",")])
    return tuple(numbers.reshape(shape)[0].tolist())


def _chain(pairs: str) -> tuple[int, ...]:
    """The devices that the pairs {source,target} lead to, from the first source on."""
    target_of = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    found = [next(iter(target_of))]
    while (target := target_of.get(found[-1])) is not None and target not in found:
        found.append(target)
    return tuple(found)


# Queries of tests and reports ---------------------------------------------------------


def collectives_in_loops(program: Block) -> list[Collective]:
    """The collectives inside any loop, each once."""
    return [c for block in _blocks_in_loops(program) for c in block.collectives]


def copies_in_loops(program: Block, least: int) -> list[Kernel]:
    """The kernels inside any loop that only copy, and write `least` bytes or more."""
    return [
        kernel
        for block in _blocks_in_loops(program)
        for kernel in block.kernels
        if kernel.kind in ("copy", "copy-start") and kernel.written >= least
    ]


def _blocks_in_loops(program: Block) -> list[Block]:
    """The blocks inside any loop, each once although loops are nested."""
    blocks = (block for loop in program.all_loops() for block in loop.body.inside())
    return list({id(block): block for block in blocks}.values())


def fused_attention(block: Block) -> str | None:
    """Whose fused attention runs in the block, or any block within it."""
    kinds = [kernel.kind for inner in block.inside() for kernel in inner.kernels]
    for name, part_of_kind in _FUSED_ATTENTION.items():
        if any(part_of_kind in kind for kind in kinds):
            return name
    return None


def vocabulary_loops(program: Block, vocabulary: int) -> list[Loop]:
    """The innermost loops with a matrix product that has the vocabulary as a dimension.

    In the update they go over chunks of reply tokens, in a rollout over decode steps.
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
    """The collectives of more than `most` bytes within `vocabulary_loops`."""
    return [
        collective
        for loop in vocabulary_loops(program, vocabulary)
        for block in loop.body.inside()
        for collective in block.collectives
        if collective.bytes > most
    ]
