"""The reply format as a finite automaton over bytes, built on the host.

It equals `reference_parser.parse_reply`, whose regular expression never has to
backtrack: a match begins at the first `<think>`, its thought ends at the first
`</think>` that only white space separates from `<answer>`, and it ends at the first
`</answer>` after that.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# What a byte emits: nothing; a segment ended that names no action; or, from 0 on, a
# segment ended that names this action.
NONE = -1
UNKNOWN = -2

THINK, END_THINK = b"<think>", b"</think>"
ANSWER, END_ANSWER = b"<answer>", b"</answer>"
WHITE = b" \t\n\r\v\f"  # Both of re's \s and of bytes.strip.
LESS, BAR = ord("<"), ord("|")
_MOST = 2**15  # states, whose numbers are stored as int16; emissions too


@dataclasses.dataclass(frozen=True)
class Automaton:
    """S states that read one byte at a time. Host arrays."""

    next_state: np.ndarray  # int32[S, 256]
    emission: np.ndarray  # int32[S, 256], NONE, UNKNOWN or an action
    is_answer: np.ndarray  # bool[S], the text of the answer has begun and not ended
    start: int  # the state after the prompt's prefix
    closed: int  # the state after `</answer>`, which is never left


def build_automaton(
    action_names: Sequence[str], prefix: bytes, thinking: bool
) -> Automaton:
    """The smallest automaton that reads replies after `prefix`.

    Raises:
      ValueError: if the names are ambiguous inside a reply, or too many or too long, or
        `prefix` already holds a whole segment of an answer.
    """
    names = _read_names(action_names)
    # No two beginnings of names are equal to what follows, nor are names whose `|` or
    # beginning of `</answer>` has been read.
    least = len(names.beginnings) + len(END_ANSWER) * len(action_names)
    check_count("states", least, len(action_names))
    start = _State("seek think" if thinking else "seek answer")
    for byte in prefix:
        start, emitted = _read(start, byte, names)
        if emitted != NONE:
            raise ValueError(
                f"the prompt's prefix {prefix!r} already holds a segment of an"
                " answer: end it in <think> or <answer>"
            )
    merged = _merge_equal(*_explore(start, names))
    _, of_byte = _classes(names)
    return dataclasses.replace(
        merged,
        next_state=merged.next_state[:, of_byte],
        emission=merged.emission[:, of_byte],
    )


def check_count(what: str, count: int, names: int) -> None:
    """Raises ValueError if so many names give more states or emissions than can be."""
    if count > _MOST:
        raise ValueError(
            f"{names} action names give at least {count} {what} of a reply, more than"
            f" {_MOST}: use fewer or shorter names"
        )


def holds_answer(prefix: bytes, thinking: bool) -> bool:
    """Whether a prompt's prefix goes on behind the `<answer>` of the form."""
    names = _read_names(())
    state = _State("seek think" if thinking else "seek answer")
    for byte in prefix:
        if state.phase in _OF_ANSWER or state == _CLOSED:
            return True
        state, _ = _read(state, byte, names)
    return False


class _Names(NamedTuple):
    action_of: dict[bytes, int]  # by lower-case name
    beginnings: frozenset[bytes]  # every prefix of every name

    def alphabet(self) -> set[int]:
        """The bytes that any state tells apart; all others act alike."""
        tags = THINK, END_THINK, ANSWER, END_ANSWER, WHITE, bytes([LESS, BAR])
        spelled = [cased for name in self.action_of for cased in (name, name.upper())]
        return set(b"".join([*tags, *spelled]))


def _read_names(action_names: Sequence[str]) -> _Names:
    names = [name.encode().strip().lower() for name in action_names]
    times = collections.Counter(names)
    for name in names:
        if not name or times[name] > 1 or any(c in name for c in b"<|>"):
            raise ValueError(
                f"action names {tuple(action_names)} hold one that is empty, repeated"
                f" but for case, or contains one of < | >: rename {name.decode()!r}"
            )
    return _Names(
        action_of={name: action for action, name in enumerate(names)},
        beginnings=frozenset(
            name[:end] for name in names for end in range(len(name) + 1)
        ),
    )


class _Segment(NamedTuple):
    """The part of the answer since the last `||`."""

    text: bytes | None  # lower case, no leading white space; None: no name's prefix
    verdict: int  # what to emit if the segment ends here


_EMPTY = _Segment(b"", NONE)
_NO_ACTION = _Segment(None, UNKNOWN)


class _State(NamedTuple):
    phase: str
    matched: int = 0  # bytes of the phase's tag that the text so far ends in
    segment: _Segment = _EMPTY  # of the answer, without a pending `|` or `<`


_CLOSED = _State("closed")
_OF_ANSWER = ("segment", "bar", "closing")  # phases between the answer's tags


def _read(state: _State, byte: int, names: _Names) -> tuple[_State, int]:
    """One step: the next state and what the byte emits."""
    match state.phase:
        case "seek think":
            return _seek(THINK, state, byte, found=_State("thought")), NONE
        case "seek answer":
            return _seek(ANSWER, state, byte, found=_State("segment")), NONE
        case "thought":
            return _seek(END_THINK, state, byte, found=_State("gap")), NONE
        case "gap":
            return _read_gap(state, byte), NONE
        case phase if phase in _OF_ANSWER:
            return _read_answer(state, byte, names)
        case _:
            return _CLOSED, NONE


