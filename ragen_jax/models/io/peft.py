"""Adapters as a folder that the `peft` library loads onto its base model.

Read, they are added to the base model: W + scale * B A, PEFT's A and B.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ragen_jax.errors import UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import hugging_face, partial_reads, safetensors_files
from ragen_jax.models.io.safetensors_files import Stored
from ragen_jax.models.lora import Adapters
from ragen_jax.models.parameters import AXES_IN, Parameters
from ragen_jax.utils import atomic_files, json_files, machine_errors

_WEIGHTS = "adapter_model.safetensors"
# What adapter_config.json may say besides what means "off": any value where there is
# None, for it is read below or says nothing about the weights, otherwise one of these.
# What is not here, as DoRA or whole modules, would change the model in other ways.
_READ: dict[str, tuple[Any, ...] | None] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others, such as "pissa", change the base model before training.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        ("base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora")
    ),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform")),
    **dict.fromkeys(("layers_pattern", "task_type", "lora_dropout", "inference_mode")),
    **dict.fromkeys(("auto_mapping", "peft_version", "runtime_config", "eva_config")),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "unsloth_fixed")),
}
_LARGEST = 1e9  # of rank and alpha
_MERGED = (
    "merge them into their base model by peft's merge_and_unload, and give the folder"
    " of that"
)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What a folder's adapter_config.json says."""

    folder: Path
    base: str  # folder or hub id of the base model
    revision: str | None  # of the hub id
    rank: int
    scale: float  # what B A is multiplied by
    # Ends of the names of all adapted modules; None: those that the weights name.
    modules: tuple[str, ...] | None


def read_config(folder: Path) -> AdapterConfig:
    """Reads `folder`/adapter_config.json.

    Raises:
      UserError: if it cannot be read, or says what is not supported.
    """
    file = folder / hugging_face.ADAPTERS
    try:
        said = json_files.read_object(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read as JSON ({error}); copy the folder again"
        ) from None
    if said.get("peft_type") is None:
        raise UserError(f"{file} has no peft_type; copy the folder again")
    for key, value in said.items():
        supported = _READ.get(key, ())
        if value and supported is not None and value not in supported:
            raise UserError(
                f"{file}: {key} = {value!r:.60} is not supported; {_MERGED}"
            )
    base, revision = said.get("base_model_name_or_path"), said.get("revision")
    if not isinstance(base, str) or not isinstance(revision, str | None) or not base:
        raise UserError(
            f"{file}: base_model_name_or_path = {base!r:.60} with revision ="
            f" {revision!r:.60} names no model: write the base model's folder or hub id"
            " there"
        )
    rank, alpha = said.get("r", 8), said.get("lora_alpha", 8)  # PEFT's defaults
    is_rank = type(rank) is int and 1 <= rank < _LARGEST
    if not is_rank or type(alpha) not in (int, float) or not abs(alpha) < _LARGEST:
        raise UserError(
            f"{file}: r = {rank!r:.60} and lora_alpha = {alpha!r:.60} are not a whole"
            " number above 0 and a number; copy the folder again"
        )
    is_partial = said.get("exclude_modules") or said.get("layers_to_transform")
    targets = None if is_partial else said.get("target_modules")
    return AdapterConfig(
        folder,
        base,
        revision,
        rank,
        scale=alpha / (math.sqrt(rank) if said.get("use_rslora") else rank),
        modules=tuple(map(str, targets)) if isinstance(targets, list) else None,
    )


def open_parameters(
    adapters: AdapterConfig,
    config: ModelConfig,
    declared: Parameters,
    read_base: partial_reads.ReadPart,
) -> partial_reads.ReadPart:
    """Checks the adapters' headers, and gives a reader of parts of the merged leaves.

    Args:
      adapters: from `read_config`.
      config: the base model's shape.
      declared: the tree of its leaves.
      read_base: reads parts of them.

    Raises:
      UserError: if the file is missing or damaged, or a tensor in it is missing, of no
        adapted matrix of this model, or of another shape.
    """
    pairs = _find_pairs(adapters, config, declared)

    def read(path: partial_reads.Path, index: partial_reads.Index) -> np.ndarray:
        part = read_base(path, index)
        leaf = partial_reads.find_leaf(declared, path)
        for layer, block, place in partial_reads.blocks(path, leaf, index, part):
            if (path[-1], layer) in pairs:
                rows, columns = block
                down, up = pairs[path[-1], layer]
                # In float64, so that the sum is the same, rounded once to float32, in
                # whatever blocks and on whatever machine it is computed.
                product = up[rows].astype(float) @ down[:, columns].astype(float)
                place += adapters.scale * product
        return part

    return read


