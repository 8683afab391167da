r"""Supervised start: makes a small model, such as `tiny`, from demonstrations.

Trains a byte-level BPE tokenizer on the environments' texts, then a small transformer
on demonstrated episodes of FrozenLake, Sokoban and Bandit, or of SearchQA and WebShop,
and writes both as a Hugging Face folder.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny
  python launch/warm_start.py --config=configs/warm_start_words.py --out=my_words

Training can begin with any stage, from an existing model:

  python launch/warm_start.py --out=my_other --start=my_tiny \
      --first_stage=sokoban_boards

After each stage the model is kept in a folder OUT.after_STAGE, from which a command
that was stopped can go on in this way; the last one becomes OUT.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

import shlex
from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.models.presets import SHAPES
from ragen_jax.warm_start import GROWN, STAGES, checks, kept

_DEFAULT = str(Path(__file__).parents[1] / "configs" / "warm_start.py")
_CONFIG = cli.define_config(_DEFAULT)
_OUT = flags.DEFINE_string("out", "runs/tiny", "Folder to write; must not exist.")

_START = flags.DEFINE_string(
    "start", None, "Folder of a model to continue from; default: a new one."
)
_NAMES = [name for stages in STAGES.values() for name in stages]
_FIRST = flags.DEFINE_enum(
    "first_stage", None, _NAMES, "First stage to train; default: the model's first."
)
_LAST = flags.DEFINE_enum(
    "last_stage", None, _NAMES, "Last stage to train; default: the model's last."
)


def main() -> None:
    config = _CONFIG.value
    stage_names = _stages(checks.check_model(config))
    checks.check(config, stage_names, SHAPES[config.model].vocabulary)
    cli.check_alone("a supervised start")
    out = cli.check_out_folder(_OUT.value)
    with cli.user_mistakes():
        keeper = kept.KeptStages(out, _START.value)
    # Imported here so that a wrong flag is reported without waiting for JAX.
    import jax

    from ragen_jax.models import parameters
    from ragen_jax.models.io import hugging_face
    from ragen_jax.text import chat_template
    from ragen_jax.warm_start import stages

    with cli.user_mistakes():
        stages.check_environments(config, stage_names)
        tokenizer, weights = stages.begin(config, _START.value)
    pieces = chat_template.cut_pieces(tokenizer, config.model)
    count = parameters.count(weights)
    print(f"tokenizer: {len(tokenizer)} tokens; model: {count:,} parameters")
    with keeper.adding_remedy():
        for name in stage_names:
            weights = stages.train_stage(weights, name, config, pieces, tokenizer)
            with cli.user_mistakes():
                model = SHAPES[config.model], jax.device_get(weights), tokenizer
                keeper.keep(name, lambda f, m=model: hugging_face.write_folder(f, *m))
        keeper.finish()
    next_words = ["python", "launch/evaluate.py", f"--model={out}", "--config=CONFIG"]
    print(f"wrote {out}; next: {shlex.join(next_words)} of what it was taught")


def _stages(model: str) -> tuple[str, ...]:
    """The stages that the flags ask for, in order.

    Raises:
      UserError: if the flags do not fit the model or one another.
    """
    known = STAGES[model]
    first, last = _FIRST.value or known[0], _LAST.value or known[-1]
    for flag, name in (("first", first), ("last", last)):
        if name not in known:
            raise UserError(
                f"--{flag}_stage={name} is not a stage of {model}: choose one of"
                f" {', '.join(known)}"
            )
    if model in GROWN and not _START.value:
        raise UserError(
            f"{model} begins with the weights of another model: give"
            " --start=tiny_sokoban, or a folder that the variant solver wrote"
        )
    if model not in GROWN and (first != known[0]) != bool(_START.value):
        raise UserError(
            f"--first_stage={first} and --start={_START.value} do not go"
            f" together: {known[0]} begins a new model, later stages need --start"
        )
    if known.index(first) > known.index(last):
        raise UserError(
            f"--first_stage={first} comes after --last_stage={last}: the"
            f" order is {', '.join(known)}"
        )
    return known[known.index(first) : known.index(last) + 1]


if __name__ == "__main__":
    cli.run(main)
