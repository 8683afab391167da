"""Kernels of a compiled program: bytes read and written, and operations.

A kernel reads its arguments and writes its results. Of an argument that it only slices
or gathers from, just those elements count; of one that it updates in place, just those
that change (reads.py). The workspace of a library's kernel does not count.
"""

import dataclasses
import math
import re

from ragen_jax.planning import reads
from ragen_jax.planning.hlo import Computation, Instruction, Module

# Opcodes that launch no kernel and move no data.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier iota"
    " partition-id replica-id async-done async-update copy-done domain".split()
)
_UPDATES = ("scatter", "dynamic-update-slice")
# A tuple of these is the results of one kernel; other tuples hold those of several.
_MAKES_TUPLES = ("fusion", "custom-call")
_CUDNN_ATTENTION = "fmhaSoftmax"  # in the target of a custom call
_LIBRARIES = ("__cublas", "__cudnn")  # The last result may be a workspace.


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch on the device."""

    name: str
    kind: str  # opcode, kind of fusion, or target of a custom call
    read: int  # bytes
    written: int  # bytes
    operations: float  # FLOP of matrix products and attention
    is_wide: bool  # whether a product has float32 inputs, which is slower
    place: str  # in the Python program: JAX's name stack
    has_product_of: frozenset[int]  # every dimension of inputs and results of products
    # For each argument, the kernel that wrote it and the bytes that are read of it.
    sources: tuple[tuple[str, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def is_kernel(instruction: Instruction) -> bool:
    """Whether the instruction makes the device do something."""
    return instruction.opcode not in _FREE


def measure(
    module: Module, computation: Computation, instruction: Instruction
) -> Kernel:
    """The kernel of an instruction for which `is_kernel` is true."""
    sources, written = _traffic(module, computation, instruction)
    products = list(_products(module, computation, instruction))
    return Kernel(
        name=instruction.name,
        kind=_kind(instruction),
        read=sum(size for _, size in sources),
        written=written,
        operations=sum(operations for operations, _, _ in products),
        is_wide=any(wide for _, wide, _ in products),
        place=instruction.place,
        has_product_of=frozenset(n for _, _, sizes in products for n in sizes),
        sources=sources,
    )


def _kind(instruction: Instruction) -> str:
    """The target of a custom call, the kind of a fusion, or else the opcode."""
    if instruction.opcode == "custom-call":
        return instruction.target
    if instruction.opcode != "fusion":
        return instruction.opcode
    backend = instruction.attribute(r'"kind":"(__\w+)"').strip("_")
    return backend or "fusion " + instruction.attribute(r"kind=k(\w+)").lower()


# Bytes -------------------------------------------------------------------------------


def _traffic(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[tuple[tuple[str, int], ...], int]:
    """What a kernel reads and writes.

    Returns:
      For each argument (the kernel that wrote it, bytes read), and the bytes written.
    """
    written, found = instruction.bytes - _not_written(instruction), []
    called = instruction.called
    inner = module.computations.get(called, {}) if called else {}
    parameters = _parameters(inner)
    needed = reads.needed_numbers(inner)
    for index, argument in enumerate(instruction.arguments):
        source = computation.get(argument)
        whole = source.bytes if source else 0
        used = whole
        if inner and index in parameters:
            name = parameters[index]
            unchanged = _unchanged_in_place(inner, name, whole)
            share = needed[name] / max(1, reads.size_of(inner[name]))
            used = 0 if unchanged is not None else math.ceil(whole * share)
            written -= unchanged or 0
        elif instruction.opcode in reads.SLICES and index == 0:
            used = min(whole, instruction.bytes)
        found.append((_writer(computation, argument), used))
    return tuple(found), max(written, 0)


def _not_written(instruction: Instruction) -> int:
    """Bytes of results that are not written.

    They are all but the first of an asynchronous copy, its source among them, and the
    workspace that a library's kernel has as its last result: for a product of cuBLAS
    32 MiB, of which it need not touch any.
    """
    if instruction.opcode == "copy-start":
        return sum(array.bytes for array in instruction.arrays[1:])
    is_library = instruction.target.startswith(_LIBRARIES)
    if not is_library or len(instruction.arrays) < 2:
        return 0
    last = instruction.arrays[-1]
    is_workspace = last.dtype in ("s8", "u8") and len(last.dimensions) == 1
    return last.bytes if is_workspace else 0


def _writer(computation: Computation, name: str) -> str:
    """The kernel that wrote a value, seen through bitcasts and tuples of its results.

    A value that comes from a loop's state is named by its get-tuple-element.
    """
    source = computation.get(name)
    while source and source.opcode in ("bitcast", "get-tuple-element"):
        before = computation.get(source.arguments[0])
        is_part = source.opcode == "get-tuple-element"
        if before is None or (is_part and before.opcode not in _MAKES_TUPLES):
            break
        name, source = source.arguments[0], before
    return name


def _parameters(inner: Computation) -> dict[int, str]:
    """The names of a computation's parameters by their numbers."""
    found = {}
    for name, instruction in inner.items():
        if instruction.opcode == "parameter":
            number = instruction.attribute(r"parameter\((\d+)\)")
            found[int(number)] = name
    return found


