"""Checks of an environment's texts: observations, and how answers are read.

Texts are tokenized by the embedded model's tokenizer, which can encode every byte.
"""

import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerFast

from ragen_jax.envs import base
from ragen_jax.models.io import sources
from ragen_jax.testing.check_dynamics import Plays, require
from ragen_jax.text import phrases, reference_parser, reply_parser, token_bytes
from ragen_jax.text.reply_automaton import WHITE

_REPLIES = 300  # random replies that are parsed
_ANSWERS = 1000  # random free-form answers that are read, besides the known texts
_MOST_ACTIONS = 3  # of a reply
_PREFIX = b"<think>"


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return sources.locate("tiny").read_tokenizer()


# Observations ------------------------------------------------------------------------


def check_observations(env: base.Environment, plays: Plays) -> None:
    """Requires phrase ids in range, padded at the end, and texts of the right form."""
    ids = plays.observation  # int32[B, T + 1, M]
    require(ids.dtype == np.int32, f"observe gives {ids.dtype}: make it int32")
    require(
        ids.shape[2:] == (env.observation_phrases,),
        f"observe gives {list(ids.shape[2:])} phrases: the environment says"
        f" {env.observation_phrases} in observation_phrases",
    )
    in_range = (ids >= base.NO_PHRASE) & (ids < len(env.phrases))
    require(
        in_range.all(),
        f"observe gives the id {ids[~in_range][:1]}: there are phrases 0 to"
        f" {len(env.phrases) - 1}, and base.NO_PHRASE",
    )
    is_phrase = ids != base.NO_PHRASE
    require(is_phrase.any(axis=-1).all(), "an observation is empty: say something")
    require(
        (is_phrase[..., 1:] <= is_phrase[..., :-1]).all(),
        "an observation has a gap before its last phrase: move base.NO_PHRASE behind"
        " it, as ragen_jax.envs.phrase_tables.close_gaps does",
    )
    for row in np.unique(ids.reshape(-1, ids.shape[2]), axis=0):
        text = base.text_of(env.phrases, row)
        require(
            text.endswith("\n") and not text[0].isspace(),
            f"an observation reads {text!r}: let it end in a new line, and begin"
            " without white space",
        )


def check_longest(env: base.Environment, plays: Plays) -> None:
    """Requires `longest_observation` to hold for random numbers of tokens in phrases.

    A tokenizer may split phrases in any way.
    """
    ids = plays.observation
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(1, 9, len(env.phrases))
        tokens = np.where(ids == base.NO_PHRASE, 0, lengths[ids]).sum(axis=2)
        longest = env.longest_observation(lengths)
        require(
            tokens.max() <= longest,
            f"longest_observation is too small: it gives {longest} where an observation"
            f" has {tokens.max()} tokens",
        )
        most = env.observation_phrases * lengths.max()
        require(
            longest <= most,
            f"longest_observation wastes tokens: it gives {longest} where M times the"
            f" longest phrase is {most}",
        )


def check_tokens(env: base.Environment, plays: Plays) -> tuple[int, int]:
    """Requires that tokens joined on device decode to the text joined on the host.

    Returns:
      The most tokens of the observations that were checked, and the room for one.
    """
    ids = plays.observation.reshape(-1, env.observation_phrases)
    ids = np.unique(ids, axis=0)
    ids = ids[np.linspace(0, len(ids) - 1, 64, dtype=int)]
    table = phrases.tokenize_phrases(_tokenizer(), env.phrases)
    lengths = np.asarray(table.lengths)
    special = np.isin(np.asarray(table.tokens), _tokenizer().all_special_ids)
    is_control = special & (np.arange(special.shape[1]) < lengths[:, None])
    wrong = [env.phrases[i] for i in np.flatnonzero(is_control.any(axis=1))]
    require(
        not wrong,
        f"phrases hold the chat's control tokens: {wrong[:3]}: write other symbols",
    )
    rules = phrases.encode(_tokenizer(), env.instruction)
    require(
        not np.isin(rules, _tokenizer().all_special_ids).any(),
        "the instruction holds one of the chat's control tokens: write other words",
    )
    capacity = env.observation_phrases * int(lengths.max())
    if env.longest_observation is not None:
        capacity = env.longest_observation(lengths)
    join = functools.partial(phrases.join_phrases, capacity=capacity)
    tokens, counts = jax.jit(jax.vmap(join, in_axes=(None, 0)))(table, ids)
    require(
        int(counts.max()) <= capacity,
        f"longest_observation is too small: it gives {capacity} where an observation"
        f" has {counts.max()} tokens",
    )
    for row, line, count in zip(ids, np.asarray(tokens), counts.tolist(), strict=True):
        text = base.text_of(env.phrases, row)
        decoded = _tokenizer().decode(line[:count])
        require(
            decoded == text,
            f"the tokens of an observation read {decoded!r} and its text {text!r}:"
            " write its phrases in other symbols",
        )
    return int(counts.max()), capacity


