"""Episodes as text, on the host: chat messages for files, and a form for people.

Texts are decoded from the recorded tokens and are never tokenized again. Each turn is
read from the row that holds its reply, whether rows are whole episodes or windows.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ragen_jax import trajectory
from ragen_jax.envs.base import Environment
from ragen_jax.text import phrases, prompts, reference_parser, token_bytes
from ragen_jax.text.prompts import Dialogue
from ragen_jax.text.reply_automaton import END_THINK, THINK
from ragen_jax.trajectory import Episodes, Rows
from ragen_jax.utils.finite import finite
from ragen_jax.utils.words import counted

ENDS = {
    trajectory.UNFINISHED: "unfinished",
    trajectory.ENV_DONE: "environment_done",
    trajectory.OUT_OF_TURNS: "out_of_turns",
    trajectory.OUT_OF_ACTIONS: "out_of_actions",
}


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message of the environment and the reply to it."""

    message: str  # feedback on the turn before, observation, turn number, actions left
    reply: str  # the prefix given to the policy and what it sampled, without end token
    # Names of the actions that reached the environment. "?" for each one of a free-form
    # answer of which some parts could not be read: which, only its state would tell.
    actions: tuple[str, ...]
    reward: float  # the environment's
    is_valid: bool


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One episode."""

    level: int  # which of the split's levels, from 0
    rollout: int  # which episode of the level, from 0
    system: str
    turns: tuple[Turn, ...]
    success: bool
    end: str  # one of ENDS

    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form that chat templates take."""
        spoken = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            spoken.append({"role": "user", "content": turn.message})
            spoken.append({"role": "assistant", "content": turn.reply})
        return spoken

    def to_dict(self) -> dict[str, Any]:
        """A line of the trajectories' file. Numbers that are not finite become None."""
        return {
            "messages": self.messages(),
            "rewards": finite([turn.reward for turn in self.turns]),
            "valid": [turn.is_valid for turn in self.turns],
            "actions": [list(turn.actions) for turn in self.turns],
            "success": self.success,
            "level": self.level,
            "rollout": self.rollout,
            "end": self.end,
        }


@dataclasses.dataclass(frozen=True)
class Reader:
    """What is needed to decode the records of one run. Made by `make_reader`."""

    env: Environment
    dialogue: Dialogue
    openings: tuple[str, ...]  # texts that may precede a message, decoded from tokens
    ending: str  # the text between a message and its reply, decoded from tokens
    token_bytes: tuple[bytes, ...]  # by token id; empty for control tokens
    written_bytes: tuple[bytes, ...]  # by token id; control tokens spelled out


def make_reader(
    tokenizer: PreTrainedTokenizerFast, env: Environment, dialogue: Dialogue
) -> Reader:
    """A reader of rollouts in `env` with the texts of `dialogue`.

    Args:
      tokenizer: the model's.
      env: the rules.
      dialogue: made for `env` and this tokenizer's chat template.
    """
    spoken = token_bytes.token_bytes(tokenizer)
    written = list(spoken)
    for index, token in tokenizer.added_tokens_decoder.items():
        written[index] = token.content.encode()
    # Encoded and decoded, as tokenizers may change a text: by Unicode normalization, or
    # by control tokens that swallow the white space beside them.
    openings, ending = prompts.frames(dialogue)
    *openings, ending = [
        _bytes(written, phrases.encode(tokenizer, text)).decode(errors="replace")
        for text in (*openings, ending)
    ]
    return Reader(env, dialogue, tuple(openings), ending, spoken, tuple(written))


def text_of_tokens(reader: Reader, tokens: np.ndarray) -> str:
    """The text of tokens (int[n]), control tokens included.

    Bytes that are not UTF-8 become U+FFFD; ids beyond the tokenizer's give no text.
    """
    return _bytes(reader.written_bytes, tokens.tolist()).decode(errors="replace")


def read(
    reader: Reader, rows: Rows, episodes: Episodes, *, first_episode: int
) -> list[Transcript]:
    """The transcripts of a batch, in the order of its episodes.

    Args:
      reader: of the same run.
      rows: host arrays; rows of episodes beyond `episodes` are left out.
      episodes: B episodes, host arrays.
      first_episode: the number of the first of them in `rows.episode`.
    """
    row_of = rows_of_turns(rows)
    rollouts: dict[int, int] = {}
    found = []
    for index, level in enumerate(episodes.group.tolist()):
        turns = range(int(episodes.turns[index]))
        row = [row_of[first_episode + index, turn] for turn in turns]
        found.append(
            Transcript(
                level=level,
                rollout=rollouts.setdefault(level, 0),
                system=reader.dialogue.system,
                turns=tuple(
                    _read_turn(reader, rows, row[turn], episodes, index, turn)
                    for turn in turns
                ),
                success=bool(episodes.success[index]),
                end=ENDS[int(episodes.end[index])],
            )
        )
        rollouts[level] += 1
    return found


