"""Household: find objects, treat them and put them in place, by commands in words.

The six kinds of tasks and the commands are those of ALFWorld (Shridhar et al.,
arXiv:2010.03768, section 2); solving the task earns 10, as in RAGEN. Every function
handles one episode: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, rendering
from ragen_jax.envs.household import commands, texts
from ragen_jax.envs.household.commands import (
    CLEAN_IT,
    CLOSE,
    COOL_IT,
    GO,
    HEAT_IT,
    OPEN,
    PLACE,
    TAKE,
    USE,
    decode,
)
from ragen_jax.envs.household.house import (
    CAN_OPEN,
    CLEAN,
    COLD,
    COOL,
    DESK,
    FRIDGE,
    HEAT,
    HELD,
    HOT,
    KIND_OF,
    LOOK,
    MICROWAVE,
    PLAIN,
    RECEPTACLES,
    SINK,
    TARGETS,
    TASKS,
    TWO,
    TYPES,
    WASHABLE,
    description,
)
from ragen_jax.envs.household.planner import plan

NOWHERE = -1  # The person is at no receptacle, as at the beginning.
SOLVED_REWARD = 10.0


@dataclasses.dataclass(frozen=True)
class Household:
    """Settings of one kind of household."""

    objects: int = 8  # O, objects in the house
    tasks: tuple[str, ...] = TASKS  # kinds of task to draw from
    list_commands: bool = True  # Observations list the commands that have an effect.


@struct.dataclass
class State:
    """One house with a task."""

    task: jax.Array  # int32[], index in TASKS
    wanted: jax.Array  # int32[], the type of object that the task asks for, in TYPES
    target: jax.Array  # int32[], the kind of receptacle to put it in, in KINDS
    types: jax.Array  # int32[O], of the objects, indices in TYPES
    place: jax.Array  # int32[O], index in RECEPTACLES, or HELD
    warmth: jax.Array  # int32[O], PLAIN, HOT or COLD
    is_clean: jax.Array  # bool[O], whether an object has been cleaned
    is_open: jax.Array  # bool[R]; always True for receptacles without a door or lid
    at: jax.Array  # int32[], the receptacle where the person stands, or NOWHERE
    happened: jax.Array  # bool[], False where the last command did nothing
    done: jax.Array  # bool[], True once the task is solved


def make(settings: Household) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="household",
        action_names=commands.action_names(settings.objects),
        phrases=texts.phrases(settings.objects),
        observation_phrases=texts.observation_phrases(
            settings.objects, settings.list_commands
        ),
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=step,
        observe=functools.partial(texts.observe, list_commands=settings.list_commands),
        example_actions=("go to desk 1", "take apple 1 from sofa 1"),
        longest_observation=functools.partial(
            texts.longest_observation,
            objects=settings.objects,
            list_commands=settings.list_commands,
        ),
        answer_bytes=commands.ANSWER_BYTES,
        most_actions=1,
        read_action=commands.read_action,
        read_action_text=commands.read_action_text,
        action_text=commands.action_text,
        picture=rendering.text_view(
            texts.phrases(settings.objects),
            functools.partial(texts.observe, list_commands=settings.list_commands),
        ),
        solve=plan,
    )


def check(settings: Household) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    if settings.objects not in range(3, 17):
        raise ValueError(
            f"household.objects = {settings.objects} is not possible: choose a whole"
            " number from 3 to 16"
        )
    unknown = [task for task in settings.tasks if task not in TASKS]
    if unknown or not settings.tasks:
        raise ValueError(
            f"household.tasks = {settings.tasks} must name one or more of"
            f" {', '.join(TASKS)}"
        )
    rows = wishes(settings)
    splits = np.asarray(jax.vmap(_split_of)(rows))
    for task in settings.tasks:
        found = splits[rows[:, 0] == TASKS.index(task)]
        for split, name in enumerate(base.SPLITS):
            if split not in found:
                raise ValueError(
                    f"household.tasks = {settings.tasks} names {task!r}, of which the"
                    f" split {name} has no task: leave it out"
                )


def reset(key: jax.Array, split: jax.Array, settings: Household) -> State:
    """Draws a house with an unsolved task of the split.

    A task (what to do with which type of object, and where) belongs to one split,
    whatever the house: validation and test ask for what was never asked in training.
    All kinds of task are as frequent in each split, though not each has as many tasks.
    """
    task_key, key = jax.random.split(key)
    tasks = jnp.array([TASKS.index(task) for task in settings.tasks], jnp.int32)
    task = tasks[jax.random.randint(task_key, (), 0, len(tasks))]

    def draw_house(key):
        house = draw(key, task, settings.objects)
        wish = jnp.stack([house.task, house.wanted, house.target])
        return house, _split_of(wish) == split

    # It ends: `check` ensures that each split has tasks of each kind.
    return base.draw_until_fit(draw_house, key)


def _split_of(wish: jax.Array) -> jax.Array:
    """int32[], the split of a task, given as int32[3]: task, type and target."""
    return base.split_of(base.content_hash(wish))


def wishes(settings: Household) -> np.ndarray:
    """int32[n, 3], all that can be asked for: task, type and kind of receptacle."""
    rows = []
    for task in map(TASKS.index, dict.fromkeys(settings.tasks)):
        types = WASHABLE if task in (CLEAN, HEAT, COOL) else len(TYPES)
        targets = TARGETS[:1] if task == LOOK else TARGETS
        rows += [(task, kind, where) for kind in range(types) for where in targets]
    return np.array(rows, np.int32)


def draw(key: jax.Array, task: jax.Array, count: int) -> State:
    """A random house with a task.

    The first two objects are of the type that the task asks for. None of that type is
    in a receptacle of the target's kind.

    Args:
      key: consumed.
      task: int32[], index in TASKS.
      count: O, objects in the house.
    """
    keys = jax.random.split(key, 4)
    treats = (task == CLEAN) | (task == HEAT) | (task == COOL)
    most = jnp.where(treats, WASHABLE, len(TYPES))
    wanted = jax.random.randint(keys[0], (), 0, most)
    types = jax.random.randint(keys[1], (count,), 0, len(TYPES))
    types = jnp.where(jnp.arange(count) < 2, wanted, types)
    target = jnp.asarray(TARGETS)[jax.random.randint(keys[2], (), 0, len(TARGETS))]
    # LOOK has no target: it gets a fixed one, so that only the type decides its split.
    target = jnp.where(task == LOOK, int(TARGETS[0]), target)
    chances = jax.random.uniform(keys[3], (count, len(RECEPTACLES)))
    is_target = jnp.asarray(KIND_OF) == target
    is_wrong = (types == wanted)[:, None] & is_target[None]
    place = jnp.argmax(jnp.where(is_wrong, -1.0, chances), axis=1)
    return State(
        task=task,
        wanted=wanted.astype(jnp.int32),
        target=target.astype(jnp.int32),
        types=types.astype(jnp.int32),
        place=place.astype(jnp.int32),
        warmth=jnp.full((count,), PLAIN, jnp.int32),
        is_clean=jnp.zeros((count,), bool),
        is_open=jnp.asarray(~CAN_OPEN),
        at=jnp.full((), NOWHERE, jnp.int32),
        happened=jnp.ones((), bool),
        done=jnp.zeros((), bool),
    )


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, base.Outcome]:
    """Carries out the command if that is possible; otherwise nothing happens.

    Args:
      key: not used; nothing is random.
      state: one house; once `done`, it does not change.
      action: int32[], index in `commands.action_names`, or base.NO_ACTION.
    """
    del key
    count = state.types.shape[0]
    is_idle = state.done | (action == base.NO_ACTION)
    verb, which = decode(jnp.maximum(action, 0), count)
    is_possible = commands.is_possible(state)[jnp.maximum(action, 0)] & ~is_idle
    does = jnp.where(is_possible, verb, -1)
    is_object = jnp.arange(count) == which
    is_place = jnp.arange(len(RECEPTACLES)) == which

    place = jnp.where((does == TAKE) & is_object, HELD, state.place)
    place = jnp.where((does == PLACE) & is_object, state.at, place)
    warmth = jnp.where((does == HEAT_IT) & is_object, HOT, state.warmth)
    warmth = jnp.where((does == COOL_IT) & is_object, COLD, warmth)
    is_open = jnp.where((does == OPEN) & is_place, True, state.is_open)
    is_open = jnp.where((does == CLOSE) & is_place, False, is_open)
    after = state.replace(
        place=place,
        warmth=warmth,
        is_clean=state.is_clean | ((does == CLEAN_IT) & is_object),
        is_open=is_open,
        at=jnp.where(does == GO, which, state.at),
        happened=jnp.where(is_idle, state.happened, is_possible),
    )
    success = ~is_idle & is_solved(after, does == USE)
    done = state.done | success
    reward = jnp.where(success, SOLVED_REWARD, 0.0)
    return after.replace(done=done), base.Outcome(
        reward=reward.astype(jnp.float32), success=success, done=done
    )


def is_solved(state: State, uses_lamp: jax.Array) -> jax.Array:
    """bool[], whether the task is solved.

    Args:
      state: after the last command.
      uses_lamp: bool[], whether that command used the lamp.
    """
    is_wanted = state.types == state.wanted
    kind = jnp.asarray(KIND_OF)[jnp.minimum(state.place, HELD - 1)]
    in_place = is_wanted & (state.place < HELD) & (kind == state.target)
    fits = jnp.where(state.task == CLEAN, state.is_clean, True)
    fits &= jnp.where(state.task == HEAT, state.warmth == HOT, True)
    fits &= jnp.where(state.task == COOL, state.warmth == COLD, True)
    needed = jnp.where(state.task == TWO, 2, 1)
    is_put = (in_place & fits).sum() >= needed
    sees = uses_lamp & (is_wanted & (state.place == HELD)).any()
    return jnp.where(state.task == LOOK, sees, is_put)


def instruction(settings: Household) -> str:
    """The rules for the system prompt."""
    listed = " The commands that do something are listed." * settings.list_commands
    return (
        f"You are in a house. {description()} Solve the task with commands: go to,"
        " open, close; take X from Y, put X in/on Y, at the place where you are, one"
        f" object at a time; clean X with {RECEPTACLES[SINK]}, heat X with"
        f" {RECEPTACLES[MICROWAVE]}, cool X with {RECEPTACLES[FRIDGE]}, when you carry"
        f" X and stand there; use desklamp 1, at {RECEPTACLES[DESK]}; look.{listed}"
    )