def _unchanged_in_place(inner: Computation, parameter: str, whole: int) -> int | None:
    """Bytes of a fusion's argument that an update in place leaves as they are.

    Args:
      inner: the fusion's computation.
      parameter: its instruction for the argument.
      whole: bytes of the argument.

    Returns:
      None if the argument is used for anything but updates in place.
    """
    names = {parameter}  # of the argument, under whatever shape
    for name, instruction in inner.items():  # Arguments come before their users.
        if instruction.opcode == "bitcast" and names & set(instruction.arguments):
            names.add(name)
    users = [
        user
        for user in inner.values()
        if user.opcode != "bitcast" and names & set(user.arguments)
    ]
    in_place = [u for u in users if u.opcode in _UPDATES and u.arguments[0] in names]
    if not in_place or len(in_place) < len(users):
        return None
    changed = 0
    for user in in_place:
        update = inner.get(user.arguments[-1 if user.opcode == "scatter" else 1])
        changed += update.bytes if update else 0
    return max(0, whole - changed)


# Operations --------------------------------------------------------------------------


def _products(module: Module, computation: Computation, instruction: Instruction):
    """Yields (FLOP, whether of float32, dimensions) for each product in a kernel."""
    if instruction.opcode == "dot":
        yield _dot(computation, instruction, "lhs_contracting_dims={", "}")
    elif instruction.opcode == "custom-call":
        if "gemm" in instruction.target or "matmul" in instruction.target:
            yield _dot(computation, instruction, '"lhs_contracting_dimensions":[', "]")
        elif _CUDNN_ATTENTION in instruction.target:
            yield _attention(computation, instruction)
    elif instruction.called:
        inner = module.computations.get(instruction.called, {})
        for each in inner.values():
            if each.opcode in ("dot", "custom-call", "fusion", "call"):
                yield from _products(module, inner, each)


def _dot(computation: Computation, instruction: Instruction, opening: str, end: str):
    """A matrix product, as `_products` yields it.

    The left argument's contracted dimensions are listed between `opening` and `end`.
    """
    listed = instruction.line.partition(opening)[2].partition(end)[0]
    contracted = [int(n) for n in re.findall(r"\d+", listed)]
    left = computation.get(instruction.arguments[0])
    right = computation.get(instruction.arguments[1])
    sizes = left.arrays[0].dimensions if left and left.arrays else ()
    depth = math.prod(sizes[index] for index in contracted if index < len(sizes))
    result = instruction.arrays[0]
    others = right.arrays[0].dimensions if right and right.arrays else ()
    is_wide = bool(left and left.arrays and left.arrays[0].dtype in ("f32", "f64"))
    return 2.0 * result.size * depth, is_wide, {*sizes, *others, *result.dimensions}


def _attention(computation: Computation, instruction: Instruction):
    """cuDNN's attention, as `_products` yields it.

    It has two products in the forward pass and five in the backward pass, each of
    2 * scores * features FLOP, of which a causal mask leaves half.
    """
    scores = instruction.attribute(
        r'"intermediate_tensor_shape":\s*\{"element_type":\s*"\w+",\s*"dimensions":'
        r"\s*\[([^\]]*)\]"
    )
    sizes = [int(n) for n in re.findall(r"\d+", scores)]
    query = computation.get(instruction.arguments[0])
    features = query.arrays[0].dimensions[-1] if query and query.arrays else 0
    products = 5 if "Backward" in instruction.target else 2
    share = 0.5 if "CAUSAL" in instruction.line else 1.0
    operations = 2.0 * products * math.prod(sizes) * features * share
    return operations if sizes else 0.0, False, set()
