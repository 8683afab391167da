"""Guess the number: replies hold free text such as `guess 12`, not one of fixed names.

An environment of one's own that reads text; docs/text_environments.md explains it.
Every function is on one episode: `vmap` batches it.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

VERB = b"guess "
DIGITS = 4  # the most of a guess
HINTS = ("Guess.\n", "It is higher.\n", "It is lower.\n", "Right.\n")
NONE = (base.NO_ACTION, 0)  # the action of a text that is no guess


@dataclasses.dataclass(frozen=True)
class Settings:
    """Read from the config's `env` section."""

    highest: int = 100  # the number is from 1 to this


@struct.dataclass
class State:
    """One secret number."""

    secret: jax.Array  # int32[]
    hint: jax.Array  # int32[], what is shown, an index of HINTS
    done: jax.Array  # bool[], the number has been guessed


def make(settings: Settings) -> base.Environment:
    """Binds the settings into an environment. Raises ValueError, in one sentence."""
    highest = settings.highest
    # Each split has some of the numbers: with fewer than 50 one could have none.
    if highest not in range(50, 10**DIGITS):
        raise ValueError(f"guess.highest = {highest}: choose a number from 50 to 9999")
    return base.Environment(
        name="guess",
        action_names=("guess",),
        phrases=HINTS,
        observation_phrases=1,
        instruction=(
            f"A number from 1 to {highest} is to be found. Action: guess and a number,"
            " as in guess 12. You are told whether it is higher or lower."
        ),
        reset=functools.partial(reset, highest=highest),
        step=step,
        observe=lambda state: state.hint[None],
        example_actions=("guess 12",),
        most_actions=1,  # A second guess should know the first one's hint.
        answer_bytes=len(VERB) + DIGITS,
        read_action=read_action,
        read_action_text=read_action_text,
        action_size=2,  # (0, the number); NONE otherwise
        sample_action=functools.partial(sample_action, highest=highest),
        action_text=lambda action, state: f"guess {int(action[1])}",
        solve=lambda state: () if state.done else ((0, int(state.secret)),),
    )


def reset(key: jax.Array, split: jax.Array, highest: int) -> State:
    """Draws numbers until one belongs to the split."""

    def draw(key):
        secret = jax.random.randint(key, (), 1, highest + 1)
        state = State(secret, jnp.zeros((), jnp.int32), jnp.zeros((), bool))
        return state, base.split_of(base.content_hash(secret)) == split

    return base.draw_until_fit(draw, key)


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, base.Outcome]:
    """Compares a guess, int32[2]; what is no guess changes nothing."""
    del key  # Nothing here is left to chance.
    counts = (action[0] == 0) & ~state.done
    number = action[1]
    hint = jnp.where(number < state.secret, 1, jnp.where(number > state.secret, 2, 3))
    success = counts & (number == state.secret)
    outcome = base.Outcome(
        reward=success.astype(jnp.float32),
        success=success,
        done=state.done | success,
    )
    hint = jnp.where(counts, hint, state.hint)
    return state.replace(hint=hint, done=outcome.done), outcome


def read_action(text: jax.Array, length: jax.Array, state: State) -> jax.Array:
    """int32[2], what `read_action_text` returns.

    Args:
      text: uint8[answer_bytes], in lower case, padded with 0.
      length: int32[], its bytes.
      state: before the reply; a guess does not depend on it.
    """
    del state
    verb, rest = text[: len(VERB)], text[len(VERB) :]
    digits = rest.astype(jnp.int32) - ord("0")
    count = length - len(VERB)
    # There is no `if` on a traced value: what lies behind the text is masked.
    is_used = jnp.arange(DIGITS) < count
    is_digit = (digits >= 0) & (digits <= 9)
    is_guess = (verb == jnp.asarray(np.frombuffer(VERB, np.uint8))).all()
    is_guess &= (count > 0) & (is_digit | ~is_used).all()
    number = jnp.zeros((), jnp.int32)
    for place in range(DIGITS):
        number = jnp.where(is_used[place], 10 * number + digits[place], number)
    return jnp.where(is_guess, jnp.array([0, number]), jnp.array(NONE))


def read_action_text(text: bytes, state: State) -> tuple[int, int]:
    """The definition of `read_action`, in plain Python."""
    del state
    match = re.fullmatch(VERB + rb"(\d{1,%d})" % DIGITS, text)
    return (0, int(match[1])) if match else NONE


def sample_action(key: jax.Array, highest: int) -> jax.Array:
    """int32[2], a random guess."""
    number = jax.random.randint(key, (), 1, highest + 1)
    return jnp.array([0, number], jnp.int32)
