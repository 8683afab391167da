"""Reads compiled programs (optimized HLO text) for tests."""

import math
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast)(-start)?\("
)
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|branch_computations|true_computation"
    r"|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)


def loops_that_carry(text: str, shape: tuple[int, ...]) -> list[list[str]]:
    """For each while loop that carries an array of so many numbers as `shape`: all
    instructions within its body, however deep, whose result has that many.
    """
    computations = _split(text)
    size = math.prod(shape)
    bodies = {
        body
        for lines in computations.values()
        for line in lines
        if (found := re.search(r"= (\(.*?\)) while\(.*body=%([\w.\-]+)", line))
        for carried, body in [found.groups()]
        if size in _sizes(carried)
    }
    return [
        [
            line
            for name in _reached(computations, body)
            for line in computations[name]
            if _sizes(line.split(" = ", 1)[-1].split("(", 1)[0]) == [size]
        ]
        for body in sorted(bodies)
    ]


def collectives_in_loops(text: str) -> list[str]:
    """All instructions, within the body of any loop, that exchange between devices."""
    computations = _split(text)
    bodies = set(re.findall(r" while\(.*body=%([\w.\-]+)", text))
    reached = {name for body in bodies for name in _reached(computations, body)}
    lines = [line for name in sorted(reached) for line in computations[name]]
    return [line for line in lines if _COLLECTIVE.search(line)]


def _split(text: str) -> dict[str, list[str]]:
    computations, lines = {}, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations[found[1]] = []
        elif line.startswith(" "):
            lines.append(line.strip())
    return computations


def _sizes(shapes: str) -> list[int]:
    return [
        math.prod(int(n) for n in dimensions.split(",") if n)
        for dimensions in _SHAPE.findall(shapes)
    ]


def _reached(computations: dict[str, list[str]], start: str) -> list[str]:
    todo = [start]
    for name in todo:  # Grows while it is read.
        for line in computations[name]:
            for group in _CALLED.findall(line):
                called = re.findall(r"%([\w.\-]+)", group)
                todo += [other for other in called if other not in todo]
    return todo
