"""docs/examples/imitate.py: a supervised start in an environment of one's own."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import runs, warm_process
from safetensors.numpy import load_file

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights

EXAMPLE = runs.ROOT / "docs" / "examples" / "imitate.py"
CONFIG = "docs/examples/coin_walk_config.py"


def test_an_environment_that_demonstrates_nothing_is_refused(tmp_path):
    config = f"--config={runs.CONFIG}:smoke"
    ended = warm_process.attempt(EXAMPLE, [config, f"--out={tmp_path / 'o'}"], tmp_path)
    assert (ended.code, ended.output, ended.made) == (2, "", [])
    assert ended.errors.startswith("error: env.name = 'frozen_lake' has no demonstrate")
    assert ended.errors.count("\n") == 1


def imitate(*arguments):
    command = [sys.executable, str(EXAMPLE), f"--config={CONFIG}:smoke", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command,
        cwd=runs.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow  # Compiles demonstrations and their update.
def test_training_starts_from_what_the_example_writes(tmp_path, monkeypatch):
    out = tmp_path / "imitated"
    ended = imitate(f"--out={out}", "--steps=2", "--rows=2")
    assert ended.returncode == 0, ended.stderr
    assert "step 2/2  loss " in ended.stdout and "100% of the demons" in ended.stdout
    monkeypatch.chdir(runs.ROOT)
    config = cli.load_config(f"{CONFIG}:smoke")
    config.model.path = str(out)
    weights.check_weights(
        run_lib.prepare(settings_lib.from_dict(config.to_dict())).model
    )
    tiny = runs.ROOT / "ragen_jax" / "models" / "tiny"
    before, after = (load_file(f / "model.safetensors") for f in (tiny, out))
    assert before.keys() == after.keys()
    assert not all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow  # Compiles the demonstrations.
def test_demonstrations_of_another_form_than_the_config_asks_for_are_refused(tmp_path):
    out = tmp_path / "imitated"
    ended = imitate(f"--out={out}", "--rows=2", "--config.env.thinking=False")
    assert ended.returncode == 2 and not out.exists()
    assert "none of 2 demonstrated episodes succeeds" in ended.stderr
    assert "env.thinking = False" in ended.stderr and ended.stderr.count("\n") == 1
