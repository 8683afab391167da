"""Imperfect demonstrations for Bandit, for the supervised start of small models.

The thought says of each arm how its name sounds, then what such an arm pays; the arm
is picked at random, whatever pays more. A large model knows from its pretraining how a
name sounds, those of the test split included. So this is taught for the names of all
splits, in random pairs; which sound pays more is left to RL.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs.bandit import env as bandit
from ragen_jax.envs.bandit.env import NAMES, Bandit
from ragen_jax.envs.base import Environment

_SOUNDS = (("steady", "bold"), ("safe", "risky"), ("careful", "daring"))
_REASONS = (" Steady pays for sure.", " Bold may pay much.")
_CLOSE, _END = 0, 1
_FIXED = ("</think><answer>", "</answer>")
# The ids of the first phrase of each kind, in the order of `reply_phrases`.
_REASON = len(_FIXED)
_NAME = _REASON + len(_REASONS)
_NAME_COLON = _NAME + len(NAMES)
_SOUND_COMMA = _NAME_COLON + len(NAMES)
_SOUND_STOP = _SOUND_COMMA + 2 * len(_SOUNDS)


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How the demonstrations choose."""

    risky: float = 0.5  # share of replies that pick the high-risk arm


def with_demonstrations(
    env: Environment, settings: Bandit, player: Demonstrator, *, thinking: bool
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in.

    Args:
      env: made from `settings`.
      settings: not read; with `reverse` names sound the same.
      player: how it chooses.
      thinking: whether replies begin within `<think>`, else within `<answer>`.
    """
    del settings  # The state holds all that a reply needs.
    sounds = [sound for pair in _SOUNDS for sound in pair]
    return dataclasses.replace(
        env,
        reply_phrases=(
            *_FIXED,
            *_REASONS,
            *NAMES,
            *(f" {name}:" for name in NAMES),
            *(f" {sound}," for sound in sounds),
            *(f" {sound}." for sound in sounds),
        ),
        demonstrate=functools.partial(_demonstrate, player=player, thinking=thinking),
        reset=_reset_any,
    )


def _reset_any(key: jax.Array, split: int) -> bandit.State:
    """Pairs any steady name with any risky one, whatever the split."""
    del split
    pair_key, order_key = jax.random.split(key)
    pair = jax.random.randint(pair_key, (2,), 0, len(NAMES) // 2)
    high = jax.random.bernoulli(order_key).astype(jnp.int32)
    arms = 2 * pair + jnp.arange(2)  # the steady one first
    arms = jnp.where(high == 1, arms, arms[::-1]).astype(jnp.int32)
    return bandit.State(arms=arms, high=high, done=jnp.zeros((), bool))


def _demonstrate(
    key: jax.Array, state: bandit.State, player: Demonstrator, thinking: bool
) -> jax.Array:
    """int32[Md], one reply as phrase ids, without the end-of-turn token."""
    choice_key, words_key = jax.random.split(key)
    is_high = jax.random.bernoulli(choice_key, player.risky)
    place = jnp.where(is_high, state.high, 1 - state.high)
    arm = state.arms[place]
    answer = [_NAME + arm, _END]
    if thinking:
        sounds_risky = state.arms % 2
        words = 2 * jax.random.randint(words_key, (), 0, len(_SOUNDS)) + sounds_risky
        comparison = [_NAME_COLON + state.arms[0], _SOUND_COMMA + words[0]]
        comparison += [_NAME_COLON + state.arms[1], _SOUND_STOP + words[1]]
        answer = [*comparison, _REASON + arm % 2, _CLOSE, *answer]
    return jnp.stack([jnp.asarray(phrase, jnp.int32) for phrase in answer])