def _seek(tag: bytes, state: _State, byte: int, found: _State) -> _State:
    """Searches for `tag`. Tags hold `<` only in front, so nothing else can restart."""
    if byte != tag[state.matched]:
        return state._replace(matched=int(byte == LESS))
    if state.matched + 1 < len(tag):
        return state._replace(matched=state.matched + 1)
    return found


def _read_gap(state: _State, byte: int) -> _State:
    """Between `</think>` and the end of `<answer>`: white space, then the tag."""
    if state.matched == 0 and byte in WHITE:
        return state
    if byte == ANSWER[state.matched]:
        return _seek(ANSWER, state, byte, found=_State("segment"))
    # Not an answer: all of this was thought. Of what the gap matched, only a lone `<`
    # can also begin the next `</think>`.
    thought = _State("thought", matched=int(state.matched == 1))
    return _seek(END_THINK, thought, byte, found=_State("gap"))


def _read_answer(state: _State, byte: int, names: _Names) -> tuple[_State, int]:
    """Inside the answer. A `|` or `<` that starts no `||` or `</answer>` is text."""
    segment = state.segment
    if state.phase == "bar":
        if byte == BAR:
            return _State("segment"), segment.verdict
        segment = _NO_ACTION
    if state.phase == "closing":
        if byte == END_ANSWER[state.matched]:
            closing = _seek(END_ANSWER, state, byte, found=_CLOSED)
            return closing, segment.verdict if closing == _CLOSED else NONE
        segment = _NO_ACTION

    # If the `|` or `<` turns out to be text, the segment is no name: no text is needed.
    ended = segment._replace(text=None)
    if byte == BAR:
        return _State("bar", segment=ended), NONE
    if byte == LESS:
        return _State("closing", matched=1, segment=ended), NONE
    return _State("segment", segment=_extend(segment, byte, names)), NONE


def _extend(segment: _Segment, byte: int, names: _Names) -> _Segment:
    """Adds a byte that is neither `|` nor `<`."""
    if byte in WHITE and not segment.text:
        return segment  # Leading white space, or trailing where no name continues.
    if segment.text is None:
        return _NO_ACTION
    text = segment.text + bytes([byte]).lower()
    verdict = names.action_of.get(text.rstrip(WHITE), UNKNOWN)
    return _Segment(text if text in names.beginnings else None, verdict)


def _classes(names: _Names) -> tuple[list[int], np.ndarray]:
    """C bytes, the first of each class, and int[256], the class of every byte.

    Bytes of a class lead to the same states: of 256 columns, two dozen tell long names
    apart.
    """
    alphabet = names.alphabet()
    others = [byte for byte in range(256) if byte not in alphabet]
    first = sorted(alphabet | set(others[:1]))
    of_byte = np.full(256, first.index(others[0]) if others else 0)
    of_byte[first] = np.arange(len(first))
    return first, of_byte


def _explore(start: _State, names: _Names) -> tuple[Automaton, np.ndarray]:
    """Numbers every state that some reply leads to, `start` and closed first.

    Its arrays have a column for each of `_classes`, not for each byte.

    Returns:
      The automaton, and int[S], for `_merge_equal`: of two states with different
      numbers it is known that they are not equal.
    """
    index_of = {start: 0}
    index_of.setdefault(_CLOSED, len(index_of))
    next_state, emission = [], []
    todo = list(index_of)
    bytes_read, _ = _classes(names)
    for state in todo:  # Grows while it is read.
        steps = [_read(state, byte, names) for byte in bytes_read]
        for reached, _ in steps:
            if reached not in index_of:
                index_of[reached] = len(index_of)
                todo.append(reached)
        next_state.append([index_of[reached] for reached, _ in steps])
        emission.append([emitted for _, emitted in steps])
    # What is missing of a name leads to its action from one beginning alone.
    unfinished = {beginning[:-1] for beginning in names.beginnings if beginning}
    number_of: dict[bytes | None, int] = {
        text: number for number, text in enumerate(sorted(unfinished))
    }
    known = np.array([number_of.get(s.segment.text, -1) for s in todo])
    explored = Automaton(
        next_state=np.array(next_state, np.int32),
        emission=np.array(emission, np.int32),
        is_answer=np.array([s.phase in _OF_ANSWER for s in todo]),
        start=index_of[start],
        closed=index_of[_CLOSED],
    )
    return explored, known


def _merge_equal(automaton: Automaton, known: np.ndarray) -> Automaton:
    """Joins states that no continuation distinguishes (Moore's refinement).

    Args:
      automaton: whose states these are.
      known: int[S], different only for states that are not equal. By outputs alone
        long names would be told apart one letter a round.
    """
    is_closed = np.arange(len(automaton.next_state)) == automaton.closed
    outputs = [is_closed, automaton.is_answer, known, automaton.emission]
    group, count = _group_rows(np.column_stack(outputs))
    while True:
        by_successors = np.column_stack([group, group[automaton.next_state]])
        group, refined = _group_rows(by_successors)
        if refined == count:
            break
        count = refined
    member = np.unique(group, return_index=True)[1]  # One state of each group.
    return Automaton(
        next_state=group[automaton.next_state[member]].astype(np.int32),
        emission=automaton.emission[member],
        is_answer=automaton.is_answer[member],
        start=int(group[automaton.start]),
        closed=int(group[automaton.closed]),
    )


def _group_rows(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """int[S], equal numbers for equal rows, and how many numbers there are."""
    unique, group = np.unique(rows, axis=0, return_inverse=True)
    return group.reshape(-1), len(unique)
