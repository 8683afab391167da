"""Messages of a run for the console."""

import shlex

import pytest
from helpers.paths import CONFIGS

from ragen_jax import cli, settings
from ragen_jax.training import messages


def read(variant: str, **changes) -> settings.Settings:
    """The settings of a config, with leaves replaced: `loss__kl=0.1`."""
    config = cli.load_config(f"{CONFIGS}/{variant}")
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict(dotted)
    return settings.from_dict(config.to_dict())


@pytest.mark.parametrize(
    ("scope", "of"),
    [("environment", "each environment's prompts"), ("batch", "the prompts")],
)
def test_the_banner_says_that_each_environment_of_a_mix_keeps_so_many(scope, of):
    chosen = read(
        "sokoban.py:mix",
        filter__strategy="top_count",
        filter__count=2,
        filter__scope=scope,
    )
    line = messages.algorithm(chosen)
    assert f": keeps top_count 2 of {of} by return_std, clip" in line


def test_the_command_that_follows_a_run_can_be_copied_whatever_the_folders_name(
    tmp_path,
):
    workdir = tmp_path / "my rün"
    command = messages.finished(workdir).split("next: ")[1]
    assert shlex.split(command)[2] == f"--checkpoint={workdir}"