def rows_of_turns(rows: Rows) -> dict[tuple[int, int], int]:
    """(episode, turn) -> the row that holds the reply."""
    row, place = np.nonzero(rows.turn_end)
    ends = zip(rows.episode[row, place], rows.turn[row, place], row, strict=True)
    return {(int(episode), int(turn)): int(row) for episode, turn, row in ends}


def _read_turn(
    reader: Reader, rows: Rows, row: int, episodes: Episodes, index: int, turn: int
) -> Turn:
    is_turn = rows.turn[row] == turn
    fed = rows.tokens[row][is_turn & ~rows.is_reply[row]]
    sampled = rows.tokens[row][is_turn & rows.is_reply[row]]
    if episodes.reply_end[index, turn] in trajectory.SAMPLED_STOPS:
        sampled = sampled[:-1]
    dialogue = reader.dialogue
    prefix = dialogue.reply_prefix
    names = action_names(reader, spoken_bytes(reader, sampled))
    taken = int(episodes.actions[index, turn])
    if reader.env.read_action is not None and not episodes.is_valid[index, turn]:
        names = ("?",) * taken
    return Turn(
        message=_message(reader, text_of_tokens(reader, fed)),
        reply=prefix + text_of_tokens(reader, sampled),
        actions=names[:taken],
        reward=float(episodes.reward[index, turn]),
        is_valid=bool(episodes.is_valid[index, turn]),
    )


def spoken_bytes(reader: Reader, tokens: np.ndarray) -> bytes:
    """The bytes of sampled tokens (int[n]), without control tokens."""
    return _bytes(reader.token_bytes, tokens.tolist())


def action_names(reader: Reader, sampled: bytes) -> tuple[str, ...]:
    """The names of a reply's actions; for free-form answers, the texts themselves."""
    prefix, most = reader.dialogue.reply_prefix, reader.dialogue.limits.actions_per_turn
    thinking = prefix == "<think>"
    if reader.env.read_action is None:
        names = reader.env.action_names
        parsed = reference_parser.parse_reply(
            prefix.encode(), sampled, names, most, thinking
        )
        return tuple(names[action] for action in parsed.actions)
    texts: list[str] = []

    def read(text: bytes) -> int:
        texts.append(text.decode(errors="replace"))
        return len(texts) - 1

    longest = reader.env.answer_bytes
    reference_parser.parse_free_form(
        prefix.encode(), sampled, read, longest, most, thinking
    )
    return tuple(texts)


def _message(reader: Reader, fed: str) -> str:
    """The user's message within the text fed before a reply."""
    for opening in reader.openings:
        if fed.startswith(opening) and fed.endswith(reader.ending):
            return fed[len(opening) : len(fed) - len(reader.ending)]
    raise ValueError(f"not a message of this run's dialogue: {fed!r}")


def _bytes(table: Sequence[bytes], tokens: Iterable[int]) -> bytes:
    # A model's vocabulary may be wider than its tokenizer's.
    return b"".join(table[i] for i in tokens if i < len(table))


# For people --------------------------------------------------------------------------


def readable(transcript: Transcript) -> str:
    """An episode for a person: what was seen, thought, done and earned in each turn."""
    actions = sum(len(turn.actions) for turn in transcript.turns)
    outcome = "solved" if transcript.success else "not solved"
    lines = [
        f"Level {transcript.level}, episode {transcript.rollout}: {outcome},"
        f" {transcript.end.replace('_', ' ')} after"
        f" {counted(len(transcript.turns), 'turn')} and {actions} actions"
    ]
    for turn in transcript.turns:
        lines += [f"    {_shown(line)}" for line in turn.message.splitlines()]
        thought, answer = split_reply(turn.reply)
        if thought is not None:
            lines.append(f"  thought  {_shown(thought)}")
        lines.append(f"  {'answer ' if turn.is_valid else 'INVALID'}  {_shown(answer)}")
        lines.append(f"  actions  {', '.join(turn.actions) or 'none'}")
        lines.append(f"  reward   {turn.reward:g}")
    return "\n".join(lines)


def split_reply(reply: str) -> tuple[str | None, str]:
    """(thought, answer) of a reply; no thought where no tag closes one."""
    start, end = THINK.decode(), END_THINK.decode()
    if not reply.startswith(start) or end not in reply:
        return None, reply
    thought, _, answer = reply.removeprefix(start).partition(end)
    return thought, answer


def _shown(text: str) -> str:
    """On one line, without control characters, which could upset a terminal."""
    return "".join(c if c.isprintable() else "·" for c in text.replace("\n", " "))