# Actions by name ---------------------------------------------------------------------


def check_names(env: base.Environment) -> None:
    """Requires replies with action names to be read on device as by the reference."""
    tokenizer = _tokenizer()
    bytes_of = token_bytes.token_bytes(tokenizer)
    tables = reply_parser.reply_tables(
        bytes_of, env.action_names, _PREFIX, thinking=True
    )
    texts = list(_random_replies(env, random.Random(1)))
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    # Token 0 marks the end of a document: it is special and stands for no bytes.
    tokens = np.zeros((len(texts), max(map(len, encoded))), np.int32)
    for row, line in zip(tokens, encoded, strict=True):
        row[: len(line)] = line
    actions, is_valid, is_closed = jax.jit(jax.vmap(_parse, in_axes=(None, 0)))(
        tables, tokens
    )
    action_count = 0
    for index, line in enumerate(encoded):
        reply = b"".join(bytes_of[token] for token in line)
        actual = reference_parser.ParsedReply(
            actions=tuple(a for a in actions[index].tolist() if a >= 0),
            is_valid=bool(is_valid[index]),
            is_closed=bool(is_closed[index]),
        )
        expected = reference_parser.parse_reply(
            _PREFIX, reply, env.action_names, _MOST_ACTIONS
        )
        action_count += len(expected.actions)
        require(
            actual == expected,
            f"the reply {texts[index]!r} is read as {actual} and means {expected}:"
            " choose other action names",
        )
    require(
        action_count, "no random reply named an action: choose shorter action names"
    )


def names_told(env: base.Environment) -> str:
    """A line on the action names that the instruction has, whatever their case."""
    instruction = env.instruction.lower()
    missing = tuple(
        name for name in env.action_names if name.lower() not in instruction
    )
    if not missing:
        return "the instruction names every action"
    return (
        f"the instruction does not name {base.listed(missing)}: nothing else in the"
        " prompt tells the agent of actions, but for example_actions"
    )


def _parse(tables: reply_parser.ReplyTables, tokens: jax.Array):
    state = reply_parser.start_reply(tables, _MOST_ACTIONS)

    def read_one(state, token):
        return reply_parser.read_token(tables, state, token), None

    state = jax.lax.scan(read_one, state, tokens)[0]
    return (
        reply_parser.final_actions(tables, state),
        reply_parser.is_valid(tables, state),
        reply_parser.is_closed(tables, state),
    )


def _random_replies(env: base.Environment, rng: random.Random) -> Iterator[str]:
    """Replies that are right or nearly right."""
    words = [
        *[form(name) for name in env.action_names for form in (str, str.upper)],
        *(name[:-1] for name in env.action_names),
        *("nothing", "", "|", "<", "√"),
    ]
    for _ in range(_REPLIES):
        separator = rng.choice(["||", " || ", "||", "|", "\t||\n", " "])
        count = rng.randint(1, _MOST_ACTIONS + 2)
        answer = separator.join(rng.choice(words) for _ in range(count))
        parts = ["thought ", "</think>", "<answer>", answer, "</answer>", " more"]
        if rng.random() < 0.2:
            parts[rng.randrange(len(parts))] = ""
        yield "".join(parts)


# Free-form actions -------------------------------------------------------------------


