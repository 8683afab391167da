"""What a start does to the folder of a run."""

import subprocess
import sys

from ragen_jax.training.workdir import only_run


def test_a_start_clears_a_dead_runs_half_files_and_no_file_of_the_users(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours = {
        f".{name}.{gone.pid}"
        for name in (
            "settings.json",
            "metrics.jsonl",
            "curves.png",
            "episodes.jsonl.gz",
            "rollbacks.json",
            "test.json",
        )
    }
    # The last is being written by another host, perhaps.
    theirs = {f".env.{gone.pid}", ".zshrc.20231201", f".diagnosis.json.{gone.pid}"}
    for name in ours | theirs:
        (tmp_path / name).touch()
    with only_run(tmp_path, print):
        assert {path.name for path in tmp_path.iterdir()} - {".lock"} == theirs
