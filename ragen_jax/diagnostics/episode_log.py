"""A few episodes of a run, kept for reading: what was seen, thought, done and learned.

WORKDIR/episodes.jsonl.gz, one JSON object an episode. Each write is a gzip member of
its own, so that a kill costs the last write at most. A file that is damaged otherwise
is set aside before it is written to. The file is bounded: when it holds more than
MOST_EPISODES, it is thinned.
"""

import dataclasses
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ragen_jax.errors import UserError
from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.transcripts import Reader
from ragen_jax.trajectory import Episodes, Rows
from ragen_jax.utils import atomic_files, json_files
from ragen_jax.utils.finite import finite

FILE = "episodes.jsonl.gz"
MOST_EPISODES = 2000
PHASES = ("train", "before", "after")  # training; test before and after it
# How each write begins: gzip's mark, deflate, no flags, and no time.
_HEADER = b"\x1f\x8b\x08\x00" + bytes(4)
_DIGITS = 3  # of log-probabilities and the like


@dataclasses.dataclass(frozen=True)
class TokenNumbers:
    """Advantages and values of the tokens of some rows. Host arrays."""

    rows: Rows  # R rows, in any order
    advantages: np.ndarray  # float32[R, T]
    values: np.ndarray | None  # float32[R, T], units of reward; None without a critic


def choose_episodes(
    returns: np.ndarray,
    group: np.ndarray,
    environment: np.ndarray,
    is_kept: np.ndarray,
    count: int,
) -> list[int]:
    """The best and the worst episode of some groups; `count` in all.

    First the first group of each environment, whatever it is; then those that the
    filter kept, whose tokens have advantages to look at; then the others. The first of
    each environment come before the second ones.

    Args:
      returns: float[B].
      group: int[B].
      environment: int[B].
      is_kept: bool[B].
      count: how many at most.
    """
    names, first = np.unique(group, return_index=True)
    of_group = environment[first]
    place = np.array([(of_group[:at] == own).sum() for at, own in enumerate(of_group)])
    is_dropped = np.array([not is_kept[group == name].any() for name in names])
    order = np.lexsort((of_group, place, is_dropped & (place > 0)))
    chosen: list[int] = []
    for name in names[order]:
        members = np.flatnonzero(group == name)
        best = int(members[np.argmax(returns[members])])
        worst = int(members[np.argmin(returns[members])])
        chosen += [best] if best == worst else [best, worst]
    return chosen[:count]


def describe(
    readers: Sequence[Reader],
    labels: Sequence[str],
    rows: Rows,
    episodes: Episodes,
    chosen: Iterable[int],
    *,
    iteration: int,
    phase: str,
    numbers: TokenNumbers | None = None,
) -> list[dict[str, Any]]:
    """The chosen episodes, ready for JSON.

    Args:
      readers: one per environment, which decode its tokens.
      labels: the environments' names.
      rows, episodes: host arrays; `rows.episode` counts from 0 here.
      chosen: indices into the episodes.
      iteration: finished iterations; 0 is before training.
      phase: one of PHASES.
      numbers: advantages and values of the rows that were learned from.
    """
    found = []
    for index in chosen:
        environment = int(episodes.environment[index])
        reader = readers[environment]
        mine = (rows.episode == index).any(axis=1)
        own = _take(rows, mine)
        one = _take(episodes, slice(index, index + 1))
        (transcript,) = transcripts.read(reader, own, one, first_episode=index)
        members = np.flatnonzero(episodes.group == episodes.group[index])
        turns = [
            _turn(reader, own, index, number, turn, numbers)
            for number, turn in enumerate(transcript.turns)
        ]
        found.append(
            {
                "iteration": iteration,
                "phase": phase,
                "environment": labels[environment],
                "level": transcript.level,
                "rollout": int(np.flatnonzero(members == index)[0]),
                "success": transcript.success,
                "return": round(sum(turn.reward for turn in transcript.turns), 4),
                "end": transcript.end,
                "system": transcript.system,
                "turns": turns,
            }
        )
    return found


def _take(record, index):
    fields = dataclasses.fields(record)
    return record.replace(**{f.name: getattr(record, f.name)[index] for f in fields})


def _turn(
    reader: Reader,
    rows: Rows,
    episode: int,
    number: int,
    turn: transcripts.Turn,
    numbers: TokenNumbers | None,
) -> dict[str, Any]:
    is_mine = (rows.episode == episode) & (rows.turn == number) & rows.is_reply
    tokens = rows.tokens[is_mine]
    thought, answer = transcripts.split_reply(turn.reply)
    described = {
        "message": turn.message,
        "thought": thought,
        "answer": answer,
        "actions": list(turn.actions),
        "reward": round(turn.reward, 4),
        "valid": turn.is_valid,
        "tokens": [transcripts.text_of_tokens(reader, tokens[i : i + 1])
                   for i in range(len(tokens))],
        "logprob": _rounded(rows.logprobs[is_mine]),
        "entropy": _rounded(rows.entropy[is_mine]),
        "advantage": None,
        "value": None,
    }  # fmt: skip
    if numbers is not None:
        known = numbers.rows
        is_known = (known.episode == episode) & (known.turn == number) & known.is_reply
        if is_known.sum() == len(tokens):  # Else the filter dropped its group.
            described["advantage"] = _rounded(numbers.advantages[is_known])
            if numbers.values is not None:
                described["value"] = _rounded(numbers.values[is_known])
    return described


def _rounded(values: np.ndarray) -> list[float | None]:
    return [
        round(float(value), _DIGITS) if np.isfinite(value) else None for value in values
    ]


# The file -----------------------------------------------------------------------------


