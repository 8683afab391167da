"""The meaning of a reply in plain host Python, which `reply_parser.py` must equal."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

WITH_THOUGHT = re.compile(
    rb"<think>(?:.*?)</think>\s*<answer>(?P<answer>.*?)</answer>", re.DOTALL
)
WITHOUT_THOUGHT = re.compile(rb"<answer>(?P<answer>.*?)</answer>", re.DOTALL)
SEPARATOR = b"||"


@dataclasses.dataclass(frozen=True)
class ParsedReply:
    """One reply, read to its end."""

    actions: tuple[int, ...]  # the first known actions, at most `max_actions`
    is_valid: bool  # closed, at least one known action and nothing unknown
    is_closed: bool  # the reply has the whole form, `</answer>` included


_NOT_CLOSED = ParsedReply(actions=(), is_valid=False, is_closed=False)


def parse_reply(
    prefix: bytes,
    reply: bytes,
    action_names: Sequence[str],
    max_actions: int,
    thinking: bool = True,
) -> ParsedReply:
    """Reads the actions out of a reply; text after `</answer>` is ignored.

    Segments between `||` are compared without outer ASCII white space and without
    ASCII case; empty ones do not count. Unknown segments make a reply invalid but
    known actions beside them are still carried out.

    Args:
      prefix: what the prompt already wrote of the reply, ending in `<think>`, or in
        `<answer>` without thinking.
      reply: the bytes of the sampled tokens; special tokens give none.
      action_names: action a is called `action_names[a]`.
      max_actions: how many actions one turn carries out; further ones are dropped
        and do not make the reply invalid.
      thinking: whether the form has a `<think>` part before the answer.
    """
    answer = _find_answer(prefix + reply, thinking)
    if answer is None:
        return _NOT_CLOSED
    action_of = {
        name.encode().strip().lower(): action
        for action, name in enumerate(action_names)
    }
    segments = _segments(answer)
    actions = [action_of[segment] for segment in segments if segment in action_of]
    return ParsedReply(
        actions=tuple(actions[:max_actions]),
        is_valid=0 < len(actions) == len(segments),
        is_closed=True,
    )


def parse_free_form(
    prefix: bytes,
    reply: bytes,
    read_action: Callable[[bytes], int],
    answer_bytes: int,
    max_actions: int,
    thinking: bool = True,
) -> ParsedReply:
    """Reads a reply of free-form answers; see `base.Environment.read_action`.

    As `parse_reply`, but only the first `max_actions` segments that are not empty are
    read at all, and an answer of more than `answer_bytes` bytes has none.

    Args:
      prefix, reply: as for `parse_reply`.
      read_action: the action that a segment means, stripped and in lower case;
        negative where it means none.
      answer_bytes: the longest answer that can be read.
      max_actions, thinking: as for `parse_reply`.
    """
    answer = _find_answer(prefix + reply, thinking)
    if answer is None:
        return _NOT_CLOSED
    if len(answer) > answer_bytes:
        return ParsedReply(actions=(), is_valid=False, is_closed=True)
    segments = _segments(answer)[:max_actions]
    segment_actions = [read_action(segment) for segment in segments]
    # The first number of an action of several says whether it is one.
    actions = tuple(action for action in segment_actions if np.ravel(action)[0] >= 0)
    return ParsedReply(
        actions=actions, is_valid=0 < len(actions) == len(segments), is_closed=True
    )


def _find_answer(text: bytes, thinking: bool) -> bytes | None:
    """What stands within the answer's tags; None without the whole form."""
    match = (WITH_THOUGHT if thinking else WITHOUT_THOUGHT).search(text)
    return None if match is None else match["answer"]


def _segments(answer: bytes) -> list[bytes]:
    parts = [part.strip().lower() for part in answer.split(SEPARATOR)]
    return [part for part in parts if part]
