"""Settings of environments on the command line, that the config leaves out."""

import shlex
import subprocess
import sys

import pytest
from absl import flags
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax.errors import SettingsError

LAKE, MIX, EVALUATE = "frozenlake.py", "sokoban.py:mix", "sokoban.py:generalize"


def read(config, *arguments):
    """The settings of one of the configs with what a command line sets."""
    flag_values = flags.FlagValues()
    cli.define_config(None, flag_values)
    cli.parse(["probe", f"--config={ROOT}/configs/{config}", *arguments], flag_values)
    return cli.read_settings(flag_values.config)


def test_settings_that_a_config_leaves_out_can_be_set():
    symbols = ("P", ".", "O", "G", "X", "Y")
    env = read(LAKE, f"--config.env.symbols={symbols}").env
    assert env.options == read(LAKE).env.options + (("symbols", symbols),)


@pytest.mark.parametrize("symbols", ["P,_,O", "P", "('P', '_'", "#,_"])
def test_texts_of_another_form_are_refused_with_a_flag_that_can_be_pasted(symbols):
    with pytest.raises(SettingsError, match="texts in quotes and parentheses") as e:
        read(MIX, f"--config.env.mix.lakes.symbols={symbols}")
    (flag,) = shlex.split(str(e.value).partition(", as in ")[2])
    lakes, _ = read(MIX, flag).env.mix
    assert lakes.options == (("symbols", ("P", "_", "O", "G", "X", "√")),)


def test_settings_and_limits_of_one_of_several_environments_can_be_set():
    lakes, rooms = read(
        MIX, "--config.env.mix.rooms.size=7", "--config.env.mix.rooms.turns=9"
    ).env.mix
    assert (rooms.options, rooms.turns) == ((("size", 7),), 9)
    assert (lakes.options, lakes.turns) == ((), 0)


def test_the_instruction_and_a_note_of_every_environment_can_be_set():
    env = read(LAKE, "--config.env.instruction=Go.\nNow.", "--config.env.note=a=b").env
    assert (env.instruction, env.note) == ("Go.\nNow.", "a=b")
    lakes, rooms = read(MIX, "--config.env.mix.rooms.note=Push.").env.mix
    assert (lakes.note, rooms.note) == ("", "Push.")
    key = "env.evaluate.frozen_lake.instruction"
    frozen_lake, *_ = read(EVALUATE, f"--config.{key}=Go.").env.evaluate
    assert frozen_lake.instruction == "Go."
    own = read("../docs/examples/coin_walk_config.py", "--config.env.note=Walk.").env
    assert own.note == "Walk."


def test_settings_of_an_environment_that_is_only_evaluated_can_be_set():
    frozen_lake, *_ = read(
        EVALUATE, "--config.env.evaluate.frozen_lake.success_probability=1"
    ).env.evaluate
    assert frozen_lake.options == (("success_probability", 1.0),)


@pytest.mark.parametrize("name", [["=bandit"], ["", "bandit"]])
def test_an_environment_that_the_command_line_names_has_its_own_settings(name):
    equals, *apart = name
    options = read(
        LAKE, f"--config.env.name{equals}", *apart, "--config.env.reverse"
    ).env.options
    assert dict(options)["reverse"] is True


@pytest.mark.parametrize(
    ("config", "arguments", "remedy"),
    [
        (LAKE, ["env.symbol=x"], "did you mean env.symbols?"),
        (LAKE, ["env.symbols=#,_"], "texts in quotes and parentheses"),
        (
            LAKE,
            ["env.name=maze", "env.walls=2"],
            "env.name = 'maze' is not an environment",
        ),
        (
            MIX,
            ["env.mix.rooms.name=maze", "env.mix.rooms.walls=2"],
            "env.mix.rooms.name = 'maze' is not an environment",
        ),
        (LAKE, ["env.name=a.py", "env.walls=2"], "write it into the config, if it is"),
        (MIX, ["env.mix.rooms.turn=7"], "did you mean env.mix.rooms.turns?"),
        (MIX, ["env.note=Push."], "mean env.mix.lakes.note or env.mix.rooms.note?"),
        (LAKE, ["env.instructions=Go."], "did you mean env.instruction?"),
        (MIX, ["env.mix.walls.boxes=7"], "did you mean env.mix.rooms.boxes?"),
        (MIX, ["env.mix.rooms.walls=7"], "choose one of env.mix.rooms.actions, env.mi"),
        (EVALUATE, ["env.evaluate.larger.prompts=7"], "env.evaluate.larger.turns"),
    ],
)
def test_a_key_that_no_environment_has_is_refused_with_one_that_it_has(
    config, arguments, remedy
):
    with pytest.raises(SettingsError) as refused:
        read(config, *(f"--config.{argument}" for argument in arguments))
    assert remedy in str(refused.value)
    assert "rollout." not in str(refused.value)


def test_looking_settings_up_starts_no_device():
    """Else the run's processes, and its simulated devices, would come too late."""
    code = """
from jax._src import xla_bridge
from ragen_jax.cli import environment_keys
from ragen_jax.envs import NAMES
for name in NAMES:
    assert environment_keys.unnamed({"env.name": name})
print(xla_bridge.backends_are_initialized())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr
