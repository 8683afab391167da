"""A model to plan for of which only the shape is known."""

import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import sources
from ragen_jax.models.io.partial_reads import ReadPart
from ragen_jax.models.io.sources import Source
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.presets import SHAPES

# Hub ids whose shape is known, so that a plan need not download them.
_SHAPE_OF_HUB_ID = {
    f"Qwen/Qwen2.5-{size}-Instruct": f"qwen2.5-{size.lower()}"
    for size in ("0.5B", "1.5B", "3B", "7B")
}


@dataclasses.dataclass(frozen=True)
class ShapeSource(Source):
    """A model without files: a shape, and the tokenizer of the embedded model `tiny`.

    That tokenizer makes more tokens of a text than the model's own would, so that rows
    and cache are planned somewhat too long.
    """

    shape: str = ""  # a key of SHAPES

    def read_config(self) -> ModelConfig:
        """The model's shape."""
        return SHAPES[self.shape]

    def open_parameters(self, config: ModelConfig, declared: Parameters) -> ReadPart:
        """Raises UserError: there are no weights."""
        raise UserError(
            f"--shape={self.shape} has no weights: give --config.model.path"
        )

    def read_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the embedded model."""
        return sources.locate("tiny").read_tokenizer()


def find(path: str, shape: str | None) -> Source:
    """Finds config and tokenizer of the model to plan for; never its weights.

    A local model is used as it is. For a hub id the shape is used if it is known;
    otherwise all but the weights is downloaded.

    Args:
      path: the settings' model.path.
      shape: a key of SHAPES that replaces the model; None: the model of `path`.

    Raises:
      UserError: if there is no such shape, or no such model.
    """
    if shape is not None and shape not in SHAPES:
        raise UserError(
            f"--shape={shape}: no shape of this name is known: choose one of"
            f" {', '.join(sorted(SHAPES))}, or give --config.model.path"
        )
    if shape is None and not Path(path).expanduser().is_dir():
        shape = _SHAPE_OF_HUB_ID.get(path.partition("@")[0])  # At any revision.
    if shape is None:
        try:
            return sources.locate(path, with_weights=False)
        except UserError:
            if path not in SHAPES:
                raise
            shape = path
    tiny = sources.locate("tiny")
    return ShapeSource(tiny.path, is_gguf=False, shape=shape)
