"""Trains an agent by StarPO or StarPO-S.

  python launch/train.py --config=configs/frozenlake.py --workdir=runs/frozenlake

Ctrl-C or SIGTERM saves; the same command goes on from there. On several hosts the same
command runs on each: SLURM and Kubernetes are recognized, else --coordinator,
--processes and --process say who is who.
"""

import shlex
import sys
from pathlib import Path

import common
from absl import flags

_CONFIG = common.define_config()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; default runs/NAME-OF-THE-CONFIG."
)
_PLAN = flags.DEFINE_boolean(
    "plan", False, "Only tell the memory that the run would need, and train nothing."
)


def main() -> None:
    settings = common.read_settings(_CONFIG.value)
    common.use_every_core(settings)
    common.start_jax(settings.deterministic)
    # Imported here so that a wrong setting is told without waiting for JAX.
    import jax

    from ragen_jax import loop, training, weights
    from ragen_jax.progress import Console

    with common.user_mistakes():
        path = _WORKDIR.value or _default_workdir()
        if not _PLAN.value:
            training.check_workdir(Path(path).expanduser(), settings)
        run = loop.prepare(settings)
        weights.check_weights(run)
        if _PLAN.value:
            _tell_plan(run)
            return
        # Made last, so that a mistake leaves no folder behind.
        workdir = common.make_workdir(path)
    console = Console(sys.stdout if jax.process_index() == 0 else common.silence())
    training.train(run, workdir, console, shlex.join(["python", *sys.argv]))


def _tell_plan(run) -> None:
    from ragen_jax import memory
    from ragen_jax.progress import Console

    console = Console(sys.stdout)
    console.status("compiling, without running ...")
    console.line(memory.report(run, memory.plan(run)))


def _default_workdir() -> str:
    """runs/frozenlake for configs/frozenlake.py, runs/frozenlake-smoke for :smoke."""
    path, _, variant = common.config_path().partition(":")
    return str(Path("runs") / "-".join(filter(None, [Path(path).stem, variant])))


if __name__ == "__main__":
    common.run(main)
