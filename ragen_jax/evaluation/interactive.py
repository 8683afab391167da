"""Plays one episode at a time and shows it; a person, a rule, a solver or chance acts.

launch/play.py uses it, through `terminal`.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ragen_jax.envs import base, first_levels
from ragen_jax.errors import UserError
from ragen_jax.rollout import prng
from ragen_jax.utils.words import counted

# (State as NumPy arrays, actions left) -> the next actions; None ends the game.
Player = Callable[[Any, int], tuple[int, ...] | None]

_WHITE = " \t\n\r\v\f"  # ASCII, as everywhere in replies.


@dataclasses.dataclass(frozen=True)
class Table:
    """An environment with compiled functions, and where to show what happens. Make it
    once, so that the functions are compiled once."""

    env: base.Environment
    reset: Callable
    step: Callable
    observe: Callable
    show: Callable[[str], None]  # shows a text


def make_table(env: base.Environment, show: Callable[[str], None]) -> Table:
    """Makes a table for an environment."""
    return Table(
        env=env,
        reset=jax.jit(env.reset),
        step=jax.jit(env.step),
        observe=jax.jit(env.observe),
        show=show,
    )


def play_episode(
    table: Table,
    player: Player,
    *,
    seed: int,
    split: int,
    episode: int,
    actions: int,
    show: Callable[[int, Any], None] = lambda number, state: None,
) -> bool:
    """Plays level number `episode` of evaluations with the same seed and split.

    Args:
      table: the environment, and where to show what happens.
      player: names the actions.
      seed, split, episode: decide the level and the environment's randomness.
      actions: most actions.
      show: called with the number of each state, from 0, and the state (NumPy arrays).

    Returns:
      Whether the game came to an end; False if the player left it.
    """
    key = prng.iteration_key(seed, split, 0)
    state = jax.device_get(table.reset(prng.level_key(key, episode), np.int32(split)))
    table.show(_text(table, state))
    show(0, state)
    earned, played, plan = 0.0, 0, ()
    while played < actions:
        if not plan:
            plan = player(state, actions - played)
        if plan is None:
            table.show(f"left after {counted(played, 'action')}, return {earned:.4g}")
            return False
        action, *plan = plan
        text = base.text_of_action(action, table.env, state)
        env_key = prng.env_key(key, episode, played)
        after = table.step(env_key, state, np.int32(action))
        state, outcome = jax.device_get(after)
        played += 1
        earned += float(outcome.reward)
        table.show(
            f"{text}: reward {outcome.reward:.4g},"
            f" {counted(actions - played, 'action')} left\n{_text(table, state)}"
        )
        show(played, state)
        if outcome.done:
            how = "solved" if outcome.success else "over"
            table.show(f"{how} after {counted(played, 'action')}, return {earned:.4g}")
            return True
    table.show(f"out of actions, return {earned:.4g}")
    return True


def _text(table: Table, state: Any) -> str:
    ids = np.asarray(table.observe(state))
    if wrong := first_levels.unknown_sentence(table.env, ids):
        raise UserError(f"the environment {table.env.name}: {wrong}")
    return base.text_of(table.env.phrases, ids).removesuffix("\n")


# Players -----------------------------------------------------------------------------


def random_player(env: base.Environment, seed: int) -> Player:
    """Draws by `sample_action`; without it, each action is equally likely."""
    rng = random.Random(seed)
    if env.sample_action is None:
        return lambda state, left: (rng.randrange(len(env.action_names)),)
    sample = jax.jit(env.sample_action)

    def play(state: Any, left: int) -> tuple[Any, ...]:
        return (np.asarray(sample(jax.random.key(rng.getrandbits(31)))),)

    return play


def rule_player(env: base.Environment) -> Player:
    """Plays by the environment's `rule`. Raises UserError if it has none."""
    if env.rule is None:
        raise UserError(
            f"--policy=rule: the environment {env.name} has no rule-based player:"
            f" choose {_players(env)}"
        )
    rule = jax.jit(env.rule)
    return lambda state, left: (np.asarray(rule(state)),)


