"""The commands of the household as numbers and texts, and which of them are possible.

Actions are numbered verb by verb: first the verbs with a receptacle, for each of them;
then those with an object, for each of them; then the others.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base
from ragen_jax.envs.household.house import (
    CAN_OPEN,
    DESK,
    FRIDGE,
    HELD,
    MICROWAVE,
    RECEPTACLES,
    SINK,
    TYPES,
)

ANSWER_BYTES = 48
_R = len(RECEPTACLES)
VERBS = ("go to", "open", "close", "take", "put", "clean", "heat", "cool")
VERBS += ("use desklamp 1", "look")
GO, OPEN, CLOSE, TAKE, PLACE, CLEAN_IT, HEAT_IT, COOL_IT, USE, LOOK_AROUND = range(10)
# The word between the object and the receptacle.
BETWEEN = {TAKE: "from", PLACE: "in/on", CLEAN_IT: "with", HEAT_IT: "with"}
BETWEEN[COOL_IT] = "with"
_WITH = {CLEAN_IT: SINK, HEAT_IT: MICROWAVE, COOL_IT: FRIDGE}


def verbs_of(objects: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[n] each, for all actions: the verb, and the index of its receptacle or
    object."""
    rows = [(verb, at) for verb in (GO, OPEN, CLOSE) for at in range(_R)]
    rows += [(verb, one) for verb in range(TAKE, USE) for one in range(objects)]
    rows += [(USE, 0), (LOOK_AROUND, 0)]
    verb, which = np.array(rows, np.int32).T
    return verb, which


def decode(action: jax.Array, objects: int) -> tuple[jax.Array, jax.Array]:
    """int32[] each: an action's verb, and the index of its receptacle or object."""
    verb, which = verbs_of(objects)
    return jnp.asarray(verb)[action], jnp.asarray(which)[action]


def action_names(objects: int) -> tuple[str, ...]:
    """Names that fit every house, as "object 3": types differ from house to house."""
    verb, which = verbs_of(objects)
    names = []
    for v, w in zip(verb.tolist(), which.tolist(), strict=True):
        thing = f" {RECEPTACLES[w]}" if v < TAKE else f" object {w + 1}"
        names.append(VERBS[v] + (thing if v < USE else ""))
    return tuple(names)


def numbers(types: jax.Array) -> jax.Array:
    """int32[O], each object's number among those of its type, from 0."""
    count = types.shape[0]
    index = jnp.arange(count)
    is_earlier = (types[:, None] == types[None]) & (index[None] < index[:, None])
    return is_earlier.sum(axis=1).astype(jnp.int32)


def other_place(verb: jax.Array, at: jax.Array) -> jax.Array:
    """int32[...], the receptacle named behind the object in a command with this verb.

    Args:
      verb: int32[...].
      at: int32[], the receptacle where the person is.
    """
    fixed = np.full(len(VERBS), -1, np.int32)
    for one, where in _WITH.items():
        fixed[one] = where
    where = jnp.asarray(fixed)[verb]
    return jnp.where(where >= 0, where, at)


def is_possible(state: Any) -> jax.Array:
    """bool[n], for each action whether it is possible in this state."""
    at = state.at
    here = jnp.maximum(at, 0)
    is_here = jnp.arange(_R) == at
    can_open = jnp.asarray(CAN_OPEN)
    is_held = state.place == HELD
    can_reach = (at >= 0) & state.is_open[here]
    takes = can_reach & (state.place == at) & ~is_held.any()
    treats = [is_held & (at == where) for where in (SINK, MICROWAVE, FRIDGE)]
    look = jnp.ones((1,), bool)
    possible = [
        ~is_here,
        is_here & can_open & ~state.is_open,
        is_here & can_open & state.is_open,
        takes,
        is_held & can_reach,
        *treats,
        (at == DESK)[None],
        look,
    ]
    return jnp.concatenate(possible) & ~state.done


# Texts -------------------------------------------------------------------------------


def _table(texts) -> tuple[np.ndarray, np.ndarray]:
    """uint8[n, longest], the texts padded with 0, and int32[n], their lengths."""
    encoded = [text.encode() for text in texts]
    longest = max(map(len, encoded))
    rows = [np.frombuffer(text.ljust(longest, b"\0"), np.uint8) for text in encoded]
    return np.stack(rows), np.array([len(text) for text in encoded], np.int32)


