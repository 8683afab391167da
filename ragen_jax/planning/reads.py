"""How much a kernel reads: of a fusion's arguments, and of what a cache still holds."""

import collections
from collections.abc import Sequence

from ragen_jax.planning.hlo import Computation, Instruction

_TAKES = ("slice", "dynamic-slice", "gather")  # part of their first argument
_JOINS = ("concatenate", "pad", "broadcast")


def needed_numbers(inner: Computation) -> dict[str, float]:
    """How many numbers of each instruction of a fusion its result needs, by name.

    From the result back to the arguments: elementwise operations need as many of each
    argument as are needed of them, slices no more than they give, sums along an
    axis all along it. What several need adds up, to the whole at most: it is an upper
    bound.
    """
    needed: dict[str, float] = collections.defaultdict(float)
    for name, instruction in reversed(inner.items()):  # Users stand behind.
        if instruction.line.startswith("ROOT "):
            needed[name] = size_of(instruction)
        needed[name] = min(needed[name], size_of(instruction))
        for index, argument in enumerate(instruction.arguments):
            source = inner.get(argument)
            if source is not None and needed[name]:
                needed[argument] += _from(instruction, index, source, needed[name])
    return needed


def size_of(instruction: Instruction) -> int:
    """Numbers in a result, of all arrays of a tuple."""
    return sum(array.size for array in instruction.arrays)


def _from(user: Instruction, index: int, source: Instruction, wanted: float) -> float:
    """Numbers of an argument behind so many of a result."""
    whole, result = size_of(source), size_of(user)
    if user.opcode in _TAKES:
        return min(whole, wanted) if index == 0 else whole
    if user.opcode in _JOINS or whole == result:
        return min(whole, wanted)
    if user.opcode == "reduce" and index < len(user.arguments) // 2:
        return min(whole, wanted * whole / user.arrays[0].size)
    return whole


def from_cache(kernels: Sequence, capacity: float) -> list[float]:
    """Bytes of each kernel's reads that were touched so lately that a cache holds them.

    What was used longest ago goes first: a read is a hit where no more than `capacity`
    bytes were moved since its value was last written or read, itself included.

    Args:
      kernels: `kernels.Kernel`, in the order in which they run.
      capacity: bytes of the cache.
    """
    moved = 0.0
    touched: dict[str, tuple[float, float]] = {}  # by name: (moved by then, bytes)
    hits = []
    for kernel in kernels:
        hit = 0.0
        for name, size in kernel.sources:
            when, known = touched.get(name, (0.0, 0.0))
            if known and moved - when + size <= capacity:
                hit += min(size, known)
        hits.append(hit)
        moved += kernel.bytes
        for name, size in kernel.sources:
            touched[name] = (moved, size)
        touched[kernel.name] = (moved, kernel.written)
    return hits
