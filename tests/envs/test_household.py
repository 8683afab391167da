"""The household: against a plain-Python house, its planner, its texts."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs.household import commands, env, house
from ragen_jax.envs.household.env import Household
from ragen_jax.errors import SettingsError

LEVELS = 24  # of each split
SETTINGS = Household()


@functools.cache
def _levels():
    keys = jax.random.split(jax.random.key(1), 3 * LEVELS)
    splits = jnp.repeat(jnp.arange(3, dtype=jnp.int32), LEVELS)
    reset = functools.partial(env.reset, settings=SETTINGS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(reset))(keys, splits))


def _level(index):
    return jax.tree.map(lambda leaf: leaf[index], _levels())


@pytest.fixture(scope="module")
def environment():
    return env.make(SETTINGS)


@pytest.fixture(scope="module")
def step():
    return jax.jit(env.step)


_possible = jax.jit(commands.is_possible)


class PlainHouse:
    """The household's rules over names."""

    def __init__(self, state):
        self.types, self.where, counts = {}, {}, {}
        for kind, place in zip(state.types.tolist(), state.place.tolist(), strict=True):
            counts[kind] = counts.get(kind, 0) + 1
            name = f"{house.TYPES[kind]} {counts[kind]}"
            self.types[name], self.where[name] = house.TYPES[kind], None
            self.where[name] = house.RECEPTACLES[place]
        self.state_of = {name: set() for name in self.types}
        rooms = [n for names in house.ROOMS.values() for n in names]
        self.closed = {n[1:] for n in rooms if n[0] == "*"}
        self.lids = set(self.closed)
        self.at = None
        self.task = house.TASKS[state.task]
        self.wanted, self.target = house.TYPES[state.wanted], house.KINDS[state.target]

    def possible(self) -> list[str]:
        """The commands that do something."""
        found = [f"go to {r}" for r in house.RECEPTACLES if r != self.at]
        found += ["look"]
        if self.at in self.lids:
            verb = "open" if self.at in self.closed else "close"
            found.append(f"{verb} {self.at}")
        held = [name for name, where in self.where.items() if where == "hand"]
        if self.at and self.at not in self.closed:
            found += [f"put {name} in/on {self.at}" for name in held]
            if not held:
                here = [n for n, where in self.where.items() if where == self.at]
                found += [f"take {name} from {self.at}" for name in here]
        tools = {"sink 1": "clean", "microwave 1": "heat", "fridge 1": "cool"}
        if self.at in tools:
            found += [f"{tools[self.at]} {name} with {self.at}" for name in held]
        if self.at == "desk 1":
            found.append("use desklamp 1")
        return found

    def act(self, command: str) -> bool:
        """Whether the task is solved."""
        verb, _, rest = command.partition(" ")
        name = " ".join(rest.split(" ")[:2])
        if verb == "go":
            self.at = rest.removeprefix("to ")
        elif verb == "open":
            self.closed.remove(rest)
        elif verb == "close":
            self.closed.add(rest)
        elif verb == "take":
            self.where[name] = "hand"
        elif verb == "put":
            self.where[name] = self.at
        elif verb == "clean":
            self.state_of[name].add("clean")
        elif verb in ("heat", "cool"):
            self.state_of[name] -= {"heat", "cool"}
            self.state_of[name].add(verb)
        mine = [name for name, kind in self.types.items() if kind == self.wanted]
        if self.task == "look":
            return verb == "use" and any(self.where[name] == "hand" for name in mine)
        placed = [n for n in mine if self.where[n].rsplit(" ", 1)[0] == self.target]
        if self.task in ("clean", "heat", "cool"):
            placed = [name for name in placed if self.task in self.state_of[name]]
        return len(placed) >= (2 if self.task == "two" else 1)


@pytest.mark.slow
def test_random_commands_do_what_they_do_in_a_plain_python_house(environment, step):
    chance, solved = random.Random(3), 0
    for index in range(0, 3 * LEVELS, 2):
        state, plain = _level(index), PlainHouse(_level(index))
        plan = list(environment.solve(state)) if chance.random() < 0.5 else []
        for _ in range(25):
            texts = commands.command_texts(state)
            can = np.asarray(_possible(state))
            named = [text for text, is_one in zip(texts, can, strict=True) if is_one]
            assert sorted(named) == sorted(plain.possible())
            text = texts[plan.pop(0)] if plan else chance.choice(named)
            if chance.random() < 0.1 and not plan:
                text = chance.choice([t for t in texts if t])
            action = environment.read_action_text(text.encode(), state)
            does = text in plain.possible()
            state, outcome = jax.device_get(
                step(jax.random.key(0), state, jnp.int32(action))
            )
            assert state.happened == does
            expected = plain.act(text) if does else False
            assert outcome.success == outcome.done == expected
            assert outcome.reward == (env.SOLVED_REWARD if expected else 0)
            if expected:
                solved += 1
                break
    assert solved > 9


