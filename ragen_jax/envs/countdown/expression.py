"""Parses and judges Countdown answers: `read_text` in Python, `read_bytes` on device.

The two give the same verdicts; `read_text` defines them. The grammar:

  answer     = sum [ "=" [ "-" ] digits ]
  sum        = [ "-" ] product { ( "+" | "-" ) product }
  product    = factor { ( "*" | "/" ) factor }
  factor     = digits | "(" sum ")"

evaluated from left to right, with ASCII white space anywhere but within a number. Other
texts cannot be read. A text that can be read is refused if it uses a number that is not
given, or uses one too often; if it divides by 0 or with a remainder; if the absolute
value of a result is above LIMIT; or if the number behind "=" is not the sum's value.
"""

import collections
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.base import NO_ACTION

ANSWER_BYTES = 64
LIMIT = 10**6  # on the absolute value of every result
REFUSED, OTHER, TARGET = range(3)  # verdicts on answers that can be read


class _UnreadableError(Exception):
    """The text is no answer."""


def read_text(
    text: bytes, numbers: Sequence[int], target: int, use_all: bool = False
) -> int:
    """The verdict on a text.

    Args:
      text: any bytes.
      numbers: those given, each to be used at most once; zeros are padding.
      target: the value that the answer should have.
      use_all: whether every number given must be used.

    Returns:
      REFUSED, OTHER (a legal answer of another value), TARGET, or NO_ACTION for a text
      that cannot be read.
    """
    if len(text) > ANSWER_BYTES:
        return NO_ACTION
    tokens = collections.deque([*re.findall(rb"[0-9]+|\S", text), b""])
    used_numbers: list[int] = []
    try:
        value = _read_sum(tokens, used_numbers)
        claimed = _read_claim(tokens)
    except _UnreadableError:
        return NO_ACTION
    available = collections.Counter(number for number in numbers if number)
    is_used_well = not collections.Counter(used_numbers) - available
    if use_all:
        is_used_well &= len(used_numbers) == available.total()
    if not is_used_well or value is None or claimed not in (None, value):
        return REFUSED
    return TARGET if value == target else OTHER


def _read_sum(tokens: collections.deque[bytes], used: list[int]) -> int | None:
    """Takes a sum off the tokens: its value, or None if it is refused."""
    value: int | None = 0
    operator = tokens.popleft() if tokens[0] == b"-" else b"+"
    while True:
        value = _apply(operator, value, _read_product(tokens, used))
        if tokens[0] not in (b"+", b"-"):
            return value
        operator = tokens.popleft()


def _read_product(tokens: collections.deque[bytes], used: list[int]) -> int | None:
    value = _read_factor(tokens, used)
    while tokens[0] in (b"*", b"/"):
        value = _apply(tokens.popleft(), value, _read_factor(tokens, used))
    return value


def _read_factor(tokens: collections.deque[bytes], used: list[int]) -> int | None:
    token = tokens.popleft()
    if token.isdigit():
        used.append(int(token))
        return used[-1]
    if token != b"(":
        raise _UnreadableError
    value = _read_sum(tokens, used)
    if tokens.popleft() != b")":
        raise _UnreadableError
    return value


def _read_claim(tokens: collections.deque[bytes]) -> int | None:
    """Takes all that is left off the tokens: the number behind "=", or None."""
    token = tokens.popleft()
    if not token:
        return None
    if token != b"=":
        raise _UnreadableError
    sign = 1
    if tokens[0] == b"-":
        tokens.popleft()
        sign = -1
    digits = tokens.popleft()
    if not digits.isdigit() or tokens.popleft():
        raise _UnreadableError
    return sign * int(digits)


def _apply(operator: bytes, left: int | None, right: int | None) -> int | None:
    """The result of one operation, or None if it is refused."""
    if left is None or right is None:
        return None
    if operator == b"/":
        if right == 0 or left % right:
            return None
        return left // right
    result = {b"+": left + right, b"-": left - right, b"*": left * right}[operator]
    return result if abs(result) <= LIMIT else None


# On device: the same in one pass over the bytes. Each open parenthesis has a frame with
# what has been read of its sum: total + sign * (term times, or divided by, the rest).

