"""`launch/warm_start.py` on a model that is there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
TINY = ROOT / "ragen_jax" / "models" / "tiny"


def warm_start(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "launch" / "warm_start.py"),
            f"--config={ROOT / 'configs' / 'warm_start.py'}:smoke",
            *arguments,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_stage_that_learns_nothing_writes_the_model_it_began_with(tmp_path):
    out = tmp_path / "out"
    ended = warm_start(
        f"--start={TINY}",
        "--first_stage=rooms",
        "--last_stage=rooms",
        "--config.rooms.steps=1",
        "--config.rooms.rows=1",
        "--config.rooms.lr=0.0",
        f"--out={out}",
    )
    assert ended.returncode == 0, ended.stderr
    assert f"wrote {out}" in ended.stdout
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name], err_msg=name)
    kept = "tokenizer.json"
    assert (out / kept).read_text() == (TINY / kept).read_text()


def test_later_stages_without_a_model_are_refused(tmp_path):
    ended = warm_start("--first_stage=rooms", f"--out={tmp_path / 'out'}")
    assert ended.returncode == 2
    assert "later stages need --start" in ended.stderr
    assert "Traceback" not in ended.stderr