def _object_names(objects: int) -> list[str]:
    """The names that objects can have: types numbered from 1 to `objects`."""
    return [f"{kind} {n + 1}" for kind in TYPES for n in range(objects)]


def _join(pieces) -> jax.Array:
    """uint8[ANSWER_BYTES], the concatenation of texts (uint8[k], int32[] length)."""
    place, start = jnp.arange(ANSWER_BYTES), jnp.zeros((), jnp.int32)
    joined = jnp.zeros(ANSWER_BYTES, jnp.uint8)
    for text, length in pieces:
        source = text[jnp.clip(place - start, 0, text.shape[0] - 1)]
        is_mine = (place >= start) & (place < start + length)
        joined = jnp.where(is_mine, source, joined)
        start += length
    return joined


def read_action(text: jax.Array, length: jax.Array, state: Any) -> jax.Array:
    """int32[], what `read_action_text` returns.

    Args:
      text: uint8[ANSWER_BYTES], padded with 0.
      length: int32[], its bytes.
      state: the house, which gives the objects their names.
    """
    # Texts are compared padded with zeros, so one with a zero byte of its own must not
    # be taken for a shorter one.
    is_text = ((text != 0) | (jnp.arange(ANSWER_BYTES) >= length)).all()
    count = state.types.shape[0]
    verb, which = (jnp.asarray(part) for part in verbs_of(count))
    tails = [""] * len(VERBS)
    for one, word in BETWEEN.items():
        tails[one] = f" {word} "
    heads = [name + " " * (v < USE) for v, name in enumerate(VERBS)]
    names = numbers(state.types) + state.types * count

    def pick(table, index):
        texts, lengths = (jnp.asarray(part) for part in table)
        return texts[index], lengths[index]

    def spell(verb, which):
        has_object = (verb >= TAKE) & (verb < USE)
        one = names[jnp.minimum(which, count - 1)]
        thing, thing_length = pick(_table(_object_names(count)), one)
        first, first_length = pick(_table(RECEPTACLES), which)
        where = other_place(verb, state.at)
        second, second_length = pick(_table(RECEPTACLES), jnp.maximum(where, 0))
        return _join(
            [
                pick(_table(heads), verb),
                (thing, jnp.where(has_object, thing_length, 0)),
                (first, jnp.where(verb < TAKE, first_length, 0)),
                pick(_table(tails), verb),
                (second, jnp.where(has_object, second_length, 0)),
            ]
        ), ~has_object | (where >= 0)

    spelled, is_command = jax.vmap(spell)(verb, which)
    is_read = (spelled == text[None]).all(axis=1) & is_command & is_text & ~state.done
    action = jnp.where(is_read.any(), jnp.argmax(is_read), base.NO_ACTION)
    return action.astype(jnp.int32)


def command_texts(state: Any) -> tuple[str | None, ...]:
    """The text of each action in this house, None if it has none. Host side."""
    types, at = np.asarray(state.types), int(state.at)
    count, names = len(types), []
    for one, kind in enumerate(types):
        names.append(f"{TYPES[kind]} {(types[:one] == kind).sum() + 1}")
    texts = []
    for verb, which in zip(*(part.tolist() for part in verbs_of(count)), strict=True):
        where = _WITH.get(verb, at)
        if verb < TAKE:
            texts.append(f"{VERBS[verb]} {RECEPTACLES[which]}")
        elif verb >= USE:
            texts.append(VERBS[verb])
        elif where < 0:
            texts.append(None)
        else:
            end = f"{BETWEEN[verb]} {RECEPTACLES[where]}"
            texts.append(f"{VERBS[verb]} {names[which]} {end}")
    return tuple(texts)


def read_action_text(text: bytes, state: Any) -> int:
    """The action of a command, or NO_ACTION if it is no command in this house.

    A command that can be read may still be impossible: then nothing happens.
    """
    if bool(state.done):
        return base.NO_ACTION
    commands = command_texts(state)
    spelled = text.decode(errors="replace")
    return commands.index(spelled) if spelled in commands else base.NO_ACTION


def action_text(action: Any, state: Any) -> str:
    """The command of an action, or "nothing" if it has none."""
    return command_texts(state)[int(action)] or "nothing"