class _Log(NamedTuple):
    """What a file holds, up to a write that was cut short or is damaged."""

    episodes: list[dict[str, Any]]
    length: int  # bytes of the writes that they were read from
    is_damaged: bool  # what is behind them was not cut short by a kill


def append(workdir: str | Path, episodes: Sequence[Mapping[str, Any]]) -> None:
    """Adds episodes to the file of a run, and thins it when it grows too long."""
    if not episodes:
        return
    path = Path(workdir) / FILE
    log = _read(path)
    if log.is_damaged:
        _set_aside(path, log.episodes)
        log = _read(path)
    with path.open("ab") as file:
        file.truncate(log.length)  # A reader stops at a write that was cut short.
        file.write(_packed(episodes))
    everything = [*log.episodes, *episodes]
    if len(everything) > MOST_EPISODES:
        _replace(path, thinned(everything))


def thinned(episodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most MOST_EPISODES of them, by dropping every second recorded iteration's.

    The first and the last iteration stay. Where these alone are too many, the first
    episodes of each stay, as do the first of each of the two tests.
    """
    places: dict[str, list[int]] = {phase: [] for phase in PHASES}
    for place, episode in enumerate(episodes):
        places[episode["phase"]].append(place)
    trained = places.pop("train")
    tests = [place for own in places.values() for place in own[: MOST_EPISODES // 4]]
    of_iteration: dict[int, list[int]] = {}
    for place in trained:
        of_iteration.setdefault(episodes[place]["iteration"], []).append(place)
    room = MOST_EPISODES - len(tests)
    count = lambda: sum(map(len, of_iteration.values()))
    while count() > room and (dropped := sorted(of_iteration)[1:-1:2]):
        for iteration in dropped:
            del of_iteration[iteration]
    if count() > room:
        share = room // len(of_iteration)
        of_iteration = {i: own[:share] for i, own in of_iteration.items()}
    kept = sorted([*tests, *(place for own in of_iteration.values() for place in own)])
    return [episodes[place] for place in kept]


def trim(workdir: str | Path, iteration: int, report: Callable[[str], None]) -> None:
    """Drops episodes later than `iteration`, which a resumed run records again."""
    _keep(workdir, lambda episode: episode["iteration"] <= iteration, report)


def forget_tests(workdir: str | Path, report: Callable[[str], None]) -> None:
    """Drops the episodes of test levels, before they are played (again)."""
    _keep(workdir, lambda episode: episode["phase"] == "train", report)


def _keep(
    workdir: str | Path,
    is_kept: Callable[[Mapping[str, Any]], bool],
    report: Callable[[str], None],
) -> None:
    """Drops the other episodes. A damaged file is reported, and is not lost."""
    path = Path(workdir) / FILE
    log = _read(path)
    if log.is_damaged:
        aside = _set_aside(path, log.episodes)
        report(
            f"warning: {path} is damaged behind its first {len(log.episodes)} episodes;"
            f" set aside as {aside.name}"
        )
    kept = list(filter(is_kept, log.episodes))
    if len(kept) < len(log.episodes):
        _replace(path, kept)


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """The recorded episodes in order; a write that was cut short is left out.

    Raises:
      UserError: if there is more behind them, which cannot be read.
    """
    path = Path(workdir) / FILE
    log = _read(path)
    if log.is_damaged:
        raise UserError(
            f"{path} is damaged behind its first {len(log.episodes)} episodes: restore"
            " it from a copy, or move it away to do without them"
        )
    return log.episodes


def _read(path: Path) -> _Log:
    if not path.exists():
        return _Log([], 0, False)
    try:
        data, found = json_files.read_bytes(path), []
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; move it away") from error
    whole, is_damaged = len(data), False
    while data:
        unpacker = zlib.decompressobj(wbits=31)  # One gzip member.
        try:
            text = unpacker.decompress(data)
            if not unpacker.eof:
                is_damaged = any(data) and not _is_cut_short(data)
                break
            found += [_episode(line) for line in text.splitlines()]
        except (zlib.error, ValueError, KeyError, TypeError):
            is_damaged = any(data)  # A loss of power leaves zeros, and costs a write.
            break
        data = unpacker.unused_data
    return _Log(found, whole - len(data), is_damaged)


def _is_cut_short(data: bytes) -> bool:
    """Whether an unfinished write is the begin of one. A damaged header seems so, too.

    Its flags may have what follows skipped, up to the end of the file.
    """
    begin = _HEADER[: len(data)]
    return data.startswith(begin) and _HEADER not in data[1:]


def _episode(line: bytes) -> dict[str, Any]:
    """The episode in a line; raises what `_read` expects if there is none."""
    episode = json_files.parse(line)
    if type(episode["iteration"]) is not int or episode["phase"] not in PHASES:
        raise ValueError("no episode")
    return episode


def _set_aside(path: Path, episodes: Sequence[Mapping[str, Any]]) -> Path:
    """Renames a damaged file, to the path returned, and writes its sound episodes."""
    names = (f"{path.name}.damaged{n or ''}" for n in itertools.count())
    aside = next(x for name in names if not (x := path.with_name(name)).exists())
    os.rename(path, aside)
    _replace(path, episodes)
    return aside


def _packed(episodes: Sequence[Mapping[str, Any]]) -> bytes:
    lines = "".join(
        json.dumps(finite(episode), ensure_ascii=False, allow_nan=False) + "\n"
        for episode in episodes
    )
    return gzip.compress(lines.encode("utf-8", "replace"), mtime=0)


def _replace(path: Path, episodes: Sequence[Mapping[str, Any]]) -> None:
    with atomic_files.new_file(path, binary=True) as file:
        file.write(_packed(episodes) if episodes else b"")
