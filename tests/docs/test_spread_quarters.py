"""docs/examples/spread_quarters.py: how prompts of much and little spread differ."""

import os
import subprocess
import sys

import pytest
from helpers import runs, warm_process

EXAMPLE = runs.ROOT / "docs" / "examples" / "spread_quarters.py"
NUMBERS = """
import importlib.util
import numpy as np
from helpers.records import episodes_of
spec = importlib.util.spec_from_file_location("example", {path!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
# Groups of two: returns 1 and 1; 0 and 4; 2 and 1; 0 and 2.
episodes = episodes_of(
    reward=[[1.0], [1.0], [0.0], [4.0], [2.0], [1.0], [0.0], [2.0]],
    group=[0, 0, 1, 1, 2, 2, 3, 3],
).replace(
    actions=np.array([[3], [1], [1], [2], [4], [5], [6], [6]]),
    success=np.array([0, 0, 0, 1, 1, 1, 0, 1], bool),
)
print(np.round(example.quarters(episodes)[:, 0], 4).tolist())
"""


def test_quarters_are_worked_out_by_hand():
    """The flags of an example can be defined once in a process: this has its own."""
    code = NUMBERS.format(path=str(EXAMPLE))
    paths = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split("\n")[0] == (
        "[[2.8284, 0.5, 0.0, 1.5, 1.0], [1.4142, 0.5, 0.0, 6.0, nan],"
        " [0.7071, 1.0, 0.0, 4.5, -1.0], [0.0, 0.0, 1.0, 2.0, nan]]"
    ), done.stderr


def test_a_number_of_prompts_that_has_no_quarters_is_refused(tmp_path):
    given = [f"--config={runs.CONFIG}:smoke", "--config.rollout.prompts=6"]
    ended = warm_process.attempt(EXAMPLE, given, tmp_path)
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors.startswith("error: rollout.prompts = 6 has no quarters: ")


@pytest.mark.slow  # Compiles a rollout.
def test_the_example_tells_of_four_quarters():
    given = [f"--config={runs.CONFIG}:smoke", "--config.rollout.prompts=4"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *given, "--batches=2"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head[0] == "quarter" and [row[0] for row in rows] == ["1", "2", "3", "4"]
    spreads = [float(row[1]) for row in rows]
    assert spreads == sorted(spreads, reverse=True)