_DEPTH = ANSWER_BYTES // 2  # An answer has no room to close more parentheses.
# What may come next: an operand at a start (also "-"), an operand, or an operator.
_START, _OPERAND, _OPERATOR = range(3)
_SPACES = tuple(b" \t\n\r\x0b\x0c")


@struct.dataclass
class _Frame:
    total: jax.Array  # int32[], of the products before the current one
    sign: jax.Array  # int32[], 1 or -1, of the current product
    term: jax.Array  # int32[], the current product so far
    divides: jax.Array  # bool[], whether the next factor divides it


@struct.dataclass
class _Reader:
    """The state of the parser between two bytes. Scalars unless a shape is given."""

    frame: _Frame  # of the innermost open parenthesis
    outer: _Frame  # leaves [_DEPTH], the frames around it
    depth: jax.Array  # int32, open parentheses
    number: jax.Array  # int32, value of the digits just read, -1 outside a number
    expects: jax.Array  # int32, _START, _OPERAND or _OPERATOR
    used: jax.Array  # bool[N], which given numbers have been used; True for padding
    claims: jax.Array  # bool, whether "=" has been read
    value: jax.Array  # int32, value of the sum before "="
    is_readable: jax.Array  # bool, whether the text so far follows the grammar
    is_allowed: jax.Array  # bool, whether nothing so far makes the verdict REFUSED


def read_bytes(
    text: jax.Array,
    length: jax.Array,
    numbers: jax.Array,
    target: jax.Array,
    use_all: bool = False,
) -> jax.Array:
    """int32[], what `read_text` returns for the same text.

    Args:
      text: uint8[ANSWER_BYTES].
      length: int32[], the bytes that count.
      numbers: int32[N], each from 1 to LIMIT, padded with 0.
      target: int32[].
      use_all: static; whether every number given must be used.
    """
    place = jnp.arange(ANSWER_BYTES)
    padded = jnp.where(place < length, text.astype(jnp.int32), ord(" "))
    reader, _ = jax.lax.scan(
        lambda reader, byte: (_read_byte(reader, byte, numbers), None),
        _new_reader(numbers),
        padded,
    )
    reader = _end_number(reader, numbers, jnp.ones((), bool))
    last, fits = _sum(reader.frame)
    value = jnp.where(reader.claims, reader.value, last)
    is_readable = (
        reader.is_readable & (reader.expects == _OPERATOR) & (reader.depth == 0)
    )
    is_allowed = reader.is_allowed & fits & (value == last)
    if use_all:
        is_allowed &= reader.used.all()
    verdict = jnp.where(value == target, TARGET, OTHER)
    verdict = jnp.where(is_allowed, verdict, REFUSED)
    return jnp.where(is_readable, verdict, NO_ACTION).astype(jnp.int32)


def _new_frame() -> _Frame:
    """A sum of which nothing has been read: 0 + 1 * (1 times the rest)."""
    zero, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    return _Frame(total=zero, sign=one, term=one, divides=jnp.zeros((), bool))


def _new_reader(numbers: jax.Array) -> _Reader:
    frame, zero = _new_frame(), jnp.zeros((), jnp.int32)
    return _Reader(
        frame=frame,
        outer=jax.tree.map(lambda leaf: jnp.full((_DEPTH,), leaf), frame),
        depth=zero,
        number=zero - 1,
        expects=zero + _START,
        used=numbers == 0,
        claims=jnp.zeros((), bool),
        value=zero,
        is_readable=jnp.ones((), bool),
        is_allowed=jnp.ones((), bool),
    )