def check_free_form(env: base.Environment, plays: Plays) -> None:
    """Requires `read_action` to equal `read_action_text`, on any bytes and states."""
    rng = random.Random(2)
    seeds = _seeds(env)
    segments = [s for s in map(_as_segment, seeds) if 0 < len(s) <= env.answer_bytes]
    # A zero byte is part of the text like any other, not its end.
    segments += [s + b"\0" for s in segments if len(s) < env.answer_bytes]
    most = len(segments) + _ANSWERS
    while len(segments) < most:
        text = _as_segment(_mutated(seeds, rng, env.answer_bytes))
        if text and b"||" not in text:
            segments.append(text)
    count = len(segments)
    lengths = np.array([len(segment) for segment in segments], np.int32)
    texts = np.zeros((count, env.answer_bytes), np.uint8)
    for row, segment in zip(texts, segments, strict=True):
        row[: len(segment)] = np.frombuffer(segment, np.uint8)
    plays_of = np.arange(count) % len(plays.level)
    # Half of the states are at the beginning, as some plays are soon over.
    times = np.random.default_rng(3).integers(0, plays.actions.shape[1] + 1, count)
    times[::2] = 0
    states = jax.tree.map(lambda leaf: leaf[plays_of, times], plays.states)
    actions = np.asarray(jax.jit(jax.vmap(env.read_action))(texts, lengths, states))
    shape = [env.action_size] if env.action_size else []
    require(
        (actions.dtype, list(actions.shape)) == (np.int32, [count, *shape]),
        f"read_action gives {actions.dtype}{list(actions.shape[1:])}: make it"
        f" int32{shape}",
    )
    most = len(env.action_names)
    for index, segment in enumerate(segments):
        state = jax.tree.map(lambda leaf, index=index: leaf[index], states)
        expected = env.read_action_text(segment, state)
        require(
            np.array_equal(actions[index], expected),
            f"the answer {segment!r} is action {actions[index]} for read_action and"
            f" {expected} for read_action_text: make them agree",
        )
        require(
            base.NO_ACTION <= np.ravel(expected)[0] < most,
            f"the answer {segment!r} is action {expected}: there are actions 0 to"
            f" {most - 1}, and base.NO_ACTION",
        )
    require(
        0 < (base.action_kind(actions, env) >= 0).sum() < count,
        f"of {count} answers all, or none, mean an action: let example_actions show"
        " answers that do, and refuse what means none",
    )


def check_written(env: base.Environment, plays: Plays) -> str:
    """Requires that the texts of solutions' first actions are read as these actions.

    Returns:
      A line that says whether `example_actions` are read as actions. They need not be:
      an example may fit none of the levels drawn, or be a description.
    """
    levels = [
        jax.tree.map(lambda leaf, index=index: leaf[index, 0], plays.states)
        for index in _spread(plays)
    ]

    def read(text: str, state: Any) -> Any:
        segment = _as_segment(text.encode())
        if not 0 < len(segment) <= env.answer_bytes:
            return base.NO_ACTION
        return env.read_action_text(segment, state)

    if env.solve is not None and env.action_text is not None:
        for state in levels:
            for action in tuple(env.solve(state))[:1]:
                text = base.text_of_action(action, env, state)
                require(
                    np.array_equal(read(text, state), action),
                    f"action_text writes the action {action} of solve as {text!r},"
                    f" which is read as {read(text, state)}: let read_action read it,"
                    f" in lower case and in at most {env.answer_bytes} bytes",
                )
    unread = [
        text
        for text in env.example_actions
        if not any(np.ravel(read(text, state))[0] >= 0 for state in levels)
    ]
    if not unread:
        return "the prompt's examples are read as actions"
    return (
        f"the prompt's examples {unread} name no action in {len(levels)} levels: look"
        " whether they are meant so; answers are read in lower case, up to"
        f" {env.answer_bytes} bytes"
    )


def _spread(plays: Plays) -> np.ndarray:
    """The indices of plays of different levels, one for each level."""
    return np.unique(plays.level * len(base.SPLITS) + plays.split, return_index=True)[1]


def _seeds(env: base.Environment) -> list[bytes]:
    """Texts from which random answers are made."""
    words = [phrase.strip(" \n,.:;()") for phrase in env.phrases[:500]]
    texts = (*env.action_names[:500], *env.example_actions, *words)
    return [text.encode() for text in texts if text]


def _as_segment(text: bytes) -> bytes:
    """A segment as `read_action` receives it: stripped and lower-cased."""
    return text.strip(WHITE).lower()


def _mutated(seeds: list[bytes], rng: random.Random, most: int) -> bytes:
    """A random text of at most `most` bytes: mostly seeds with a few bytes changed."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(1, most))
    text = bytearray(rng.choice(seeds))
    if rng.random() < 0.2:
        text += b" " * rng.randint(0, 1) + rng.choice(seeds)
    alphabet = b"".join(seeds) if rng.random() < 0.8 else bytes(range(256))
    for _ in range(rng.randint(0, 3)):
        place = rng.randint(0, len(text))
        match rng.randrange(3):
            case 0:
                text[place : place + 1] = b""
            case 1:
                text[place:place] = bytes([rng.choice(alphabet)])
            case 2:
                text[place : place + 1] = bytes([rng.choice(alphabet)])
    return bytes(text[:most])
