"""The model: what its settings name, on a mesh, before any weight of it is read."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import SettingsError, UserError
from ragen_jax.models import lora, parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import sources
from ragen_jax.models.io.sources import Source
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.settings import LoraSettings, Settings
from ragen_jax.text import chat_template
from ragen_jax.text.chat_template import ChatPieces
from ragen_jax.text.token_bytes import highest_id
from ragen_jax.training import placement

# Most rows of the embedding: _PADDED times the tokenizer's ids, plus _MOST_PADDING.
_PADDED, _MOST_PADDING = 8, 2**20


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model on a mesh. Static: it holds no array.

    Trees of declared parameters (`parameters.Leaf`) and of shardings are made once,
    when they are first asked for.
    """

    settings: Settings
    mesh: Mesh
    source: Source  # where its weights are
    config: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    pieces: ChatPieces
    adapters: lora.Adapters | None  # None: all weights are trained
    dtype: Any  # of the transformer's computation

    @functools.cached_property
    def declared(self) -> Parameters:
        """All parameters of the policy."""
        return parameters.declare(self.config)

    @functools.cached_property
    def trained(self) -> Parameters:
        """What training changes of the policy: all of it, or its adapters."""
        if self.adapters is None:
            return self.declared
        return lora.declare_adapters(self.config, self.adapters)

    @functools.cached_property
    def shardings(self):
        """NamedShardings of `declared`, as training shards it."""
        return placement.training_shardings(self.declared, self.mesh)


def make_model(settings: Settings, mesh: Mesh, source: Source | None = None) -> Model:
    """Reads the model's shape and tokenizer, no weight, and checks that they agree.

    Args:
      settings: `model` and `lora` are read here, the others by functions that take a
        Model.
      mesh: of all devices.
      source: of the model; None: what `model.path` names.

    Raises:
      UserError: if model and tokenizer are not there or do not fit together, or this
        device has no such attention as model.attention asks for.
    """
    source = source or sources.locate(settings.model.path)
    config = source.read_config()
    tokenizer = source.read_tokenizer()
    # The highest id, not the number of tokens: ids may have gaps.
    if (ids := highest_id(tokenizer) + 1) > config.vocabulary:
        raise UserError(
            f"{source.name}: the tokenizer's ids need a vocabulary of {ids} but the"
            f" model has vocab_size = {config.vocabulary}; take both from one model"
        )
    # Rows that stand for no token pad a vocabulary; tables are made of all of them.
    if config.vocabulary > _PADDED * ids + _MOST_PADDING:
        raise UserError(
            f"{source.name}: vocab_size = {config.vocabulary}, and the tokenizer has"
            f" {ids} ids; take both from one model"
        )
    dtype = compute_dtype(settings.model.compute_dtype)
    # Called for its check: refuses a kernel that this device lacks before compiling.
    backend_choices.row_attention(settings.model.attention, dtype, config.head_dim)
    return Model(
        settings=settings,
        mesh=mesh,
        source=source,
        config=config,
        tokenizer=tokenizer,
        pieces=chat_template.cut_pieces(
            tokenizer, source.name, source.read_stop_tokens()
        ),
        adapters=read_adapters(settings.lora),
        dtype=dtype,
    )


def check_axes(model: Model, sizes: Mapping[str, int]) -> None:
    """Refuses a mesh with an fsdp or tensor axis that divides none of the parameters.

    Args:
      model: its own mesh is not read.
      sizes: of the mesh's axes.

    Raises:
      SettingsError: naming the axis, and sizes that shard the model.
    """
    config = model.config
    dimensions = {
        meshes.FSDP: f"width, {config.width}",
        meshes.TENSOR: f"heads ({config.heads}, and {config.kv_heads} of keys), nor its"
        f" MLP's width ({config.mlp_width}), nor its vocabulary ({config.vocabulary})",
    }
    for axis, dimension in dimensions.items():
        size, room = sizes[axis], sizes[axis] * sizes[meshes.DATA]
        useful = [
            other
            for other in range(1, size + 1)
            if room % other == 0
            and meshes.shards_parameters(model.declared, {**sizes, axis: other}, axis)
        ]
        if size not in useful:
            raise SettingsError(
                f"mesh.{axis} = {size} devices would shard no parameter of the model,"
                f" since {size} does not divide its {dimension}: set mesh.{axis} to"
                f" {useful[-1]} and mesh.data to {room // useful[-1]}"
            )


def read_adapters(settings: LoraSettings) -> lora.Adapters | None:
    """The adapters that the section `lora` asks for; None without any.

    Raises:
      UserError: if lora.targets matches no weight.
    """
    targets = lora.read_targets(settings.targets)
    return (
        lora.Adapters(settings.rank, settings.alpha, targets) if settings.rank else None
    )


def compute_dtype(name: str):
    """The dtype that model.compute_dtype means here."""
    if name == "auto":
        name = backend_choices.choices().compute_dtype
    return jnp.dtype(name)
