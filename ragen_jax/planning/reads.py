"""How much a kernel reads: of a fusion's arguments, and of what the L2 cache holds."""

import collections
from collections.abc import Sequence

from ragen_jax.planning.hlo import Computation, Instruction

SLICES = ("slice", "dynamic-slice", "gather")  # read part of their first argument
_COPIES = ("concatenate", "pad", "broadcast")  # results hold elements of arguments


def needed_numbers(inner: Computation) -> dict[str, float]:
    """How many elements of each instruction of a fusion its result depends on, by name.

    Goes from the result back to the arguments. To get n elements, an elementwise
    operation or a slice needs n of its argument, a reduction n times those that it
    reduces to one. The needs of several users are summed, up to the whole array, so
    this is an upper bound.
    """
    needed: dict[str, float] = collections.defaultdict(float)
    for name, instruction in reversed(inner.items()):  # Users before their arguments.
        if instruction.line.startswith("ROOT "):
            needed[name] = size_of(instruction)
        needed[name] = min(needed[name], size_of(instruction))
        for index, argument in enumerate(instruction.arguments):
            source = inner.get(argument)
            if source is not None and needed[name]:
                needed[argument] += _of_argument(
                    instruction, index, source, needed[name]
                )
    return needed


def size_of(instruction: Instruction) -> int:
    """The number of elements of a result, summed over the arrays of a tuple."""
    return sum(array.size for array in instruction.arrays)


def _of_argument(
    user: Instruction, index: int, source: Instruction, wanted: float
) -> float:
    """How many elements of an argument are needed for `wanted` ones of a result.

    Args:
      user: the instruction with that result.
      index: of the argument among the user's.
      source: the instruction that computes the argument.
      wanted: elements of the result.
    """
    whole, result = size_of(source), size_of(user)
    if user.opcode in SLICES:  # The other arguments are indices.
        return min(whole, wanted) if index == 0 else whole
    if user.opcode in _COPIES or whole == result:
        return min(whole, wanted)
    if user.opcode == "reduce" and index < len(user.arguments) // 2:
        return min(whole, wanted * whole / user.arrays[0].size)
    return whole


def from_cache(kernels: Sequence, capacity: float) -> list[float]:
    """Bytes that each kernel reads from a cache with least-recently-used eviction.

    A read is a hit if at most `capacity` bytes were moved since the value was last
    written or read, its own bytes included.

    Args:
      kernels: `kernels.Kernel`, in the order in which they run.
      capacity: bytes of the cache.
    """
    moved = 0.0  # bytes so far
    # By name of the kernel that wrote a value: (`moved` at its last use, its bytes).
    touched: dict[str, tuple[float, float]] = {}
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
