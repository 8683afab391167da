"""Playing in the terminal: what lines mean, what is told, and the script itself."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

from ragen_jax import envs, playing
from ragen_jax.envs import base, frozen_lake
from ragen_jax.envs.frozen_lake import FrozenLake, State
from ragen_jax.rollout import keys
from ragen_jax.settings import UserError

COIN_WALK = runs.ROOT / "docs" / "examples" / "coin_walk.py"
SCRIPT = runs.ROOT / "launch" / "play.py"
LEFT, DOWN, RIGHT, UP = range(4)


class Reader:
    """Collects what is told, and types prepared lines."""

    def __init__(self, *lines):
        self.told, self.asked, self._lines = [], [], list(lines)

    def ask(self, prompt):
        self.asked.append(prompt)
        return self._lines.pop(0) if self._lines else None


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def table(told):
    world = frozen_lake.world(FrozenLake(success_probability=1.0))
    return playing.make_table(world, told.append)


@pytest.fixture(autouse=True)
def forget(told):
    told.clear()


def play(table, player, **changes):
    sizes = dict(seed=3, split=base.TEST, episode=0, actions=20) | changes
    return playing.play_episode(table, player, **sizes)


# Lines.


@pytest.mark.parametrize(
    ("line", "actions"),
    [
        ("Left", (LEFT,)),
        ("  dOwN\t", (DOWN,)),
        ("l", (LEFT,)),
        ("u || RIGHT||", (UP, RIGHT)),
        ("l, d,r u", (LEFT, DOWN, RIGHT, UP)),
        ("ri d || up", (RIGHT, DOWN, UP)),
        ("", ()),
        (" || ", ()),
    ],
)
def test_a_line_names_actions_by_name_or_by_their_beginnings(table, line, actions):
    assert playing.read_line(line, table.world, None) == actions


@pytest.mark.parametrize("line", ["x", "leftt", "l x", "left|right"])
def test_a_line_with_something_else_is_explained(table, line):
    with pytest.raises(ValueError, match="is no action here: choose Left, Down, Right"):
        playing.read_line(line, table.world, None)


def named(*names):
    world = frozen_lake.world(FrozenLake())
    return base.World(**{**vars(world), "action_names": names})


def test_a_whole_name_wins_over_longer_ones_and_two_beginnings_are_none():
    cube = named("U", "U'", "R", "R2")
    assert playing.read_line("u U' r2 R", cube, None) == (0, 1, 3, 2)
    doubles = named("push left", "push right", "pull")
    assert playing.read_line("push right || push left", doubles, None) == (1, 0)
    with pytest.raises(ValueError, match="'pu' is no action"):
        playing.read_line("pu", doubles, None)


def test_a_free_form_line_is_read_by_the_world_with_its_state():
    def read(text, state):
        return {b"a b": 0, b"c": int(state)}.get(text, base.NO_ACTION)

    world = frozen_lake.world(FrozenLake())
    changes = dict(read_action=max, read_action_text=read, answer_bytes=4)
    world = base.World(**{**vars(world), **changes, "example_actions": ("a b",)})
    assert playing.read_line(" A B || c ", world, 2) == (0, 2)
    with pytest.raises(ValueError, match="'a' is no action here: write as in 'a b'"):
        playing.read_line("c || a", world, 2)
    with pytest.raises(ValueError, match="'c     c'"):
        playing.read_line("c     c", world, 2)


# Episodes.


def test_a_solver_shows_each_state_and_ends_solved(table, told):
    states = []
    player = playing.solving_player(table)
    is_over = playing.play_episode(
        table,
        player,
        seed=3,
        split=base.TEST,
        episode=0,
        actions=20,
        show=lambda number, state: states.append((number, state)),
    )
    assert is_over
    assert [number for number, _ in states] == list(range(len(states)))
    steps = len(table.world.solve(states[0][1]))
    assert steps == len(states) - 1 >= 1
    assert told[0].startswith("State:\n _")
    assert told[-1] == f"solved after {steps} action{'s' * (steps > 1)}, return 1"
    assert "reward 1, " in told[-2] and "√" in told[-2]


def test_the_level_is_that_of_the_evaluation(table):
    states = []
    key = keys.iteration_key(5, base.VALIDATION, 0)
    level = table.reset(keys.level_key(key, 2), np.int32(base.VALIDATION))
    playing.play_episode(
        table,
        lambda state, left: None,
        seed=5,
        split=base.VALIDATION,
        episode=2,
        actions=9,
        show=lambda number, state: states.append(state),
    )
    np.testing.assert_array_equal(states[0].tiles, level.tiles)


def test_a_person_sees_what_happens_and_can_leave(table, told):
    reader = Reader("what", "", "u", "q", "never read")
    assert not play(table, playing.human_player(table, reader.ask), actions=9)
    assert reader.asked == ["9 actions left> "] * 3 + ["8 actions left> "]
    assert told[1].startswith("'what' is no action here")
    assert told[2].startswith("Up: reward 0, 8 actions left\nState:\n")
    assert told[-1] == "left after 1 action, return 0"


def test_the_end_of_the_input_leaves_as_well(table, told):
    assert not play(table, playing.human_player(table, Reader().ask))
    assert told[-1] == "left after 0 actions, return 0"


def test_actions_beyond_the_limit_are_not_played(table, told):
    # Along the border of the lake of this level nothing happens.
    assert play(table, lambda state, left: (LEFT, UP) * 5, actions=3)
    assert sum(": reward" in line for line in told) == 3
    assert told[-1] == "out of actions, return 0"


def test_chance_plays_the_same_game_again(table, told):
    for _ in range(2):
        play(table, playing.random_player(table.world, 4))
        told.append("again")
    middle = told.index("again")
    assert told[:middle] == told[middle + 1 : -1] and middle > 1


def test_the_solver_looks_again_where_the_ice_is_slippery():
    slippery = playing.make_table(
        frozen_lake.world(FrozenLake(success_probability=0.3)), print
    )
    state = State(
        tiles=jnp.zeros((4, 4), jnp.int32).at[3, 3].set(frozen_lake.GOAL),
        player=jnp.zeros(2, jnp.int32),
        done=jnp.zeros((), bool),
    )
    state = jax.device_get(state)
    assert len(playing.solving_player(slippery)(state, 9)) == 1
    assert len(slippery.world.solve(state)) == 6


def test_a_solver_that_is_none_is_told(table):
    world = base.World(**{**vars(table.world), "solve": None})
    with pytest.raises(UserError, match="has no solver: choose --policy=human"):
        playing.solving_player(playing.make_table(world, print))


def test_a_solver_without_a_way_on_leaves(table, told):
    world = base.World(**{**vars(table.world), "solve": lambda state: ()})
    stuck = playing.make_table(world, told.append)
    assert not play(stuck, playing.solving_player(stuck))
    assert told[-2:] == [
        "the solver finds no way on",
        "left after 0 actions, return 0",
    ]


# The script.


def start(*arguments, lines=""):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**kept, "JAX_COMPILATION_CACHE_DIR": str(runs.home() / "cache")},
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_person_plays_a_world_of_their_own_with_pictures(tmp_path):
    code, output, errors = start(
        f"--env={COIN_WALK}",
        "--set=length=9",
        "--set=step_cost=0.5",
        f"--picture={tmp_path / 'new'}",
        "--actions=3",
        lines="l l\nr\n",
    )
    assert (code, errors) == (0, "")
    for part in (
        "You walk in a corridor of 9 cells.",
        f"{COIN_WALK}, train level 0, seed 0\nState:\n",
        "3 actions left> Left: reward ",
        "1 action left> Right: reward ",
        "out of actions, return ",
    ):
        assert part in output, output
    pictures = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in pictures] == [
        f"coin_walk_0_00{n}.png" for n in range(4)
    ]
    world = envs.make(str(COIN_WALK), [("length", 9)])
    level = keys.level_key(keys.iteration_key(0, base.TRAIN, 0), 0)
    state = jax.device_get(jax.jit(world.reset)(level, np.int32(base.TRAIN)))
    with Image.open(pictures[0]) as image:
        np.testing.assert_array_equal(np.asarray(image), world.picture(state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env=frozen"], "'frozen' is no world"),
        (["--set=size=3"], "name it, or write --config.env.size=3"),
        (["--env=frozen_lake", "--config.env.size=3"], "pass one of them"),
        (["--env=frozen_lake", "--policy=solver", "--picture=/dev/null/x"], "be made"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(arguments, message):
    code, output, errors = start(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert message in errors
