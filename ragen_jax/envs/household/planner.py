"""Solves the household's tasks, knowing where everything is. Host side."""

from typing import Any

import numpy as np

from ragen_jax.envs.household import commands
from ragen_jax.envs.household.commands import (
    CLEAN_IT,
    COOL_IT,
    GO,
    HEAT_IT,
    OPEN,
    PLACE,
    TAKE,
    USE,
)
from ragen_jax.envs.household.house import (
    CLEAN,
    COLD,
    COOL,
    COUNTER,
    DESK,
    FRIDGE,
    HEAT,
    HELD,
    HOT,
    KIND_OF,
    LOOK,
    MICROWAVE,
    SINK,
    TWO,
)

# Task -> the receptacle where an object is treated, and the verb.
_TREATMENTS = {
    CLEAN: (SINK, CLEAN_IT),
    HEAT: (MICROWAVE, HEAT_IT),
    COOL: (FRIDGE, COOL_IT),
}


class _Walk:
    """A simulated person in a copy of the house, who records the actions."""

    def __init__(self, state: Any):
        verb, which = commands.verbs_of(len(state.types))
        pairs = zip(verb.tolist(), which.tolist(), strict=True)
        self.number = {pair: action for action, pair in enumerate(pairs)}
        self.place = np.array(state.place)
        self.is_open = np.array(state.is_open)
        self.at = int(state.at)
        self.actions: list[int] = []

    def do(self, verb: int, which: int) -> None:
        self.actions.append(self.number[verb, which])

    def go(self, where: int, *, opens: bool = True) -> None:
        """Goes to a receptacle, unless already there, and opens it if closed."""
        if self.at != where:
            self.do(GO, where)
            self.at = where
        if opens and not self.is_open[where]:
            self.do(OPEN, where)
            self.is_open[where] = True

    def put(self, one: int, where: int) -> None:
        self.go(where)
        self.do(PLACE, one)
        self.place[one] = where

    def take(self, one: int) -> None:
        """Takes an object, after putting down any other."""
        if self.place[one] == HELD:
            return
        for other in np.flatnonzero(self.place == HELD):
            self.put(int(other), self.at if self.at >= 0 else COUNTER)
        self.go(int(self.place[one]))
        self.do(TAKE, one)
        self.place[one] = HELD


def plan(state: Any) -> tuple[int, ...]:
    """Actions that solve the task from any state; empty once it is solved."""
    if bool(state.done):
        return ()
    walk, task = _Walk(state), int(state.task)
    is_target = np.asarray(KIND_OF) == int(state.target)
    objects = np.flatnonzero(np.asarray(state.types) == int(state.wanted)).tolist()
    # What is carried comes first.
    objects.sort(key=lambda item: walk.place[item] != HELD)
    if task == LOOK:
        walk.take(objects[0])
        walk.go(DESK, opens=False)
        walk.do(USE, 0)
        return tuple(walk.actions)
    goal = int(np.flatnonzero(is_target)[0])

    def is_put(item: int) -> bool:
        return walk.place[item] < HELD and bool(is_target[walk.place[item]])

    missing = [item for item in objects if not is_put(item)]
    if task == TWO:
        for item in missing[: 2 - sum(is_put(item) for item in objects)]:
            walk.take(item)
            walk.put(item, goal)
        return tuple(walk.actions)
    item = (missing or objects)[0]
    walk.take(item)
    if task in _TREATMENTS and not _is_treated(state, task, item):
        where, verb = _TREATMENTS[task]
        walk.go(where, opens=False)
        walk.do(verb, item)
    walk.put(item, goal)
    return tuple(walk.actions)


def _is_treated(state: Any, task: int, one: int) -> bool:
    """Whether the object is already clean, hot or cold, as the task asks."""
    if task == CLEAN:
        return bool(state.is_clean[one])
    return int(state.warmth[one]) == {HEAT: HOT, COOL: COLD}[task]
