"""Texts of the household's observations."""

from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.envs import base, phrase_tables
from ragen_jax.envs.household import commands
from ragen_jax.envs.household.commands import BETWEEN, TAKE, USE, VERBS
from ragen_jax.envs.household.house import (
    CAN_OPEN,
    CONDITIONS,
    HELD,
    KINDS,
    LOOK,
    RECEPTACLES,
    TASK_TEXTS,
    TYPES,
)

_LINES = (
    "You stand in the hall.\n",
    "You are at",
    " It is closed.\n",
    " You see",
    " nothing",
    ".\n",
    "You carry",
    "Nothing happens.\n",
    "Solved.\n",
    "Commands:\n",
)
_HALL, _AT, _CLOSED, _SEE, _NONE, _STOP, _CARRY = range(7)
_IDLE, _SOLVED, _COMMANDS = range(7, len(_LINES))


def _tables(objects: int) -> dict[str, tuple[str, ...]]:
    """The kinds of phrases in order."""
    return {
        "line": _LINES,
        "task": TASK_TEXTS,
        "type": tuple(f" {name}" for name in TYPES),
        "type_end": tuple(f" {name}.\n" for name in TYPES),
        "target": tuple(f" in or on a {kind}.\n" for kind in KINDS),
        "object": tuple(f" {kind} {n + 1}" for kind in TYPES for n in range(objects)),
        "condition": CONDITIONS[1:],
        "place": tuple(f" {name}" for name in RECEPTACLES),
        "place_stop": tuple(f" {name}." for name in RECEPTACLES),
        "place_end": tuple(f" {name}\n" for name in RECEPTACLES),
        "verb": tuple(VERBS[:USE]),
        "whole": tuple(f"{verb}\n" for verb in VERBS[USE:]),
        "between": tuple(f" {word}" for word in BETWEEN.values()),
    }


def phrases(objects: int) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    return phrase_tables.texts(_tables(objects))


def _most_commands(objects: int) -> int:
    """The most commands that are possible at once."""
    # Go to the other receptacles, open or close this one; use the lamp, look. And with
    # empty hands take each object; otherwise put the one that is carried, or treat it.
    return len(RECEPTACLES) + 1 + max(objects, 2) + 2


def observation_phrases(objects: int, list_commands: bool) -> int:
    """M."""
    listed = 1 + 4 * _most_commands(objects) if list_commands else 0
    return 3 + 3 + 2 * objects + 2 + 4 + 2 + listed


def observe(state: Any, list_commands: bool) -> jax.Array:
    """int32[M], the task, what is seen and carried, and the listed commands, if any."""
    count = state.types.shape[0]
    at, none = phrase_tables.first_ids(_tables(count)), base.NO_PHRASE
    here = jnp.maximum(state.at, 0)
    is_look = state.task == LOOK
    task = [
        at["task"] + state.task,
        jnp.where(is_look, at["type_end"], at["type"]) + state.wanted,
        jnp.where(is_look, none, at["target"] + state.target),
    ]
    stands = state.at >= 0
    is_open = stands & state.is_open[here]
    has_lid = stands & ~state.is_open[here] & jnp.asarray(CAN_OPEN)[here]
    is_seen = is_open & (state.place == state.at)
    is_held = state.place == HELD
    view = [
        jnp.where(stands, _AT, _HALL),
        jnp.where(stands, at["place_stop"] + here, none),
        jnp.where(has_lid, _CLOSED, jnp.where(is_open, _SEE, none)),
    ]
    end = [
        jnp.where(is_open & ~is_seen.any(), _NONE, none),
        jnp.where(is_open, _STOP, none),
    ]
    carry = jnp.array([_CARRY, _STOP])
    carried = _objects(state, is_held, at)
    carried = phrase_tables.close_gaps(carried)[:2]
    carried = jnp.where(is_held.any(), carried, jnp.array([_NONE, none]))
    last = [
        jnp.where(state.happened, none, _IDLE),
        jnp.where(state.done, _SOLVED, none),
    ]
    parts = [jnp.stack(task), jnp.stack(view), _objects(state, is_seen, at)]
    parts += [jnp.stack(end), carry[:1], carried, carry[1:], jnp.stack(last)]
    if list_commands:
        parts += [jnp.where(state.done, none, jnp.array([_COMMANDS]))]
        parts += [_commands(state, at)]
    ids = phrase_tables.close_gaps(jnp.concatenate(parts))
    return ids[: observation_phrases(count, list_commands)]


def _objects(state: Any, which: jax.Array, at: dict[str, int]) -> jax.Array:
    """int32[2 O], names and conditions of the objects where bool[O] `which` is True."""
    count = state.types.shape[0]
    name = at["object"] + state.types * count + commands.numbers(state.types)
    condition = state.warmth + 3 * state.is_clean
    condition_phrase = jnp.where(
        condition > 0, at["condition"] + condition - 1, base.NO_PHRASE
    )
    pairs = jnp.stack([name, condition_phrase], axis=1)
    return jnp.where(which[:, None], pairs, base.NO_PHRASE).reshape(-1)


def _commands(state: Any, at: dict[str, int]) -> jax.Array:
    """int32[4 n], the possible commands, in the order of their numbers; n in all."""
    count, none = state.types.shape[0], base.NO_PHRASE
    verb, which = (jnp.asarray(part) for part in commands.verbs_of(count))
    has_object = (verb >= TAKE) & (verb < USE)
    one = jnp.minimum(which, count - 1)
    names = state.types * count + commands.numbers(state.types)
    where = jnp.maximum(commands.other_place(verb, state.at), 0)
    rows = jnp.stack(
        [
            jnp.where(verb < USE, at["verb"] + verb, at["whole"] + verb - USE),
            jnp.where(has_object, at["object"] + names[one], none),
            jnp.where(has_object, at["between"] + verb - TAKE, none),
            jnp.where(
                verb < USE,
                at["place_end"] + jnp.where(has_object, where, which),
                none,
            ),
        ],
        axis=1,
    )
    rows = jnp.where(commands.is_possible(state)[:, None], rows, none)
    return rows.reshape(-1)


def longest_observation(lengths, objects: int, list_commands: bool) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    most = phrase_tables.most_tokens(_tables(objects), lengths)
    lines = lengths[: len(_LINES)]
    task = most["task"] + max(most["type_end"], most["type"] + most["target"])
    one_object = most["object"] + most["condition"]
    contents = max(int(lines[_NONE]), objects * one_object)
    view = max(
        int(lines[_HALL]),
        int(lines[_AT]) + most["place_stop"] + int(lines[_CLOSED]),
        int(lines[_AT] + lines[_SEE] + lines[_STOP]) + most["place_stop"] + contents,
    )
    carry = int(lines[_CARRY] + lines[_STOP]) + max(int(lines[_NONE]), one_object)
    total = task + view + carry + int(lines[_IDLE] + lines[_SOLVED])
    if list_commands:
        plain = most["verb"] + most["place_end"]
        row = plain + most["object"] + most["between"]
        total += int(lines[_COMMANDS]) + (len(RECEPTACLES) + 1) * plain
        total += max(objects, 2) * row + 2 * most["whole"]
    return total
