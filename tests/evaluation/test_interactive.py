"""Playing in the terminal: what lines mean, what is printed, and the script itself."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs, warm_process
from PIL import Image

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.env import FrozenLake, State
from ragen_jax.errors import UserError
from ragen_jax.evaluation import interactive, terminal
from ragen_jax.rollout import prng
from ragen_jax.text import reference_parser

COIN_WALK = runs.ROOT / "docs" / "examples" / "coin_walk.py"
SCRIPT = runs.ROOT / "launch" / "play.py"
LEFT, DOWN, RIGHT, UP = range(4)


class Reader:
    """Collects what is printed, and types prepared lines."""

    def __init__(self, *lines):
        self.printed, self.asked, self._lines = [], [], list(lines)

    def ask(self, prompt):
        self.asked.append(prompt)
        return self._lines.pop(0) if self._lines else None


@pytest.fixture(scope="module")
def printed():
    return []


@pytest.fixture(scope="module")
def table(printed):
    env = frozen_lake.make(FrozenLake(success_probability=1.0))
    return interactive.make_table(env, printed.append)


@pytest.fixture(autouse=True)
def forget(printed):
    printed.clear()


def play(table, player, **changes):
    sizes = dict(seed=3, split=base.TEST, episode=0, actions=20) | changes
    return interactive.play_episode(table, player, **sizes)


def test_every_action_has_a_key_of_its_own_in_every_episode(table):
    keys = []

    def step(key, state, action):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return table.step(key, state, action)

    watched = dataclasses.replace(table, step=step)
    for episode in (0, 1):  # The border takes every action.
        play(watched, lambda *_: (UP,) * 3, episode=episode, actions=3)
    assert len(set(keys)) == len(keys) > 3


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
    assert interactive.read_line(line, table.env, None) == actions


@pytest.mark.parametrize("line", ["x", "leftt", "l x", "left|right"])
def test_a_line_with_something_else_is_explained(table, line):
    with pytest.raises(
        ValueError, match="is not an action here: choose Left, Down, Right"
    ):
        interactive.read_line(line, table.env, None)


def test_of_many_names_a_few_are_listed_with_their_number(table):
    cells = named(
        *(f"open row {row} column {column}" for row, column in np.ndindex(9, 9))
    )
    with pytest.raises(ValueError) as found:
        interactive.read_line("shut", cells, None)
    assert str(found.value) == (
        "'shut' is not an action here: choose open row 0 column 0, open row 0 column 1,"
        " open row 0 column 2, open row 0 column 3, open row 0 column 4, open row 0"
        " column 5, ... (81 in all), or unambiguous beginnings of them"
    )


def named(*names):
    env = frozen_lake.make(FrozenLake())
    return base.Environment(**{**vars(env), "action_names": names})


def test_a_whole_name_wins_over_longer_ones_and_two_beginnings_are_none():
    cube = named("U", "U'", "R", "R2")
    assert interactive.read_line("u U' r2 R", cube, None) == (0, 1, 3, 2)
    doubles = named("push left", "push right", "pull")
    assert interactive.read_line("push right || push left", doubles, None) == (1, 0)
    with pytest.raises(ValueError, match="'pu' is not an action"):
        interactive.read_line("pu", doubles, None)


@pytest.mark.parametrize("text", ["Öffnen", "öffnen", "ÖFFNEN", "gehen", "GEHEN"])
def test_a_person_may_write_a_name_as_a_reply_may(text):
    door = named("Öffnen", "Gehen")
    reply = reference_parser.parse_reply(
        b"<think>", f"</think><answer>{text}</answer>".encode(), door.action_names, 1
    )
    try:
        actions = interactive.read_line(text, door, None)
    except ValueError:
        actions = ()
    assert actions == reply.actions
    assert bool(actions) == (text != "öffnen")


def test_a_free_form_line_is_read_by_the_environment_with_its_state():
    def read(text, state):
        return {b"a b": 0, b"c": int(state)}.get(text, base.NO_ACTION)

    env = frozen_lake.make(FrozenLake())
    changes = dict(read_action=max, read_action_text=read, answer_bytes=4)
    env = base.Environment(**{**vars(env), **changes, "example_actions": ("a b",)})
    assert interactive.read_line(" A B || c ", env, 2) == (0, 2)
    one = dataclasses.replace(env, most_actions=1)  # Of a reply the first is read, too.
    assert interactive.read_line("c || never read", one, 2) == (2,)
    with pytest.raises(
        ValueError, match="'a' is not an action here: write as in 'a b'"
    ):
        interactive.read_line("c || a", env, 2)
    with pytest.raises(ValueError, match="'c     c'"):
        interactive.read_line("c     c", env, 2)


# Episodes.


def test_a_solver_shows_each_state_and_ends_solved(table, printed):
    states = []
    player = interactive.solving_player(table)
    is_over = interactive.play_episode(
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
    steps = len(table.env.solve(states[0][1]))
    assert steps == len(states) - 1 >= 1
    assert printed[0].startswith("State:\n _")
    assert printed[-1] == f"solved after {steps} action{'s' * (steps > 1)}, return 1"
    assert "reward 1, " in printed[-2] and "√" in printed[-2]


def test_the_level_is_that_of_the_evaluation(table):
    states = []
    key = prng.iteration_key(5, base.VALIDATION, 0)
    level = table.reset(prng.level_key(key, 2), np.int32(base.VALIDATION))
    interactive.play_episode(
        table,
        lambda state, left: None,
        seed=5,
        split=base.VALIDATION,
        episode=2,
        actions=9,
        show=lambda number, state: states.append(state),
    )
    np.testing.assert_array_equal(states[0].tiles, level.tiles)


def test_a_person_sees_what_happens_and_can_leave(table, printed):
    reader = Reader("what", "", "u", "q", "never read")
    assert not play(table, interactive.human_player(table, reader.ask), actions=9)
    assert reader.asked == ["9 actions left> "] * 3 + ["8 actions left> "]
    assert printed[1].startswith("'what' is not an action here")
    assert printed[2].startswith("Up: reward 0, 8 actions left\nState:\n")
    assert printed[-1] == "left after 1 action, return 0"


def test_the_end_of_the_input_leaves_as_well(table, printed):
    assert not play(table, interactive.human_player(table, Reader().ask))
    assert printed[-1] == "left after 0 actions, return 0"


def test_actions_beyond_the_limit_are_not_played(table, printed):
    # Along the border of the lake of this level nothing happens.
    assert play(table, lambda state, left: (LEFT, UP) * 5, actions=3)
    assert sum(": reward" in line for line in printed) == 3
    assert printed[-1] == "out of actions, return 0"


def test_a_rule_that_names_no_action_is_said_to_do_nothing(table, printed):
    """And not to have taken the last action of the list."""
    idle = base.Environment(
        **{**vars(table.env), "rule": lambda state: jnp.int32(base.NO_ACTION)}
    )
    play(table, interactive.rule_player(idle), actions=2)
    told = [line.split(",")[0] for line in printed if ": reward" in line]
    assert told == ["nothing: reward 0"] * 2


def test_an_environment_without_a_player_is_told_of_those_that_it_has(table):
    solved = dataclasses.replace(table.env, rule=None, solve=lambda state: ())
    ruled = dataclasses.replace(table.env, rule=lambda state: 0, solve=None)
    common = "choose --policy=human or --policy=random"
    with pytest.raises(UserError, match=f"{common} or --policy=solver$"):
        interactive.rule_player(solved)
    with pytest.raises(UserError, match=f"{common}$"):
        interactive.rule_player(dataclasses.replace(solved, solve=None))
    with pytest.raises(UserError, match=f"{common} or --policy=rule$"):
        interactive.solving_player(dataclasses.replace(table, env=ruled))


@pytest.mark.parametrize("action", [4, -2])
def test_a_rule_that_names_an_action_which_is_none_is_refused(table, action):
    wrong = base.Environment(
        **{**vars(table.env), "rule": lambda state: jnp.int32(action)}
    )
    with pytest.raises(UserError, match=f"there is no action {action}, only 0 to 3"):
        play(table, interactive.rule_player(wrong), actions=2)


@pytest.mark.parametrize("number", [10**6, -2])
def test_a_state_shown_by_a_phrase_that_there_is_not_ends_the_game(table, number):
    shown = jnp.array([0, number])
    wrong = dataclasses.replace(table, observe=lambda state: shown)
    with pytest.raises(UserError, match=f"observe gives the id {number}: give those"):
        play(wrong, interactive.random_player(table.env, 4))


def test_random_actions_play_the_same_game_again(table, printed):
    for _ in range(2):
        play(table, interactive.random_player(table.env, 4))
        printed.append("again")
    middle = printed.index("again")
    assert printed[:middle] == printed[middle + 1 : -1] and middle > 1


def test_the_solver_looks_again_where_the_ice_is_slippery():
    slippery = interactive.make_table(
        frozen_lake.make(FrozenLake(success_probability=0.3)), print
    )
    state = State(
        tiles=jnp.zeros((4, 4), jnp.int32).at[3, 3].set(frozen_lake.GOAL),
        player=jnp.zeros(2, jnp.int32),
        done=jnp.zeros((), bool),
    )
    state = jax.device_get(state)
    assert len(interactive.solving_player(slippery)(state, 9)) == 1
    assert len(slippery.env.solve(state)) == 6


def test_an_unknown_solver_is_refused(table):
    env = base.Environment(**{**vars(table.env), "solve": None})
    with pytest.raises(UserError, match="has no solver: choose --policy=human"):
        interactive.solving_player(interactive.make_table(env, print))


def test_a_solver_without_a_way_on_leaves(table, printed):
    env = base.Environment(**{**vars(table.env), "solve": lambda state: ()})
    stuck = interactive.make_table(env, printed.append)
    assert not play(stuck, interactive.solving_player(stuck))
    assert printed[-2:] == [
        "the solver finds no solution from here",
        "left after 0 actions, return 0",
    ]


def test_members_of_a_mix_that_are_one_environment_draw_beside_each_other(
    table, tmp_path
):
    for label in ("rooms", "halls"):
        terminal.play(
            label,
            table.env,
            policy="solver",
            episodes=1,
            actions=1,
            seed=3,
            split="test",
            pictures=str(tmp_path),
        )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{of}_0_00{n}.png" for of in ("halls", "rooms") for n in (0, 1)]


# The script.


def start(*arguments, lines="", script=SCRIPT):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**kept, "JAX_COMPILATION_CACHE_DIR": str(runs.home() / "cache")},
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_person_who_leaves_leaves_every_environment_of_a_mix():
    config = runs.ROOT / "configs" / "sokoban.py"
    code, output, errors = start(f"--config={config}:mix", "--config.seed=7", lines="q")
    assert (code, errors) == (0, "")
    assert output.count("level 0, seed 7") == 1 and output.count("q leaves.") == 1


@pytest.mark.slow
def test_a_person_plays_an_environment_of_their_own_with_pictures(tmp_path):
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
    env = envs.make(str(COIN_WALK), [("length", 9)])
    level = prng.level_key(prng.iteration_key(0, base.TRAIN, 0), 0)
    state = jax.device_get(jax.jit(env.reset)(level, np.int32(base.TRAIN)))
    with Image.open(pictures[0]) as image:
        np.testing.assert_array_equal(np.asarray(image), env.picture(state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env=frozen"], "'frozen' is not an environment"),
        (["--set=size=3"], "add --env, or write --config.env.size=3"),
        (["--env=frozen_lake", "--config.env.size=3"], "pass one of them"),
        (["--config.rollout.prompts=3"], "rollout.prompts says how a run trains"),
        (["--env=frozen_lake", "--policy=solver", "--picture=/dev/null/x"], "be made"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(arguments, message, tmp_path):
    code, output, errors, _, made = warm_process.attempt(SCRIPT, arguments, tmp_path)
    assert (code, output, made) == (2, "", [])
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert message in errors


def test_a_file_that_breaks_its_promise_is_refused_before_the_game(tmp_path):
    broken = COIN_WALK.read_text().replace("jnp.where(moves, gain, 0)", "gain > 0")
    (tmp_path / "my_env.py").write_text(broken)
    arguments = [f"--env={tmp_path / 'my_env.py'}", "--policy=random"]
    code, output, errors, _, made = warm_process.attempt(SCRIPT, arguments, tmp_path)
    assert (code, output, made) == (2, "", [])
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert "step gives outcome.reward as bool[]" in errors


@pytest.mark.slow
def test_a_file_that_fails_in_a_game_ends_it_in_one_sentence(tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text(COIN_WALK.read_text().replace("solve=solve", "solve=len"))
    code, _, errors = start(f"--env={file}", "--policy=solver")
    assert code == 2 and errors.count("\n") == 1
    assert "my_env.py': solve fails: TypeError" in errors


@pytest.mark.slow
def test_games_are_played_on_the_cpu_even_where_jax_is_imported_already(tmp_path):
    """As the cache of compiled programs imports it, before the script's own code."""
    script = tmp_path / "show_platforms.py"
    script.write_text(
        "import atexit, runpy, sys\n"
        "import jax\n"
        "atexit.register(lambda: print('platforms', jax.config.jax_platforms))\n"
        f"sys.argv[0] = {str(SCRIPT)!r}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    arguments = ["--env=frozen_lake", "--policy=random", "--actions=1"]
    code, output, errors = start(*arguments, script=script)
    assert (code, errors) == (0, "")
    assert output.endswith("platforms cpu\n")
