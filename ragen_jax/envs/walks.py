"""Demonstrated replies for boards: what is where, a planned walk, and the answer.

The thought names the places of the player and of the landmarks, then each action of the
plan with the place that it leads to. The answer repeats the actions. FrozenLake's and
Sokoban's demonstrations use this:

   At (0, 1), goal (2, 1): Down (1, 1), Down (2, 1).</think>
   <answer>Down || Down</answer>
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import NO_PHRASE

_BEFORE = (" At",)  # Then the landmarks.
_BEHIND = (":", ",", ".", "</think><answer>", "</answer>")


def walk_phrases(
    landmarks: Sequence[str], side: int, names: Sequence[str]
) -> tuple[str, ...]:
    """The `Environment.reply_phrases` that `walk_reply` indexes.

    Args:
      landmarks: the text before the place of each, as in ", goal".
      side: S, rows and columns of the board.
      names: of the actions.
    """
    places = tuple(f" ({r}, {c})" for r in range(side) for c in range(side))
    spaced = tuple(f" {name}" for name in names)
    further = tuple(f" || {name}" for name in names)
    return (
        _BEFORE + tuple(landmarks) + _BEHIND + places + spaced + tuple(names) + further
    )


def walk_reply(
    actions: jax.Array,
    walked: jax.Array,
    player: jax.Array,
    landmarks: Sequence[jax.Array],
    is_blind: jax.Array,
    *,
    side: int,
    names: int,
    thinking: bool,
) -> jax.Array:
    """int32[Md], one reply as phrase ids, without the end-of-turn token.

    Args:
      actions: int32[longest], padded with -1.
      walked: int32[longest], row * S + column of the place that each action leads to.
      player: int32[], row * S + column.
      landmarks: int32[] each, row * S + column, in the order of their phrases.
      is_blind: bool[], whether the thought leaves out the landmarks.
      side: S.
      names: how many actions there are.
      thinking: whether a thought stands before the answer.
    """
    # The ids of phrases, or of the first of their kind, in the order of `walk_phrases`.
    colon = len(_BEFORE) + len(landmarks)
    comma, full_stop, close, end, place = (colon + i for i in range(1, 6))
    spaced = place + side * side
    first, further = spaced + names, spaced + 2 * names
    is_action = actions >= 0
    is_first = jnp.arange(actions.shape[0]) == 0
    answer = jnp.where(
        is_action, jnp.where(is_first, first, further) + actions, NO_PHRASE
    )
    if not thinking:
        return jnp.concatenate([answer, jnp.array([end])]).astype(jnp.int32)
    named_landmarks = [
        jnp.where(is_blind, NO_PHRASE, phrase)
        for index, at in enumerate(landmarks)
        for phrase in (len(_BEFORE) + index, place + at)
    ]
    head = jnp.stack([jnp.int32(0), place + player, *named_landmarks, jnp.int32(colon)])
    between = jnp.where(is_first, NO_PHRASE, comma)
    walk = jnp.stack([between, spaced + actions, place + walked], axis=1)
    walk = jnp.where(is_action[:, None], walk, NO_PHRASE).reshape(-1)
    parts = [head, walk, jnp.array([full_stop, close]), answer, jnp.array([end])]
    return jnp.concatenate(parts).astype(jnp.int32)
