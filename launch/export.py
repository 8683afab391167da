"""Writes a trained actor as a Hugging Face folder, for use anywhere.

  python launch/export.py --checkpoint=runs/frozenlake --out=my_agent

transformers, vLLM and other programs load the folder as they load the model that the
training began with; ragen_jax plays it with

  python launch/evaluate.py --model=my_agent --config=configs/frozenlake.py

A checkpoint is a run's workdir (its best step, or the last if none was validated) or
one step's folder. The folder appears whole or not at all.
"""

import sys
from pathlib import Path

import common
from absl import flags

from ragen_jax.settings import UserError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir or one step's folder.")
_OUT = flags.DEFINE_string("out", None, "The new folder.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the stored weights."
)


def main() -> None:
    out = _check_flags()
    found, settings = common.find_checkpoint(_CHECKPOINT.value)
    # Imported here so that a wrong flag is told without waiting for JAX.
    import jax
    import jax.numpy as jnp

    from ragen_jax import checkpoints, evaluation, loop
    from ragen_jax.models import hugging_face, parameters
    from ragen_jax.progress import Console

    console = Console(sys.stdout)
    with common.user_mistakes():
        settings = evaluation.fit_to_devices(settings, jax.device_count())
        run = loop.prepare(settings)
        wanted = {"actor": loop.abstract_state(run).actor}
    console.status(f"reading step {found.step} ...")
    actor = checkpoints.restore(found.directory, found.step, wanted, partial=True)
    actor = jax.device_get(actor["actor"])
    console.status(f"writing {out} ...")
    with common.user_mistakes():
        hugging_face.write_folder(
            out, run.config, actor, run.tokenizer, jnp.dtype(_DTYPE.value)
        )
    console.line(
        f"exported     step {found.step} of {found.directory}, the {found.which} one\n"
        f"parameters   {parameters.count(actor) / 1e6:.2f} M in {_DTYPE.value}\n"
        f"folder       {out}\n\n"
        f"next: python launch/evaluate.py --model={out} --config=CONFIG"
    )


def _check_flags() -> Path:
    """The new folder. Raises UserError for a flag that cannot be used."""
    for name in ("checkpoint", "out"):
        if not flags.FLAGS[name].value:
            raise UserError(
                f"--{name} is missing: pass --checkpoint=WORKDIR --out=NEW_FOLDER"
            )
    out = Path(_OUT.value).expanduser().absolute()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"--out={out} exists and is not empty: name a new folder")
    return out


if __name__ == "__main__":
    common.run(main)
