"""One game at a time, for a reader: played by a person, by chance or by a solver."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ragen_jax.envs import base
from ragen_jax.rollout import keys
from ragen_jax.settings import UserError

# (State as NumPy arrays, actions left) -> the next actions; None leaves the game.
Player = Callable[[Any, int], tuple[int, ...] | None]

_WHITE = " \t\n\r\v\f"  # ASCII, as everywhere in replies.


@dataclasses.dataclass(frozen=True)
class Table:
    """Where games are played. Make it once: its functions are compiled once."""

    world: base.World
    reset: Callable
    step: Callable
    observe: Callable
    tell: Callable[[str], None]  # takes lines for the reader


def make_table(world: base.World, tell: Callable[[str], None]) -> Table:
    """A table for games of the world."""
    return Table(
        world=world,
        reset=jax.jit(world.reset),
        step=jax.jit(world.step),
        observe=jax.jit(world.observe),
        tell=tell,
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
    """Plays the level that evaluations under the same seed and split know by `episode`.

    Args:
      table: the world, and whom to tell.
      player: names the actions.
      seed, split, episode: decide the level and the world's chance.
      actions: most actions.
      show: is called with each state (NumPy arrays) and its number, from 0.

    Returns:
      Whether the game came to an end; False if the player left it.
    """
    key = keys.iteration_key(seed, split, 0)
    state = jax.device_get(table.reset(keys.level_key(key, episode), np.int32(split)))
    table.tell(_text(table, state))
    show(0, state)
    earned, played, plan = 0.0, 0, ()
    while played < actions:
        if not plan:
            plan = player(state, actions - played)
        if plan is None:
            table.tell(f"left after {_count(played)}, return {earned:.4g}")
            return False
        action, *plan = plan
        chance = keys.world_key(key, episode, played)
        state, outcome = jax.device_get(table.step(chance, state, np.int32(action)))
        played += 1
        earned += float(outcome.reward)
        table.tell(
            f"{table.world.action_names[action]}: reward {outcome.reward:.4g},"
            f" {_count(actions - played)} left\n{_text(table, state)}"
        )
        show(played, state)
        if outcome.done:
            how = "solved" if outcome.success else "over"
            table.tell(f"{how} after {_count(played)}, return {earned:.4g}")
            return True
    table.tell(f"out of actions, return {earned:.4g}")
    return True


def _text(table: Table, state: Any) -> str:
    ids = np.asarray(table.observe(state))
    return base.text_of(table.world.phrases, ids).removesuffix("\n")


def _count(actions: int) -> str:
    return f"{actions} action{'' if actions == 1 else 's'}"


# Players -----------------------------------------------------------------------------


def random_player(world: base.World, seed: int) -> Player:
    """Each action equally likely."""
    chance = random.Random(seed)
    return lambda state, left: (chance.randrange(len(world.action_names)),)


def solving_player(table: Table) -> Player:
    """The world's own solutions, looked for again wherever chance interferes."""
    solve = table.world.solve
    if solve is None:
        raise UserError(
            f"--policy=solver: the world {table.world.name} has no solver: choose"
            " --policy=human or --policy=random"
        )

    def play(state: Any, left: int) -> tuple[int, ...] | None:
        plan = tuple(solve(state))
        if not plan:
            table.tell("the solver finds no way on")
            return None
        return plan if _is_sure(table, state, plan) else plan[:1]

    return play


def _is_sure(table: Table, state: Any, plan: tuple[int, ...]) -> bool:
    """Whether the plan leads to the same states under different chances."""
    ends = []
    for seed in range(3):
        end = state
        for number, action in enumerate(plan):
            key = jax.random.fold_in(jax.random.key(seed), number)
            end, _ = table.step(key, end, np.int32(action))
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
      table: the world, and whom to tell what was not understood.
      ask: shows a prompt and gives a line, or None at the end of the input.
    """

    def play(state: Any, left: int) -> tuple[int, ...] | None:
        while True:
            line = ask(f"{_count(left)} left> ")
            if line is None or line.strip().lower() in ("q", "quit"):
                return None
            try:
                if actions := read_line(line, table.world, state):
                    return actions
            except ValueError as error:
                table.tell(str(error))

    return play


def read_line(line: str, world: base.World, state: Any) -> tuple[int, ...]:
    """The actions that a line names; none for an empty one.

    Segments between `||` are read as those of a reply. Where actions have fixed names,
    unambiguous beginnings do, and commas or spaces separate as well.

    Raises:
      ValueError: if a part of it is no action.
    """
    segments = [part.strip(_WHITE) for part in line.split("||")]
    segments = [segment for segment in segments if segment]
    if world.read_action_text is None:
        return tuple(a for part in segments for a in _read_names(part, world))
    actions = []
    for segment in segments:
        text = segment.encode().lower()
        action = base.NO_ACTION
        if len(text) <= world.answer_bytes:
            action = int(world.read_action_text(text, state))
        if action == base.NO_ACTION:
            example = " or ".join(repr(action) for action in world.example_actions)
            raise ValueError(f"{segment!r} is no action here: write as in {example}")
        actions.append(action)
    return tuple(actions)


def _read_names(text: str, world: base.World) -> tuple[int, ...]:
    if (action := _find(text, world.action_names)) is not None:
        return (action,)
    actions = []
    for word in text.replace(",", " ").split():
        if (action := _find(word, world.action_names)) is None:
            raise ValueError(
                f"{word!r} is no action here: choose {', '.join(world.action_names)},"
                " or unambiguous beginnings of them"
            )
        actions.append(action)
    return tuple(actions)


def _find(text: str, names: tuple[str, ...]) -> int | None:
    """The action with that name, or the only one whose name begins so."""
    lowered = [name.lower() for name in names]
    if text.lower() in lowered:
        return lowered.index(text.lower())
    alike = [a for a, name in enumerate(lowered) if name.startswith(text.lower())]
    return alike[0] if len(alike) == 1 else None
