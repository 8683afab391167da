"""Lines on what random plays showed, for an author to compare with what was meant.

None of it is wrong in itself, so that nothing here fails: ice may never slip, and a
card may be drawn that nobody sees.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base
from ragen_jax.testing.check_dynamics import Plays

_STEPS = 1024  # moves that are repeated


def outcomes_seen(plays: Plays, *, has_succeeded: bool) -> str:
    """How random plays ended and what they earned, in a line.

    Args:
      plays: played at random.
      has_succeeded: whether a solution did; else the line says where success is unseen.
    """
    outcome = plays.outcome
    ends = outcome.done, outcome.success
    ended, solved = (int(end.any(axis=1).sum()) for end in ends)
    count, steps = outcome.done.shape
    returns = outcome.reward.sum(axis=1)
    line = (
        f"of {count} random plays of {steps} actions {ended} ended, {solved} in"
        f" success; returns were from {returns.min():.4g} to {returns.max():.4g}"
    )
    if solved or has_succeeded:
        return line
    return (
        f"{line}. No success was seen: look whether step ever gives it, and supply"
        " `solve` to have it checked"
    )


def steps_seen(env: base.Environment, plays: Plays) -> str:
    """How many moves of random plays changed something, and what decided it."""
    is_over = np.pad(plays.outcome.done[:, :-1], [(0, 0), (1, 0)])
    kinds = plays.actions.reshape(*is_over.shape, -1)[..., 0]
    play, time = np.nonzero(~is_over & (kinds != base.NO_ACTION))
    sample = np.unique(np.linspace(0, len(play) - 1, _STEPS, dtype=int))
    play, time = play[sample], time[sample]
    states, after = (
        jax.tree.map(lambda leaf, later=later: leaf[play, time + later], plays.states)
        for later in (0, 1)
    )
    index = np.arange(len(play), dtype=np.int32)
    repeat = jax.jit(jax.vmap(lambda *of_one: _repeat(env, *of_one)))
    by_key, by_action = map(
        np.asarray, repeat(index, states, plays.actions[play, time])
    )
    is_changed = _is_changed(states, after, by_action)
    text = plays.observation
    is_shown = (text[play, time] != text[play, time + 1]).any(axis=1)
    line = (
        f"of {len(play)} moves {is_changed.sum()} changed the state and"
        f" {is_shown.sum()} what is shown; {by_action.any(axis=1).sum()} depended on"
        f" the action and {by_key.any(axis=1).sum()} on the key"
    )
    if by_key.any():
        return line
    return (
        f"{line}: members of a group that act alike fare alike, for chance in steps"
        " would come from their key"
    )


def _repeat(env: base.Environment, index, state, action) -> tuple[Any, Any]:
    """What another key, and another action, make different.

    bool[leaves] each, for the leaves of the state after the move, then those of its
    outcome.
    """
    key, other_key, action_key = jax.random.split(
        jax.random.fold_in(jax.random.key(8), index), 3
    )
    other_action = base.random_action(action_key, env).astype(jnp.int32)
    keys = jnp.stack([key, other_key, key])
    actions = jnp.stack([action, action, other_action])
    # Batched, not called thrice: a step of words takes seconds to compile.
    results = jax.vmap(env.step, (0, None, 0))(keys, state, actions)
    leaves = [leaf.reshape(3, -1) for leaf in jax.tree.leaves(results)]
    differs = jnp.stack([(leaf != leaf[:1]).any(axis=1) for leaf in leaves])
    return differs[:, 1], differs[:, 2]


def _is_changed(states: Any, after: Any, by_action: np.ndarray) -> np.ndarray:
    """bool[n], whether each of n moves changed its state, but for keys kept in it.

    A leaf is taken for a key's data if it is uint32, every move changes it, and no
    action makes a difference to it: so a key advances. A position in uint32, however
    it is packed, depends on the actions.

    Args:
      states, after: leaves [n, ...], before and after the moves.
      by_action: bool[n, leaves of the state and more], as of `_repeat`.
    """
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True)
    changes = []
    for number, (old, new) in enumerate(pairs):
        change = (old != new).reshape(len(old), -1).any(axis=1)
        is_key = old.dtype == np.uint32 and change.all()
        is_key = is_key and not by_action[:, number].any()
        if not is_key:
            changes.append(change)
    return np.any(changes, axis=0)