def _find_pairs(
    adapters: AdapterConfig, config: ModelConfig, declared: Parameters
) -> dict[tuple[str, int | None], tuple[np.ndarray, np.ndarray]]:
    """(target, layer) -> its A, [rank, in], and B, [out, rank], in the file."""
    file = adapters.folder / _WEIGHTS
    if not file.exists():
        raise UserError(
            f"{adapters.folder} holds no {_WEIGHTS}; copy it there, or have peft save"
            " the adapters as safetensors: pickled .bin weights are never opened"
        )
    header = safetensors_files.read_header(file)
    pairs: dict[tuple[str, int | None], tuple[np.ndarray, np.ndarray]] = {}
    missing, known = [], set()
    for target in AXES_IN:
        out, into = partial_reads.shape_in_file(
            ("layers", target), declared["layers"][target]
        )
        for layer in range(config.layers):
            prefix = _prefix(target, layer)
            down, up = (f"{prefix}.lora_{x}.weight" for x in "AB")
            known |= {down, up}
            if down in header and up in header:
                pairs[target, layer] = (
                    _mapped(file, down, header[down], (adapters.rank, into)),
                    _mapped(file, up, header[up], (out, adapters.rank)),
                )
            elif down in header or up in header or _is_named(prefix, adapters.modules):
                missing.append(up if down in header else down)
    if (unknown := sorted(header.keys() - known)) or missing or not pairs:
        raise UserError(
            f"{file} does not fit the base model {adapters.base}: missing"
            f" {missing[:3]} ({len(missing)} in all), not supported {unknown[:3]}"
            f" ({len(unknown)} in all); name the base model that the adapters were"
            f" trained on in {hugging_face.ADAPTERS}, or {_MERGED}"
        )
    return pairs


def _mapped(
    file: Path, name: str, stored: Stored, implied: tuple[int, int]
) -> np.ndarray:
    if stored.shape != implied or stored.dtype not in safetensors_files.DTYPES:
        kinds = ", ".join(safetensors_files.DTYPES)
        raise UserError(
            f"{file}: tensor {name} is {stored.dtype} of shape {stored.shape}; the base"
            f" model and r imply {implied}, of {kinds}: name the base model that the"
            f" adapters were trained on in {hugging_face.ADAPTERS}"
        )
    return stored.mapped(file)


def _prefix(target: str, layer: int) -> str:
    """PEFT's name of an adapted matrix."""
    module = hugging_face.LAYER_NAMES[target].removesuffix(".weight")
    return f"base_model.model.model.layers.{layer}.{module}"


def _is_named(prefix: str, modules: tuple[str, ...] | None) -> bool:
    """Whether target_modules, a list of ends of names, has the matrix among them."""
    return any(prefix.endswith(f".{module}") for module in modules or ())


def write_folder(
    folder: Path,
    config: ModelConfig,
    trained: Parameters,
    adapters: Adapters,
    base: str,
    revision: str | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, both or neither.

    Args:
      folder: must not exist, or be empty.
      config: the base model's shape.
      trained: an actor's adapters, as `lora.declare_adapters` lays them out.
      adapters: which they are.
      base: folder or hub id of the base model, for the reader.
      revision: of the hub id.
      origin: as `hugging_face.write_folder`.

    Raises:
      UserError: if `folder` holds anything.
    """
    names = hugging_face.LAYER_NAMES
    modules = [names[target].removesuffix(".weight") for target in adapters.targets]
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [module.rsplit(".", 1)[1] for module in modules],
    }
    with (
        atomic_files.new_folder(folder) as scratch,
        machine_errors.as_os_errors(folder),
    ):
        weights = scratch / _WEIGHTS
        save_file(_tensors(config, trained, adapters), weights)
        os.chmod(weights, 0o644)  # safetensors makes files its owner's alone.
        (scratch / hugging_face.ADAPTERS).write_text(
            json.dumps(written, indent=2), encoding="utf-8"
        )
        if origin is not None:
            hugging_face.write_origin(scratch, origin)


def _tensors(
    config: ModelConfig, trained: Parameters, adapters: Adapters
) -> dict[str, np.ndarray]:
    """By PEFT's names; its A is [rank, in], its B [out, rank], heads not split off."""
    tensors = {}
    for target in adapters.targets:
        a, b = (np.asarray(trained["layers"][target][x], np.float32) for x in "ab")
        assert a.ndim == AXES_IN[target] + 2
        for layer in range(config.layers):
            prefix = _prefix(target, layer)
            down = a[layer].reshape(-1, adapters.rank).T
            up = b[layer].reshape(adapters.rank, -1).T
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(down)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(up)
    return tensors
