"""Trains an agent by StarPO or StarPO-S.

  python launch/train.py --config=configs/frozenlake.py --workdir=runs/frozenlake

Ctrl-C, SIGTERM or closing the terminal saves the state; the same command resumes. On
several hosts, run the same command on each: SLURM and Kubernetes are recognized, else
--coordinator, --processes and --process are needed (docs/clusters.md).

With --plan nothing is trained: the run's programs are compiled, and the memory that
they need is shown. With --target they are compiled for a device that need not be
present; collectives, and GPUs' time of an iteration, are shown too (docs/planning.md):

  python launch/train.py --config=configs/frozenlake.py:paper --plan --target=h100
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

import shlex
import sys
from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.cli import profiling, startup
from ragen_jax.errors import UserError
from ragen_jax.parallel import facts
from ragen_jax.settings import check_changed

flags.adopt_module_key_flags(startup)
flags.adopt_module_key_flags(profiling)
_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; default: runs/NAME-OF-THE-CONFIG."
)
_PLAN = flags.DEFINE_boolean(
    "plan", False, "Show the memory that the run would need on each device."
)
_TARGET = flags.DEFINE_string(
    "target", None, "Plan for an absent a100, b200, h100, h200, v5e, v5p or v6e."
)
_DEVICES = flags.DEFINE_integer(
    "target-devices", 1, "With --target: devices of all hosts."
)
_HOSTS = flags.DEFINE_integer(
    "target-hosts", None, "With --target: number of hosts; default: as few as can be."
)
_REPLIES = flags.DEFINE_list(
    "target-replies",
    [],
    "With --target: mean tokens of a reply to estimate times for, such as 50,150.",
)
_SHAPE = flags.DEFINE_string(
    "shape",
    None,
    "With --target: shape of a model whose files are not here, as qwen2.5-0.5b.",
)
cli.group_flags(
    "Planning, without training",
    *(flag.name for flag in (_PLAN, _TARGET, _DEVICES, _HOSTS, _REPLIES, _SHAPE)),
)


def main() -> None:
    settings = cli.read_settings(_CONFIG.value)
    traced = profiling.asked_iterations(settings)
    if _TARGET.value or _SHAPE.value:
        plan_flags = cli.PlanFlags(
            plan=_PLAN.value,
            target=_TARGET.value,
            devices=_DEVICES.value,
            hosts=_HOSTS.value,
            replies=tuple(_REPLIES.value),
            shape=_SHAPE.value,
        )
        return cli.plan_for_target(settings, plan_flags)
    for name in (_DEVICES.name, _HOSTS.name, _REPLIES.name):
        if flags.FLAGS[name].present:
            raise UserError(
                f"--{name} describes a machine to plan for: add --plan --target=h100,"
                " or leave it out"
            )
    cli.use_every_core(settings)
    cli.start_jax(settings, facts.of_run(settings), trains=not _PLAN.value)
    # Imported here so that a wrong setting is reported without waiting for JAX.
    import jax

    from ragen_jax.reporting.console import Console
    from ragen_jax.training import memory_plan, trainer, weights
    from ragen_jax.training import run as run_lib
    from ragen_jax.training.workdir import check_workdir
    from ragen_jax.utils.workdir_files import SETTINGS

    with cli.user_mistakes():
        path = _WORKDIR.value or _default_workdir()
        folder = Path(path).expanduser()
        if not _PLAN.value:
            check_workdir(folder, settings)
        if not (folder / SETTINGS).exists():  # A resumed run is not refused.
            check_changed(settings, cli.changed_keys(_CONFIG.value))
        run = run_lib.prepare(settings)
        weights.check_weights(run.model)
        if _PLAN.value:
            _report_plan(run)
            return
        memory_plan.check_least(run)
        run_lib.check_levels_of_run(run)
        # Created last, so that a mistake leaves no folder behind.
        workdir = cli.make_workdir(path)
    console = Console(sys.stdout if jax.process_index() == 0 else cli.silence())
    trainer.train(run, workdir, console, shlex.join(["python", *sys.argv]), traced)


def _report_plan(run) -> None:
    """Prints the memory that the run would need on the devices here."""
    import jax

    from ragen_jax.reporting.console import Console
    from ragen_jax.training import memory_plan

    console = Console(sys.stdout if jax.process_index() == 0 else cli.silence())
    console.status("compiling, without running ...")
    console.line(memory_plan.report(run, memory_plan.plan(run)))


def _default_workdir() -> str:
    """runs/frozenlake for configs/frozenlake.py, runs/frozenlake-smoke for :smoke."""
    path, _, variant = cli.config_path().partition(":")
    return str(Path("runs") / "-".join(filter(None, [Path(path).stem, variant])))


if __name__ == "__main__":
    cli.run(main)
