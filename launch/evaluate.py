"""Measures an agent on fixed levels that were held out from training.

  python launch/evaluate.py --checkpoint=runs/frozenlake --show=3
  python launch/evaluate.py --model=tiny --config=configs/frozenlake.py
  python launch/evaluate.py --checkpoint=runs/frozenlake --policy=planner
  python launch/evaluate.py --checkpoint=runs/frozenlake --verify

A checkpoint is a run's workdir (its best step, or the last if none was validated) or
one step's folder; it is played as it was trained, or as --config says, at its
evaluation.temperature. So is an agent's folder that launch/export.py wrote. Any other
model is played as --config says, by default configs/frozenlake.py. Only the flags
below say how many levels and episodes are played. --policy=random, --policy=rule
(where there is a rule) and --policy=planner play the same levels without a language
model. The planner plays what the environment's solver plans ahead, which needs a solver
and results that are not random; in FrozenLake it knows the slip (launch/play.py's
solver, which looks again after each action, does not). The same seed and split always
give the same levels.
--verify plays nothing: it reads every file of the checkpoints and names damaged ones.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.cli import evaluation, startup, trust, verification
from ragen_jax.errors import UserError

flags.adopt_module_key_flags(startup)
flags.adopt_module_key_flags(trust)
_DEFAULT = str(Path(__file__).parents[1] / "configs" / "frozenlake.py")
_CONFIG = cli.define_config(_DEFAULT)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "A run's workdir, or one step's folder."
)
_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Hugging Face folder or hub id, GGUF file, or a name such as 'tiny'; with"
    " --checkpoint, the new path of the model that the run began with, if it moved.",
)
_POLICY = flags.DEFINE_enum(
    "policy", "model", ["model", "random", "rule", "planner"], "Who plays."
)
_ENV = flags.DEFINE_string(
    "env",
    None,
    "Label of the environment to play, where the settings have several; default: the"
    " one that training plays, or else the first by label.",
)
_PROMPTS = flags.DEFINE_integer("prompts", 256, "Levels to play.", 1, 2**31 - 1)
_ROLLOUTS = flags.DEFINE_integer("rollouts", 1, "Episodes per level.", 1, 2**31 - 1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "0: greedy; default: evaluation.temperature of the settings.",
)
_SEED = flags.DEFINE_integer("seed", None, "Seed of levels and sampling.")
_SPLIT = flags.DEFINE_enum(
    "split", "test", ["train", "validation", "test"], "Split of the levels."
)
_OUT = flags.DEFINE_string(
    "out", None, "File for trajectories, .jsonl; default WORKDIR/evaluations/..."
)
_SHOW = flags.DEFINE_integer("show", 0, "Episodes to print.", lower_bound=0)
# What --verify would not read.
_UNVERIFIED = ("config", "model", "policy", "env", "prompts", "rollouts")
_UNVERIFIED += ("temperature", "seed", "split", "out", "show")
_VERIFY = flags.DEFINE_boolean(
    "verify", False, "Only read the checkpoints, and name the damaged ones."
)


def main() -> None:
    if _VERIFY.value:
        if not _CHECKPOINT.value:
            raise UserError("--verify needs --checkpoint: a workdir or a step's folder")
        cli.refuse_unread(_UNVERIFIED, beside="verify")
        return verification.verify(_CHECKPOINT.value)
    evaluation.evaluate(
        evaluation.Request(
            checkpoint=_CHECKPOINT.value,
            model=_MODEL.value,
            config=cli.read_settings(_CONFIG.value),
            has_config=cli.chooses_config(),
            is_overridden=bool(cli.keys_set()),
            keys=cli.keys_set(),
            policy=_POLICY.value,
            env=_ENV.value,
            prompts=_PROMPTS.value,
            rollouts=_ROLLOUTS.value,
            temperature=_TEMPERATURE.value,
            seed=_SEED.value,
            split=_SPLIT.value,
            out=_OUT.value,
            show=_SHOW.value,
        )
    )


if __name__ == "__main__":
    cli.run(main)
