"""Samples of thoughts and prompts for mutual information, drawn on the host.

Each sample is a set of thoughts (rows) and prompts (columns) for `score_pairs`. Two
kinds, as in RAGEN-2's code (arXiv:2604.06268): first turns, with one column per group;
and turns from anywhere in the trajectories, with one column per draw. Columns may hold
equal prompts. Called by launch/diagnose.py.
"""

from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from ragen_jax.diagnostics.mutual_information import Pairs
from ragen_jax.errors import UserError
from ragen_jax.text.reply_automaton import END_THINK
from ragen_jax.trajectory import Rows

# Tokens. Widths are rounded up to a multiple, so that few programs are compiled.
_PROMPT_STEP, _THOUGHT_STEP = 64, 16


class NoThoughtError(UserError):
    """Episodes without a thought: there is nothing to measure."""


@struct.dataclass
class Turns:
    """Where the turns of a record lie in its rows. Host arrays of n turns, in order."""

    row: np.ndarray  # int64[n]
    episode: np.ndarray  # int64[n]
    turn: np.ndarray  # int64[n], 0-based
    start: np.ndarray  # int64[n], index of the reply's first token = prompt length
    thought: np.ndarray  # int64[n], its length in tokens; 0 without a closing tag


def find_turns(rows: Rows, token_bytes: Sequence[bytes]) -> Turns:
    """The turns of a record, with their thoughts' lengths.

    A thought is the tokens that end before `</think>` begins: a token that holds both
    the last text of the thought and the beginning of the tag is not counted.

    Args:
      rows: host arrays, of episodes that begin replies with a thought.
      token_bytes: V byte strings, from `text/token_bytes`.
    """
    is_reply = np.asarray(rows.is_reply)
    begins = is_reply & ~np.pad(is_reply[:, :-1], ((0, 0), (1, 0)))
    row, start = np.nonzero(begins)
    padded = np.pad(is_reply, ((0, 0), (0, 1)))  # Every reply has a False behind it.
    thought = []
    for index, first in zip(row, start, strict=True):
        end = first + int(np.argmin(padded[index, first:]))
        thought.append(_thought_length(rows.tokens[index, first:end], token_bytes))
    episode, turn = rows.episode[row, start], rows.turn[row, start]
    found = Turns(row, episode, turn, start, np.array(thought, np.int64))
    order = np.lexsort((turn, episode))
    return jax.tree.map(lambda field: field[order], found)


def _thought_length(tokens: np.ndarray, token_bytes: Sequence[bytes]) -> int:
    """How many tokens of one reply end before the closing tag; 0 without one."""
    pieces = [token_bytes[t] if t < len(token_bytes) else b"" for t in tokens.tolist()]
    at = b"".join(pieces).find(END_THINK)
    if at < 0:
        return 0
    ends = np.cumsum([len(piece) for piece in pieces])
    return int((ends <= at).sum())


def sample_first_turns(
    rows: Rows, turns: Turns, group: np.ndarray, *, samples: int, seed: int
) -> Pairs:
    """At most `samples` first turns without replacement; a column for each group.

    Args:
      rows: host arrays.
      turns: of `rows`.
      group: int[B], of each episode; members of a group share the first prompt.
      samples: how many thoughts at most; 0: all.
      seed: of the draw.

    Raises:
      NoThoughtError: if no first turn has a thought.
    """
    chosen = np.flatnonzero((turns.turn == 0) & (turns.thought > 0))
    _check_any(chosen, "first turn")
    if samples and len(chosen) > samples:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(chosen, samples, replace=False))
    groups = group[turns.episode[chosen]]
    _, first, own = np.unique(groups, return_index=True, return_inverse=True)
    return _pairs(rows, turns, chosen, chosen[first], own)


def sample_trajectories(rows: Rows, turns: Turns, *, samples: int, seed: int) -> Pairs:
    """`samples` draws with replacement: an episode, then one of its turns.

    Every draw is a column of its own; equal prompts count as one in retrieval. Episodes
    without any thought are not drawn. At most as many draws as there are turns.

    Args: as for `sample_first_turns`.

    Raises:
      NoThoughtError: if no turn has a thought.
    """
    usable = np.flatnonzero(turns.thought > 0)
    _check_any(usable, "turn")
    rng = np.random.default_rng(seed)
    count = min(samples or len(usable), len(usable))
    episodes = rng.choice(np.unique(turns.episode[usable]), count)
    chosen = np.array(
        [rng.choice(usable[turns.episode[usable] == one]) for one in episodes]
    )
    return _pairs(rows, turns, chosen, chosen, np.arange(count))


def _check_any(chosen: np.ndarray, what: str) -> None:
    if not len(chosen):
        raise NoThoughtError(
            f"no {what} of these episodes has a thought that </think> closes, so there"
            " is no mutual information to measure: choose a checkpoint trained with"
            " env.thinking = true whose replies still follow the format, or leave it"
            " out by --noinformation"
        )


def _pairs(rows: Rows, turns: Turns, chosen, columns, own) -> Pairs:
    """Thoughts of the chosen turns against the prompts of the columns' turns.

    Args:
      rows, turns: the record.
      chosen: int64[N], indices into `turns`.
      columns: int64[M], likewise.
      own: int64[N], the column of each thought's own prompt.
    """
    prompts = [rows.tokens[turns.row[i], : turns.start[i]] for i in columns]
    thoughts = []
    for i in chosen:
        start = turns.start[i]
        thoughts.append(rows.tokens[turns.row[i], start : start + turns.thought[i]])
    texts = [prompt.tobytes() for prompt in prompts]
    is_same = [[text == texts[column] for text in texts] for column in own]
    return Pairs(
        prompts=_padded(prompts, _PROMPT_STEP),
        prompt_lengths=np.array([len(x) for x in prompts], np.int32),
        thoughts=_padded(thoughts, _THOUGHT_STEP),
        thought_lengths=np.array([len(x) for x in thoughts], np.int32),
        own=np.asarray(own, np.int32).reshape(-1),
        is_same=np.array(is_same, bool),
    )


def _padded(sequences: Sequence[np.ndarray], step: int) -> np.ndarray:
    """int32[n, width], right-padded with 0 to a multiple of `step`."""
    width = -(-max(map(len, sequences)) // step) * step
    table = np.zeros((len(sequences), width), np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    return table
