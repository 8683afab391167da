"""Measures the health of one or several checkpoints.

  python launch/diagnose.py --checkpoint=runs/frozenlake
  python launch/diagnose.py --checkpoint=runs/frozenlake --all --samples=64
  python launch/diagnose.py --checkpoint=runs/frozenlake/checkpoints/40 --prompts=32

Text statistics of a batch of training episodes, mutual information of prompts and
thoughts, and gradient norms by reward spread: as JSON, and the main ones as a table. A
checkpoint is a workdir (its best step, or with --all every step) or a step's folder.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

from absl import flags

from ragen_jax import cli
from ragen_jax.cli import trust
from ragen_jax.cli.subjects import find_checkpoint
from ragen_jax.errors import UserError

flags.adopt_module_key_flags(trust)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "A run's workdir, or one step's folder."
)
_ALL = flags.DEFINE_boolean("all", False, "Diagnose every step of the workdir.")
_MODEL = flags.DEFINE_string(
    "model", None, "New path of the run's model, if it has moved."
)
_PROMPTS = flags.DEFINE_integer(
    "prompts", 0, "Prompts per batch; 0: as in training.", lower_bound=0
)
_GROUP = flags.DEFINE_integer(
    "group_size", 0, "Episodes per prompt; 0: as in training.", lower_bound=0
)
_SAME_PROMPTS = flags.DEFINE_boolean(
    "same_prompts", False, "Measure every step on the same prompts, new to all."
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 64, "Thoughts that --information is measured on; 0: all.", lower_bound=0
)
_BUCKETS = flags.DEFINE_enum(
    "buckets",
    "quantile",
    ["quantile", "fixed"],
    "Bins of --gradients by reward spread.",
)
_INFORMATION = flags.DEFINE_boolean("information", True, "Measure mutual information.")
_GRADIENTS = flags.DEFINE_boolean("gradients", True, "Measure gradient norms.")
_OUT = flags.DEFINE_string("out", None, "JSON file; default WORKDIR/diagnosis.json.")


def main() -> None:
    if not _CHECKPOINT.value:
        raise UserError("--checkpoint is missing: pass a workdir or a step's folder")
    cli.refuse_unread(["samples"], alone="information")
    cli.refuse_unread(["buckets"], alone="gradients")
    cli.refuse_unread(["same_prompts"], alone="all")
    found, settings = find_checkpoint(_CHECKPOINT.value, _MODEL.value)
    from ragen_jax.cli import diagnosis

    settings = diagnosis.reshape(settings, _PROMPTS.value, _GROUP.value)
    cli.use_every_core(settings)
    cli.start_jax_alone(settings, "a diagnosis")
    from ragen_jax.reporting import diagnosis_table
    from ragen_jax.training import checkpoints

    with cli.user_mistakes():
        run = diagnosis.prepare(settings)
    instruments = diagnosis.Instruments(run)
    out = cli.check_out(_OUT.value or str(found.workdir / "diagnosis.json"))
    steps = [found.step]
    if _ALL.value:
        steps = sorted(checkpoints.scores(found.directory))
    options = diagnosis.DiagnosisOptions(
        information=_INFORMATION.value,
        gradients=_GRADIENTS.value,
        samples=_SAMPLES.value,
        buckets=_BUCKETS.value,
        may_lack_thoughts=_ALL.value,
        prompts_of=settings.iterations if _SAME_PROMPTS.value else None,
    )
    results = diagnosis.diagnose_all(
        instruments, found.directory, steps, options, out, print
    )
    print(diagnosis_table.table(results))
    print(f"\n{out}")


if __name__ == "__main__":
    cli.run(main)
