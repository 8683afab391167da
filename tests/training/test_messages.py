"""Messages of a run for the console."""

import shlex

from helpers import runs
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.training import messages


def test_the_command_that_follows_a_run_can_be_copied_whatever_the_folders_name(
    tmp_path,
):
    workdir = tmp_path / "my rün"
    command = messages.finished(workdir, runs.settings()).split("next: ")[1]
    assert shlex.split(command)[2:] == [f"--checkpoint={workdir}", "--show=3"]


def test_the_command_that_follows_a_run_measures_the_environment_it_was_trained_in(
    tmp_path,
):
    config = cli.load_config(f"{ROOT}/configs/sokoban.py:generalize").to_dict()
    said = messages.finished(tmp_path, settings_lib.from_dict(config))
    command, others = said.split("next: ")[1].splitlines()
    assert shlex.split(command)[-1] == "--env=sokoban"
    assert others.endswith(": --env=frozen_lake, --env=larger, --env=newvocab")
