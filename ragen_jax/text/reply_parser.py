"""Replies to actions on device, token by token while they are being sampled.

The reply format is a byte automaton (`reply_automaton.py`); composed with the bytes of
the tokenizer it becomes one table lookup per token. The result equals
`reference_parser.parse_reply` on the bytes of the same tokens.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs.base import NO_ACTION  # Fills lists of actions.
from ragen_jax.text.reply_automaton import (
    NONE,
    UNKNOWN,
    Automaton,
    build_automaton,
    check_count,
    holds_answer,
)

_BLOCK = 4096  # Tokens composed at a time, so that the work stays in cache.


@struct.dataclass
class ReplyTables:
    """How V tokens act on the S states of the reply automaton.

    In a state a token emits one of U emissions, by id: the known actions whose segments
    end inside the token, at most E of them, and whether an unknown segment ends there.
    Emission 0 is empty.
    """

    next_state: jax.Array  # int16[S, V], the state after a token
    emission: jax.Array  # int16[S, V], 0..U-1, what the token emits in that state
    emitted_actions: jax.Array  # int32[U, E], in the order of the text, then NO_ACTION
    emitted_count: jax.Array  # int32[U], how many of them are actions, 0..E
    emits_unknown: jax.Array  # bool[U], a segment that names no action ended, too
    is_answer: jax.Array  # bool[S], the answer's text has begun, and may have ended
    start: jax.Array  # int32[], the state after the prompt's prefix
    closed: jax.Array  # int32[], the state after `</answer>`; no token leaves it
    # If the text is read: of free-form answers, or of thoughts for their landmarks.
    text: "TextTables | None" = None


@struct.dataclass
class TextTables:
    """Bytes of tokens, and where in a token an answer begins; see free_form.py."""

    token_bytes: jax.Array  # uint8[V, L], 0 behind a token's end
    token_length: jax.Array  # int32[V], bytes of each token
    # int16[S, V], if the answer's text begins inside the token (or right after it), how
    # many of its bytes come before; else -1.
    answer_begin: jax.Array


@struct.dataclass
class ReplyState:
    """One reply, read up to some token."""

    state: jax.Array  # int32[], index into the S states
    actions: jax.Array  # int32[A], known actions so far, then NO_ACTION
    count: jax.Array  # int32[], how many they are; further ones are dropped
    has_unknown: jax.Array  # bool[], some segment so far names no action
    thought: jax.Array  # int32[], tokens before the one that the answer begins in
    bytes: jax.Array  # int32[], of all tokens so far; 0 without `ReplyTables.text`
    answer_at: jax.Array  # int32[], bytes before the answer's text; -1: not begun


def reply_tables(
    token_bytes: Sequence[bytes],
    action_names: Sequence[str],
    prefix: bytes,
    thinking: bool,
    *,
    with_text: bool = False,
) -> ReplyTables:
    """Builds the tables on the host.

    Args:
      token_bytes: V byte strings, from `token_bytes.token_bytes`.
      action_names: action a is called `action_names[a]`; case does not matter.
      prefix: what the prompt already wrote of the reply, ending in `<think>`, or in
        `<answer>` without thinking.
      thinking: whether replies have a `<think>` part before the answer.
      with_text: whether the text of replies is to be found, too; see free_form.py,
        which reads answers from the reply's own bytes alone.

    Raises:
      ValueError: if a name or the prefix cannot be used, or if there are too many
        states or emissions for int16.
    """
    if with_text and holds_answer(prefix, thinking):
        raise ValueError(
            f"the prompt's prefix {prefix!r} already holds text of an answer: end it"
            " in <think> or <answer>"
        )
    automaton = build_automaton(action_names, prefix, thinking)
    check_count("states", len(automaton.next_state), len(action_names))
    # Emissions met so far, in the order of their ids: (known actions, any unknown).
    emissions: dict[tuple[tuple[int, ...], bool], int] = {((), False): 0}
    next_state, emission, begin = _compose(automaton, token_bytes, emissions)
    check_count("emissions", len(emissions), len(action_names))

    longest = max(1, *(len(actions) for actions, _ in emissions))
    emitted = np.full((len(emissions), longest), NO_ACTION, np.int32)
    for row, (actions, _) in zip(emitted, emissions, strict=True):
        row[: len(actions)] = actions
    return ReplyTables(
        next_state=jnp.asarray(next_state, jnp.int16),
        emission=jnp.asarray(emission, jnp.int16),
        emitted_actions=jnp.asarray(emitted),
        emitted_count=jnp.asarray((emitted != NO_ACTION).sum(axis=1), jnp.int32),
        emits_unknown=jnp.asarray([unknown for _, unknown in emissions]),
        is_answer=jnp.asarray(
            automaton.is_answer
            | (np.arange(len(automaton.is_answer)) == automaton.closed)
        ),
        start=jnp.int32(automaton.start),
        closed=jnp.int32(automaton.closed),
        text=_text_tables(token_bytes, begin) if with_text else None,
    )


def _text_tables(token_bytes: Sequence[bytes], begin: np.ndarray) -> TextTables:
    lengths = np.array([len(token) for token in token_bytes], np.int32)
    table = np.zeros((len(lengths), max(1, lengths.max())), np.uint8)
    for row, token in zip(table, token_bytes, strict=True):
        row[: len(token)] = np.frombuffer(token, np.uint8)
    return TextTables(
        token_bytes=jnp.asarray(table),
        token_length=jnp.asarray(lengths),
        answer_begin=jnp.asarray(begin),
    )


def start_reply(tables: ReplyTables, max_actions: int) -> ReplyState:
    """A reply of which only the prompt's prefix is there; A = max_actions."""
    if max_actions < 1:
        raise ValueError(f"a turn needs room for an action, got {max_actions=}")
    return ReplyState(
        state=tables.start,
        actions=jnp.full(max_actions, NO_ACTION, jnp.int32),
        count=jnp.int32(0),
        has_unknown=jnp.bool_(False),
        thought=jnp.int32(0),
        bytes=jnp.int32(0),
        # Without thinking the prompt itself leads into the answer.
        answer_at=jnp.where(tables.is_answer[tables.start], 0, -1).astype(jnp.int32),
    )


def read_token(tables: ReplyTables, reply: ReplyState, token: jax.Array) -> ReplyState:
    """Reads one token. Special tokens, and all after `</answer>`, change nothing.

    Args:
      token: int32[], its id in 0..V-1.
    """
    chex.assert_rank(token, 0)
    emission = _look_up(tables.emission, reply.state, token)
    emitted_count = _look_up(tables.emitted_count, emission)
    # Place `count` takes the token's first action, the next place its second, ...
    max_actions = reply.actions.shape[0]
    nth = jnp.arange(max_actions, dtype=jnp.int32) - reply.count
    longest = tables.emitted_actions.shape[1]
    emitted = _look_up(tables.emitted_actions, emission, jnp.clip(nth, 0, longest - 1))
    is_new = (nth >= 0) & (nth < emitted_count)
    state = _look_up(tables.next_state, reply.state, token).astype(jnp.int32)
    length, answer_at = reply.bytes, reply.answer_at
    if tables.text is not None:
        begin = _look_up(tables.text.answer_begin, reply.state, token).astype(jnp.int32)
        answer_at = jnp.where(begin >= 0, length + begin, answer_at)
        length += _look_up(tables.text.token_length, token)
    return ReplyState(
        state=state,
        actions=jnp.where(is_new, emitted, reply.actions),
        count=jnp.minimum(reply.count + emitted_count, max_actions),
        has_unknown=reply.has_unknown | _look_up(tables.emits_unknown, emission),
        thought=reply.thought + ~_look_up(tables.is_answer, state),
        bytes=length,
        answer_at=answer_at,
    )


def is_closed(tables: ReplyTables, reply: ReplyState) -> jax.Array:
    """bool[], whether the reply has the whole form, `</answer>` included."""
    return reply.state == tables.closed


def is_valid(tables: ReplyTables, reply: ReplyState) -> jax.Array:
    """bool[], closed, with at least one known action and no unknown segment."""
    return is_closed(tables, reply) & (reply.count > 0) & ~reply.has_unknown


def final_actions(tables: ReplyTables, reply: ReplyState) -> jax.Array:
    """int32[A], the actions to carry out, then NO_ACTION; none unless closed."""
    return jnp.where(is_closed(tables, reply), reply.actions, NO_ACTION)