def _read_byte(reader: _Reader, byte: jax.Array, numbers: jax.Array) -> _Reader:
    """Reads one byte. One that may not stand here only makes the text unreadable."""
    is_digit = (byte >= ord("0")) & (byte <= ord("9"))
    reader = _end_number(reader, numbers, ~is_digit)
    is_in_number, depth = reader.number >= 0, reader.depth
    awaits_operator = reader.expects == _OPERATOR
    in_sum = awaits_operator & ~reader.claims  # where an operator may stand
    is_minus, is_slash = byte == ord("-"), byte == ord("/")
    continues = is_digit & (is_in_number | ~awaits_operator)
    negates = is_minus & (reader.expects == _START) & ~is_in_number
    opens = (byte == ord("(")) & ~awaits_operator & ~reader.claims & (depth < _DEPTH)
    closes = (byte == ord(")")) & awaits_operator & (depth > 0)
    adds = (is_minus | (byte == ord("+"))) & in_sum
    scales = (is_slash | (byte == ord("*"))) & in_sum
    equates = (byte == ord("=")) & in_sum & (depth == 0)
    is_space = (byte == jnp.array(_SPACES)).any()
    is_known = continues | negates | opens | closes | adds | scales | equates | is_space

    total, fits = _sum(reader.frame)
    around = jax.tree.map(lambda leaf: leaf[jnp.maximum(depth - 1, 0)], reader.outer)
    closed, is_exact = _scale(around, total)
    # A new frame after "(", "=" and each sign; below, the enclosing one after ")".
    frame = _choose(opens | equates | adds | negates, _new_frame(), reader.frame)
    frame = frame.replace(
        total=jnp.where(adds, total, frame.total),
        sign=jnp.where((adds | negates) & is_minus, -1, frame.sign),
        divides=jnp.where(scales, is_slash, frame.divides),
    )
    is_pushed = opens & (jnp.arange(_DEPTH) == depth)
    digits = jnp.maximum(reader.number, 0) * 10 + byte - ord("0")
    starts = opens | equates
    expects = jnp.where(negates | adds | scales, _OPERAND, reader.expects)
    return reader.replace(
        frame=_choose(closes, closed, frame),
        outer=_choose(is_pushed, reader.frame, reader.outer),
        depth=depth + opens - closes,
        number=jnp.where(continues, jnp.minimum(digits, LIMIT + 1), reader.number),
        expects=jnp.where(starts, _START, expects),
        claims=reader.claims | equates,
        value=jnp.where(equates, total, reader.value),
        is_readable=reader.is_readable & is_known,
        is_allowed=reader.is_allowed
        & (fits | ~(adds | closes | equates))
        & (is_exact | ~closes),
    )


def _end_number(reader: _Reader, numbers: jax.Array, is_at_end: jax.Array) -> _Reader:
    """Where a number has just ended, marks it as used and applies it to the term."""
    ends = is_at_end & (reader.number >= 0)
    is_match = (numbers == reader.number) & ~reader.used
    is_taken = is_match & (jnp.arange(len(numbers)) == jnp.argmax(is_match))
    frame, is_exact = _scale(reader.frame, reader.number)
    is_allowed = is_exact & (is_match.any() | reader.claims)
    return reader.replace(
        frame=_choose(ends, frame, reader.frame),
        number=jnp.where(ends, -1, reader.number),
        expects=jnp.where(ends, _OPERATOR, reader.expects),
        used=reader.used | (is_taken & ends & ~reader.claims),
        is_allowed=reader.is_allowed & (is_allowed | ~ends),
    )


def _sum(frame: _Frame) -> tuple[jax.Array, jax.Array]:
    """The frame's sum, int32[], 0 if it is beyond LIMIT; bool[], whether it is not."""
    total = frame.total + frame.sign * frame.term
    fits = jnp.abs(total) <= LIMIT
    return jnp.where(fits, total, 0), fits


def _scale(frame: _Frame, factor: jax.Array) -> tuple[_Frame, jax.Array]:
    """The frame with one more factor, int32[]; bool[], whether that is allowed."""
    divisor = jnp.where(factor == 0, 1, factor)
    is_exact = (factor != 0) & (frame.term % divisor == 0)
    # Keeps |term| <= LIMIT. A product beyond it, which might overflow, is dropped.
    fits = jnp.abs(factor) <= LIMIT // jnp.maximum(jnp.abs(frame.term), 1)
    is_allowed = jnp.where(frame.divides, is_exact, fits)
    term = jnp.where(frame.divides, frame.term // divisor, frame.term * factor)
    return frame.replace(term=jnp.where(is_allowed, term, 0)), is_allowed


def _choose(condition: jax.Array, yes: _Frame, no: _Frame) -> _Frame:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