def solving_player(table: Table) -> Player:
    """Plays by the environment's `solve`. If results are random, solves again after
    every action."""
    solve = table.env.solve
    if solve is None:
        raise UserError(
            f"--policy=solver: the environment {table.env.name} has no solver: choose"
            f" {_players(table.env)}"
        )

    def play(state: Any, left: int) -> tuple[int, ...] | None:
        plan = tuple(solve(state))
        if not plan:
            table.show("the solver finds no solution from here")
            return None
        return plan if is_sure(table.step, state, plan) else plan[:1]

    return play


def _players(env: base.Environment) -> str:
    """What --policy may be for the environment, to follow upon "choose"."""
    own = {"rule": env.rule, "solver": env.solve}
    names = ["human", "random", *(name for name, player in own.items() if player)]
    return " or ".join(f"--policy={name}" for name in names)


def is_sure(step: Callable, state: Any, plan: tuple[int, ...]) -> bool:
    """Whether the plan leads to the same states under different keys.

    Args:
      step: the environment's, compiled.
      state: where the plan begins.
      plan: actions.
    """
    ends = []
    for seed in range(3):
        end = state
        for number, action in enumerate(plan):
            key = jax.random.fold_in(jax.random.key(seed), number)
            end, _ = step(key, end, np.int32(action))
        ends.append(jax.tree.leaves(end))
    pairs = itertools.pairwise(ends)
    return all(
        np.array_equal(a, b)
        for one, other in pairs
        for a, b in zip(one, other, strict=True)
    )


def human_player(table: Table, ask: Callable[[str], str | None]) -> Player:
    """A person who types lines; "q" or the end of the input leaves.

    Args:
      table: the environment, and where to show errors.
      ask: shows a prompt and returns a line, or None at the end of the input.
    """

    def play(state: Any, left: int) -> tuple[int, ...] | None:
        while True:
            line = ask(f"{counted(left, 'action')} left> ")
            if line is None or line.strip().lower() in ("q", "quit"):
                return None
            try:
                if actions := read_line(line, table.env, state):
                    return actions
            except ValueError as error:
                table.show(str(error))

    return play


def read_line(line: str, env: base.Environment, state: Any) -> tuple[int, ...]:
    """The actions that a line names, as many as of a reply; none for an empty line.

    Segments between `||` are read like those of a reply. If actions have fixed names,
    unambiguous beginnings of them suffice, and commas or spaces also separate.

    Raises:
      ValueError: if a part of it is not an action.
    """
    segments = [part.strip(_WHITE) for part in line.split("||")]
    segments = [segment for segment in segments if segment]
    most = env.most_actions or None
    if env.read_action_text is None:
        return tuple(a for part in segments for a in _read_names(part, env))[:most]
    actions = []
    for segment in segments[:most]:
        text = segment.encode().lower()
        action = base.NO_ACTION
        if len(text) <= env.answer_bytes:
            action = env.read_action_text(text, state)
        if np.ravel(action)[0] == base.NO_ACTION:
            example = " or ".join(repr(action) for action in env.example_actions)
            raise ValueError(
                f"{segment!r} is not an action here: write as in {example}"
            )
        actions.append(action)
    return tuple(actions)


def _read_names(text: str, env: base.Environment) -> tuple[int, ...]:
    if (action := _find(text, env.action_names)) is not None:
        return (action,)
    actions = []
    for word in text.replace(",", " ").split():
        if (action := _find(word, env.action_names)) is None:
            raise ValueError(
                f"{word!r} is not an action here: choose"
                f" {base.listed(env.action_names)}, or unambiguous beginnings of them"
            )
        actions.append(action)
    return tuple(actions)


def _find(text: str, names: tuple[str, ...]) -> int | None:
    """The action with that name, or the only one whose name begins with the text."""
    lowered, said = [base.as_read(name) for name in names], base.as_read(text)
    if said in lowered:
        return lowered.index(said)
    alike = [a for a, name in enumerate(lowered) if name.startswith(said)]
    return alike[0] if len(alike) == 1 else None
