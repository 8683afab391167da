"""Writes a trained actor as a Hugging Face folder, for use anywhere.

  python launch/export.py --checkpoint=runs/frozenlake --out=my_agent

transformers, vLLM and other programs load the folder as they load the model that the
training began with; ragen_jax plays it with

  python launch/evaluate.py --model=my_agent

Of a run with adapters (lora.rank), --adapter writes the adapters alone, as a folder for
the peft library, which names its base model; otherwise they are merged into that.

A checkpoint is a run's workdir (its best step, or the last if none was validated) or
one step's folder. The folder appears whole or not at all.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

import shlex
import sys
from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.cli import trust
from ragen_jax.cli.subjects import find_checkpoint, origin_of
from ragen_jax.errors import UserError

flags.adopt_module_key_flags(trust)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "A run's workdir, or one step's folder."
)
_MODEL = flags.DEFINE_string(
    "model", None, "New path of the model that the run began with, if it has moved."
)
_OUT = flags.DEFINE_string("out", None, "Folder to write.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Dtype of the weights."
)
_ADAPTER = flags.DEFINE_boolean("adapter", False, "Write only the adapters.")
_GGUF = (
    "peft reads no GGUF file: convert the base model to a folder first, and write that"
    " as base_model_name_or_path in adapter_config.json"
)


def main() -> None:
    out = _check_flags()
    found, settings = find_checkpoint(_CHECKPOINT.value, _MODEL.value)
    cli.start_jax_alone(settings, "an export")  # Adapters are added as in training.
    _check_adapters(settings.lora.rank)
    # Imported here so that a wrong flag is reported without waiting for JAX.
    import jax
    import jax.numpy as jnp

    from ragen_jax.models import parameters
    from ragen_jax.models.io import hugging_face, peft, sources
    from ragen_jax.parallel import mesh as meshes
    from ragen_jax.reporting.console import Console
    from ragen_jax.settings import fit_mesh
    from ragen_jax.text import agent_template
    from ragen_jax.training import messages, weights
    from ragen_jax.training.model import make_model

    console = Console(sys.stdout)
    sizes = fit_mesh(settings.mesh, jax.device_count())
    with cli.user_mistakes():
        model = make_model(settings, meshes.make_mesh(**sizes))
        path, source = settings.model.path, model.source
        base = sources.outside_name(path, source) if _ADAPTER.value else ()
    console.status(f"reading step {found.step} ...")
    origin = origin_of(found, settings)
    read = weights.restore_trained if _ADAPTER.value else weights.restore_actor
    actor = jax.device_get(read(model, found.directory, found.step))
    console.status(f"writing {out} ...")
    with cli.user_mistakes():
        if _ADAPTER.value:
            peft.write_folder(out, model.config, actor, model.adapters, *base, origin)
            notes = [_GGUF] * source.is_gguf
            notes += [agent_template.of_adapters(settings.env.thinking)]
        else:
            tokenizer, note = agent_template.for_agent(
                model.tokenizer, model.pieces, thinking=settings.env.thinking
            )
            notes = [note] * bool(note)
            hugging_face.write_folder(
                out,
                model.config,
                actor,
                tokenizer,
                jnp.dtype(_DTYPE.value),
                stop_tokens=model.pieces.stop_tokens,
                origin=origin,
            )
    notes += agent_template.of_rollout(settings.rollout)
    dtype = "float32" if _ADAPTER.value else _DTYPE.value
    console.line(
        f"exported     step {found.step} of {found.directory}, the {found.which} one\n"
        f"parameters   {parameters.count(actor) / 1e6:.2f} M in {dtype}\n"
        f"folder       {out}"
    )
    for note in notes:
        console.line(f"note         {note}")
    words = messages.evaluation(f"--model={out}", settings=settings)
    console.line(f"\nnext: {shlex.join(words)}")


def _check_flags() -> Path:
    """Returns the folder to write. Raises UserError for a flag that cannot be used."""
    for name in ("checkpoint", "out"):
        if not flags.FLAGS[name].value:
            raise UserError(
                f"--{name} is missing: pass --checkpoint=WORKDIR --out=NEW_FOLDER"
            )
    cli.refuse_unread(["dtype"], beside="adapter")  # Adapters are written in float32.
    return cli.check_out_folder(_OUT.value)


def _check_adapters(rank: int) -> None:
    """Raises UserError if adapters are asked for, and a run of this rank has none."""
    if _ADAPTER.value and rank == 0:
        raise UserError(
            f"--adapter: {_CHECKPOINT.value} was trained without adapters (lora.rank ="
            " 0): leave --adapter out, which writes the whole model"
        )


if __name__ == "__main__":
    cli.run(main)
