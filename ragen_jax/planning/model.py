"""The shape of a model whose files are not there, for planning."""

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

# Models of the hub by the shape that they have; a plan does not fetch them.
_OF_THE_HUB = {
    f"Qwen/Qwen2.5-{size}-Instruct": f"qwen2.5-{size.lower()}"
    for size in ("0.5B", "1.5B", "3B", "7B")
}


@dataclasses.dataclass(frozen=True)
class ShapeSource(Source):
    """A model of which there is a shape and nothing else.

    Texts are counted in the tokens of the embedded model, of which they take more: with
    the model's own tokenizer rows and cache are somewhat shorter.
    """

    shape: str = ""  # a key of SHAPES

    def read_config(self) -> ModelConfig:
        """The model's shape."""
        return SHAPES[self.shape]

    def open_parameters(self, config: ModelConfig, declared: Parameters) -> ReadPart:
        """Refused: a plan reads no weights."""
        raise UserError(
            f"--shape={self.shape} has no weights: give --config.model.path"
        )

    def read_tokenizer(self) -> PreTrainedTokenizerFast:
        """The embedded model's."""
        return sources.locate("tiny").read_tokenizer()


def find(path: str, shape: str | None) -> Source:
    """What a plan reads instead of the model.

    A model that is here is read but for its weights, and one whose shape is known is
    not fetched; of another one of the hub all but the weights is.

    Args:
      path: the settings' model.path.
      shape: of SHAPES; None: that of the path, where it leads to no files here but
        its shape is known.

    Raises:
      UserError: if there is neither a shape of this name nor a model.
    """
    if shape is not None and shape not in SHAPES:
        raise UserError(
            f"--shape={shape}: no shape of this name is known: choose one of"
            f" {', '.join(sorted(SHAPES))}, or give --config.model.path"
        )
    if shape is None and not Path(path).expanduser().is_dir():
        shape = _OF_THE_HUB.get(path.partition("@")[0])  # Of whatever revision.
    if shape is None:
        try:
            return sources.locate(path, with_weights=False)
        except UserError:
            if path not in SHAPES:
                raise
            shape = path
    tiny = sources.locate("tiny")
    return ShapeSource(tiny.path, is_gguf=False, shape=shape)