@pytest.mark.slow
def test_the_planner_solves_every_level_also_from_the_middle(environment, step):
    chance, tasks, longest = random.Random(4), set(), 0
    for index in range(3 * LEVELS):
        state = _level(index)
        tasks.add(house.TASKS[state.task])
        for _ in range(chance.choice([0, 0, 20])):
            can = np.flatnonzero(np.asarray(_possible(state)))
            if not state.done:
                action = jnp.int32(chance.choice(can.tolist()))
                state, _ = jax.device_get(step(jax.random.key(0), state, action))
        if state.done:
            continue
        plan = environment.solve(state)
        longest = max(longest, len(plan))
        for action in plan:
            state, outcome = jax.device_get(
                step(jax.random.key(0), state, jnp.int32(action))
            )
            assert state.happened
        assert outcome.success
    assert tasks == set(house.TASKS) and longest <= 14


def test_the_longest_observation_has_room_for_the_fullest_place(environment):
    state, count = _level(0), SETTINGS.objects
    state = state.replace(
        place=np.full(count, house.DESK, np.int32),
        at=np.int32(house.DESK),
        warmth=np.full(count, house.HOT, np.int32),
        happened=np.zeros((), bool),
    )
    ids = np.asarray(jax.jit(environment.observe)(state))
    text = base.text_of(environment.phrases, ids)
    assert text.count("(hot)") == text.count("\ntake ") == count
    lengths = np.ones(len(environment.phrases), int)
    longest = environment.longest_observation(lengths)
    assert (ids != base.NO_PHRASE).sum() <= longest <= environment.observation_phrases


@pytest.mark.slow
def test_listed_commands_are_those_that_do_something(environment):
    observe = jax.jit(environment.observe)
    for index in range(0, 3 * LEVELS, 7):
        for at in (env.NOWHERE, house.FRIDGE, house.DESK):
            state = _level(index).replace(at=np.int32(at))
            text = base.text_of(environment.phrases, observe(state))
            listed = text.partition("Commands:\n")[2].strip().split("\n")
            can = np.asarray(_possible(state))
            texts = commands.command_texts(state)
            assert listed == [t for t, is_one in zip(texts, can, strict=True) if is_one]


@pytest.mark.parametrize(
    ("text", "is_command"), [(b"look", True), (b"look\0", False), (b"\0look", False)]
)
def test_a_command_that_a_byte_0_follows_is_none(environment, text, is_command):
    padded = np.zeros(environment.answer_bytes, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    read = jax.jit(environment.read_action)(padded, jnp.int32(len(text)), _level(0))
    assert read == environment.read_action_text(text, _level(0))
    assert (read != base.NO_ACTION) == is_command


def test_levels_ask_for_nothing_but_what_can_be_wished_for():
    levels, known = _levels(), {tuple(row) for row in env.wishes(SETTINGS).tolist()}
    asked = np.stack([levels.task, levels.wanted, levels.target], axis=1)
    assert {tuple(row) for row in asked.tolist()} <= known
    assert set(levels.task.tolist()) == set(range(len(house.TASKS)))


def test_no_task_is_asked_for_in_two_splits():
    levels = _levels()
    rows = np.stack([levels.task, levels.wanted, levels.target], 1)
    train, validation, test = (set(map(tuple, r)) for r in rows.reshape(3, LEVELS, 3))
    assert not train & validation and not train & test and not validation & test


@pytest.mark.parametrize("split", range(3))
def test_each_kind_of_task_is_as_frequent_in_each_split(split):
    """Of "two" the test has 20 tasks, of "look" one."""
    count = 1200
    reset = functools.partial(env.reset, settings=SETTINGS)
    keys = jax.random.split(jax.random.key(5), count)
    drawn = jax.jit(jax.vmap(lambda key, split: reset(key, split).task, (0, None)))
    found = np.bincount(np.asarray(drawn(keys, jnp.int32(split))), minlength=6)
    share = 1 / 6
    deviation = (count * share * (1 - share)) ** 0.5
    assert np.abs(found - count * share).max() < 4 * deviation, found


def test_the_documents_table_says_how_many_tasks_each_split_has():
    rows = env.wishes(SETTINGS)
    splits = np.asarray(jax.vmap(env._split_of)(rows))
    text = " ".join((ROOT / "docs" / "text_environments.md").read_text().split())
    for index, task in enumerate(house.TASKS):
        counts = [((rows[:, 0] == index) & (splits == k)).sum() for k in range(3)]
        assert "{} {} / {} / {}".format(task, *counts) in text


def test_a_kind_of_task_that_a_split_lacks_is_refused(monkeypatch):
    split_of = env._split_of

    def without_look(wish):
        lacks = (wish[0] == house.LOOK) & (split_of(wish) == base.TEST)
        return jnp.where(lacks, base.TRAIN, split_of(wish))

    monkeypatch.setattr(env, "_split_of", without_look)
    env.check(Household(tasks=("put", "two")))
    with pytest.raises(ValueError, match="names 'look', of which the split test has"):
        env.check(SETTINGS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(objects=2), "objects = 2 is not possible"),
        (dict(tasks=("sing",)), "must name one or more of put, look"),
        (dict(tasks=()), "must name one or more of put, look"),
    ],
)
def test_settings_without_a_household_are_refused(options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        envs.make("household", options.items())
