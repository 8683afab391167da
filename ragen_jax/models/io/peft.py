"""Adapters as a folder that the `peft` library loads onto their base model."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import hugging_face
from ragen_jax.models.lora import Adapters
from ragen_jax.models.parameters import AXES_IN, Parameters
from ragen_jax.utils import atomic_files, machine_errors


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
        weights = scratch / "adapter_model.safetensors"
        save_file(_tensors(config, trained, adapters, modules), weights)
        os.chmod(weights, 0o644)  # safetensors makes files its owner's alone.
        (scratch / "adapter_config.json").write_text(
            json.dumps(written, indent=2), encoding="utf-8"
        )
        if origin is not None:
            hugging_face.write_origin(scratch, origin)


def _tensors(
    config: ModelConfig, trained: Parameters, adapters: Adapters, modules: list[str]
) -> dict[str, np.ndarray]:
    """By PEFT's names; its A is [rank, in], its B [out, rank], heads not split off."""
    tensors = {}
    for target, module in zip(adapters.targets, modules, strict=True):
        a, b = (np.asarray(trained["layers"][target][x], np.float32) for x in "ab")
        assert a.ndim == AXES_IN[target] + 2
        for layer in range(config.layers):
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            down = a[layer].reshape(-1, adapters.rank).T
            up = b[layer].reshape(adapters.rank, -1).T
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(down)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(up)
    return tensors
