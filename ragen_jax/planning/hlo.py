"""Parses optimized HLO text into computations, instructions and their shapes.

programs.py builds a tree of loops and kernels from it.
"""

import dataclasses
import functools
import math
import re

_WIDTHS = {  # bytes of one element, by HLO's name of the dtype
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\s*$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*index=\d+\*/")
_OPCODE = re.compile(r"([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"[ ,](?:calls|to_apply|called_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """The dtype and shape of one array."""

    dtype: str  # as HLO writes it: "bf16"
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """The size in bytes; 0 for what holds no data, such as a token."""
        return self.size * _WIDTHS.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # as in the text; a tuple's is in parentheses
    opcode: str
    arguments: tuple[str, ...]  # names of instructions of the same computation
    line: str  # the whole text of the instruction

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The result: one array, or those of a tuple."""
        return tuple(
            Array(dtype, tuple(int(n) for n in sizes.split(",") if n))
            for dtype, sizes in _ARRAY.findall(self.shape)
        )

    @functools.cached_property
    def bytes(self) -> int:
        """The size of the result in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def called(self) -> str | None:
        """The name of the computation that a fusion or a call runs."""
        match = _CALLS.search(self.line)
        return match[1] if match else None

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def place(self) -> str:
        """The part of the Python program it comes from: JAX's name stack."""
        return self.attribute(r'op_name="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern where it matches in the line; else ""."""
        match = re.search(pattern, self.line)
        return match[1] if match else ""


Computation = dict[str, Instruction]  # by name, in the order of the text


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parses the text that `jax.stages.Compiled.as_text` returns.

    Raises:
      ValueError: if it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.rstrip() == "}":  # A kernel's metadata may go on in a line with more.
            current = None
        elif line and not line.startswith(" "):
            if found := _COMPUTATION.match(line):
                current = computations[found[2]] = {}
                entry = found[2] if found[1] else entry
        elif current is not None and " = " in line:
            instruction = _instruction(_COMMENT.sub("", line.strip()))
            if instruction is not None:
                current[instruction.name] = instruction
    if not entry:
        raise ValueError("this is not an HLO module: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    """Parses `[ROOT] %name = shape opcode(arguments), attributes`."""
    left, right = line.split(" = ", 1)
    if right.startswith("("):
        end = _closing(right, 0) + 1
        shape, rest = right[:end], right[end:].strip()
    else:
        shape, _, rest = right.partition(" ")
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    start = opcode.end() - 1
    arguments = _NAME.findall(rest[start : _closing(rest, start)])
    name = left.removeprefix("ROOT ").lstrip("%")
    return Instruction(name, shape, opcode[1], tuple(arguments), line)


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        character = text[index]
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text) - 1
