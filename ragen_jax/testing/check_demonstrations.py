"""The checks of `check_env` on demonstrations: replies that a model is to imitate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base
from ragen_jax.testing.check_dynamics import MEMBERS, Functions, Plays, require
from ragen_jax.testing.check_helpers import may_act
from ragen_jax.text import prompts, reference_parser
from ragen_jax.text.reference_parser import ParsedReply

_READ = 256  # replies to states of random plays that are read
_PLAYED = 12  # episodes
_REPLIES = 40  # at most, of each


def check_demonstrations(
    env: base.Environment, functions: Functions, plays: Plays, *, must_end: bool
) -> str:
    """Requires valid replies of known actions, which lead some episode to its end.

    Args:
      env: with `demonstrate`.
      functions: of `env`.
      plays: at random; replies are asked for where an agent may act.
      must_end: whether some episode must end.

    Returns:
      A line on the form of the replies, and on how the episodes ended.
    """
    is_open = may_act(plays)
    keys = jax.random.split(jax.random.key(9), is_open.shape)
    reply = jax.jit(jax.vmap(jax.vmap(env.demonstrate)))
    ids = np.asarray(reply(keys, plays.states))[is_open]  # int32[states, Md]
    most = len(env.reply_phrases) - 1
    unknown = ids[(ids < base.NO_PHRASE) | (ids > most)]
    require(
        not unknown.size,
        f"demonstrate gives the id {unknown[:1]}: there are reply_phrases 0 to {most},"
        " and base.NO_PHRASE",
    )
    thinking = "</think>" in base.text_of(env.reply_phrases, ids[0])
    places = np.argwhere(is_open)
    for index in np.unique(np.linspace(0, len(ids) - 1, _READ, dtype=int)):
        play, time = places[index]
        state = jax.tree.map(lambda leaf, at=(play, time): leaf[at], plays.states)
        _read(env, ids[index], state, thinking)
    ended, solved = _play(env, functions, plays, thinking)
    count = min(_PLAYED, len(is_open) // MEMBERS)
    require(
        ended or not must_end,
        f"no demonstrated episode of {count} ended in {_REPLIES} replies: let"
        " demonstrate lead to the end, or use --endless",
    )
    return (
        f"demonstrated replies are valid with env.thinking = {thinking}: of {count}"
        f" episodes {ended} ended, {solved} in success"
    )


def _play(
    env: base.Environment, functions: Functions, plays: Plays, thinking: bool
) -> tuple[int, int]:
    """How many episodes ended, and how many in success, if they act as demonstrated."""
    demonstrate, ended, solved = jax.jit(env.demonstrate), 0, 0
    for play in range(0, len(plays.level), MEMBERS)[:_PLAYED]:
        state = jax.tree.map(lambda leaf, play=play: leaf[play, 0], plays.states)
        success = done = False
        key = jax.random.fold_in(jax.random.key(10), play)
        for _ in range(_REPLIES):
            if done:
                break
            key, reply_key = jax.random.split(key)
            ids = np.asarray(demonstrate(reply_key, state))
            for action in _read(env, ids, jax.device_get(state), thinking).actions:
                key, step_key = jax.random.split(key)
                action = jnp.asarray(action, jnp.int32)
                state, outcome = functions.step(step_key, state, action)
                success, done = success or bool(outcome.success), bool(outcome.done)
        ended, solved = ended + done, solved + success
    return ended, solved


def _read(
    env: base.Environment, ids: np.ndarray, state: Any, thinking: bool
) -> ParsedReply:
    """What a demonstrated reply says. Raises CheckError unless it is valid."""
    text = base.text_of(env.reply_phrases, ids)
    prefix = prompts.reply_prefix(thinking)
    most = env.most_actions or len(text)
    if env.read_action is None:
        parsed = reference_parser.parse_reply(
            prefix.encode(), text.encode(), env.action_names, most, thinking
        )
    else:
        parsed = reference_parser.parse_free_form(
            prefix.encode(),
            text.encode(),
            lambda segment: env.read_action_text(segment, state),
            env.answer_bytes,
            most,
            thinking,
        )
    form = " thought.</think><answer>{0}</answer>" if thinking else "{0}</answer>"
    require(
        parsed.is_valid,
        f"demonstrate replies {text!r}, which is not valid behind {prefix}: let it"
        f" write {form.format(env.example_actions[0])!r}, with names of actions",
    )
    return parsed
