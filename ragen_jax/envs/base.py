"""What a world is: static settings bound into a few pure functions, each on one game.

`vmap` to batch. Worlds know nothing of tokenizers: an observation is a sequence of
phrase ids, and `phrases` says what each id reads like.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

TRAIN, VALIDATION, TEST = 0, 1, 2  # The splits a level can belong to.
SPLITS = ("train", "validation", "test")
NO_ACTION = -1  # Nothing to do: the state stays as it is and the reward is 0.
NO_PHRASE = -1  # Fills observations up to their fixed length.
MAX_PHRASES = 65_536


@struct.dataclass
class Outcome:
    """What one action did."""

    reward: jax.Array  # float32[], the world's reward, unscaled; 0 after the end
    success: jax.Array  # bool[], True on the action that solved the level
    done: jax.Array  # bool[], the game is over; later steps change nothing


@dataclasses.dataclass(frozen=True)
class World:
    """One environment with its settings bound in. Static: never a traced value."""

    name: str
    action_names: tuple[str, ...]  # action a is called action_names[a] in text
    phrases: tuple[str, ...]  # what the ids that `observe` returns read like
    observation_phrases: int  # M, the fixed length of `observe`'s result
    instruction: str  # the rules, goal and symbols, for the system prompt
    reset: Callable[[jax.Array, jax.Array], Any]  # (key, split int32[]) -> State
    step: Callable[[jax.Array, Any, jax.Array], tuple[Any, Outcome]]
    observe: Callable[[Any], jax.Array]  # State -> int32[M], NO_PHRASE fills up
    example_actions: tuple[str, ...] = ()  # for the reply-format line of the prompt
    # Given int[phrases], the tokens in each phrase: most tokens in one observation.
    # Without it M times the longest phrase is assumed.
    longest_observation: Callable[[Any], int] | None = None
    # Demonstrations, where the world has them: reply texts as phrase ids.
    reply_phrases: tuple[str, ...] = ()
    demonstrate: Callable[[jax.Array, Any], jax.Array] | None = None  # int32[Md]
    # Free-form answers (an equation, the name of an arm). An answer is cut at `||`, its
    # segments stripped of ASCII white space and lower-cased; without these fields they
    # are matched against `action_names`. An answer of more than `answer_bytes` bytes
    # between its tags cannot be read. `read_action` takes one segment: (uint8[
    # answer_bytes] text, 0 behind its end; int32[] length, above 0; State) -> int32[]
    # action, or NO_ACTION for a text that names none. `read_action_text` is the same in
    # plain Python, from bytes and a host State: the definition that it must equal.
    answer_bytes: int = 0
    read_action: Callable[[jax.Array, jax.Array, Any], jax.Array] | None = None
    read_action_text: Callable[[bytes, Any], int] | None = None
    # State -> int32[n, 2], the (row, column) of what a thought should name: the player,
    # the goal, ...; (-1, -1) fills up. For the grounding of thoughts.
    landmarks: Callable[[Any], jax.Array] | None = None
    # Host side, State as NumPy arrays. The picture is uint8[height, width, 3], RGB; the
    # solution a shortest (or good) sequence of actions, empty where there is none.
    picture: Callable[[Any], np.ndarray] | None = None
    solve: Callable[[Any], tuple[int, ...]] | None = None


def check_world(world: World) -> None:
    """Raises ValueError if the world's static parts cannot be used as they are."""
    if not 0 < len(world.phrases) <= MAX_PHRASES:
        raise ValueError(
            f"world {world.name!r} has {len(world.phrases)} phrases; between 1 and"
            f" {MAX_PHRASES} are possible: build observations from smaller phrases"
        )
    lowered = [name.strip().lower() for name in world.action_names]
    for name, low in zip(world.action_names, lowered, strict=True):
        if not low or lowered.count(low) > 1 or any(c in name for c in "<|>"):
            raise ValueError(
                f"world {world.name!r}: action name {name!r} is empty, repeated or"
                " contains one of < | >, which the reply format needs for itself"
            )
    if (world.read_action is None) != (world.answer_bytes == 0):
        raise ValueError(
            f"world {world.name!r} has answer_bytes = {world.answer_bytes}: free-form"
            " answers need both read_action and a positive answer_bytes"
        )


def content_hash(*arrays: jax.Array) -> jax.Array:
    """uint32[], a hash of the arrays' integer contents (FNV-1a, then mixed).

    The same content gives the same hash on every machine, whatever key made it.
    """
    value = jnp.uint32(2166136261)
    flat = jnp.concatenate([a.reshape(-1).astype(jnp.uint32) for a in arrays])
    for word in flat:  # Levels are small; unrolled so that it fuses.
        value = (value ^ word) * jnp.uint32(16777619)
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def split_of(content: jax.Array) -> jax.Array:
    """int32[], the split of a level: 1 in 8 validation, 1 in 8 test, the rest train.

    Args:
      content: uint32[], the level's `content_hash`.
    """
    eighth = (content % jnp.uint32(8)).astype(jnp.int32)
    return jnp.where(eighth == 0, TEST, jnp.where(eighth == 1, VALIDATION, TRAIN))


def text_of(phrases: tuple[str, ...], ids) -> str:
    """The text that phrase ids stand for, on the host. NO_PHRASE reads as nothing."""
    return "".join(phrases[i] for i in ids if i != NO_PHRASE)


def stable_hash(text: str) -> int:
    """A 32-bit hash of a text that does not change between processes."""
    return zlib.crc32(text.encode())