def fewest_tokens(tables: ReplyTables) -> int:
    """The fewest tokens of a valid reply, by a breadth-first search on the host.

    Raises:
      ValueError: if these tokens cannot write a valid reply at all.
    """
    next_state, emission = np.asarray(tables.next_state), np.asarray(tables.emission)
    has_action = np.asarray(tables.emitted_count) > 0
    is_known = ~np.asarray(tables.emits_unknown)
    # bool[S, 2]: states that a reply's beginning without unknown segments can reach,
    # without [0] and with [1] an action named.
    reached = np.zeros((len(next_state), 2), bool)
    reached[int(tables.start), 0] = True
    frontier, length = reached, 0
    while frontier.any():
        further = reached.copy()
        for state, named in np.argwhere(frontier):
            follows = is_known[emission[state]]
            names = named | has_action[emission[state][follows]]
            further[next_state[state][follows], names.astype(int)] = True
        length += 1
        if further[int(tables.closed), 1]:
            return length
        frontier, reached = further & ~reached, further
    raise ValueError(
        "no sequence of the tokenizer's tokens is a valid reply: choose a model whose"
        " tokenizer knows the characters of the reply format and of the actions"
    )


def _look_up(table: jax.Array, *index: jax.Array) -> jax.Array:
    """table[index], without bounds checks."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _compose(
    automaton: Automaton,
    token_bytes: Sequence[bytes],
    emissions: dict[tuple[tuple[int, ...], bool], int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each token does from each state; new emissions are added to the dict.

    Returns:
      `next_state` and `emission` of `ReplyTables`, `answer_begin` of `TextTables`.
    """
    lengths = np.array([len(token) for token in token_bytes])
    longest_first = np.argsort(-lengths, kind="stable")
    text = np.frombuffer(b"".join(token_bytes), np.uint8)
    offsets = np.cumsum(lengths) - lengths

    shape = (len(automaton.next_state), len(lengths))
    next_state, emission, begin = (np.empty(shape, np.int16) for _ in range(3))
    for first in range(0, len(lengths), _BLOCK):
        block = longest_first[first : first + _BLOCK]
        composed = _compose_block(
            automaton, text, offsets[block], lengths[block], emissions
        )
        next_state[:, block], emission[:, block], begin[:, block] = composed
    return next_state, emission, begin


def _compose_block(
    automaton: Automaton,
    text: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    emissions: dict[tuple[tuple[int, ...], bool], int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads n tokens at once from all S states, one byte position after another.

    Args:
      text: uint8[bytes], all tokens' bytes.
      offsets: int[n], where each token begins in `text`.
      lengths: int[n], bytes in each token, longest first.

    Returns:
      int[S, n] state after the token; int[S, n] id of what it emits; int[S, n] bytes
      read when the answer's text begins, -1 where it does not begin in the token.
    """
    states = len(automaton.next_state)
    next_state, emission = automaton.next_state.ravel(), automaton.emission.ravel()
    can_emit = (automaton.emission != NONE).any(axis=0)

    reached = np.repeat(np.arange(states)[:, None], len(lengths), axis=1)
    ids, begin = np.zeros_like(reached), np.full_like(reached, -1)
    for position in range(lengths[0]):
        unfinished = np.count_nonzero(lengths > position)
        byte = text[offsets[:unfinished] + position]
        step = reached[:, :unfinished] * 256 + byte  # Index into the raveled tables.
        # Few bytes can end a segment: the emissions of those alone are looked up.
        columns = np.flatnonzero(can_emit[byte])
        emitted = emission[step[:, columns]]
        row, column = np.nonzero(emitted != NONE)
        emits = row, columns[column]  # Pairs of a state before the token and a token.
        ids[emits] = _append(ids[emits], emitted[row, column], emissions)
        before, after = reached[:, :unfinished], next_state[step]
        begins = automaton.is_answer[after] & ~automaton.is_answer[before]
        begin[:, :unfinished][begins] = position + 1
        reached[:, :unfinished] = after
    return reached, ids, begin


def _append(
    ids: np.ndarray,
    emitted: np.ndarray,
    emissions: dict[tuple[tuple[int, ...], bool], int],
) -> np.ndarray:
    """int[n], ids of the emissions `ids` (int[n]) extended by `emitted` (int[n])."""
    pairs, inverse = np.unique(np.stack([ids, emitted]), axis=1, return_inverse=True)
    so_far = list(emissions)
    longer = []
    for index, action in pairs.T.tolist():
        actions, has_unknown = so_far[index]
        if action == UNKNOWN:
            extended = (actions, True)
        else:
            extended = ((*actions, action), has_unknown)
        longer.append(emissions.setdefault(extended, len(emissions)))
    return np.array(longer, ids.dtype)[inverse.reshape(-1)]
