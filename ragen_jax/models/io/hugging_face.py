"""Hugging Face folders: config.json, safetensors, tokenizer; read and written."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.models import config as model_config
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import partial_reads, safetensors_files, tokenizer_files
from ragen_jax.models.io.safetensors_files import Stored
from ragen_jax.models.parameters import Parameters
from ragen_jax.text import agent_template, pinned_date
from ragen_jax.utils import atomic_files, json_files, machine_errors

# Our layer leaves -> name in the file.
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# What transformers reads of a folder for its tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
ADAPTERS = "adapter_config.json"  # says that adapters lie beside it
ORIGIN = "ragen_jax.json"  # says what an exported agent was trained by
_GENERATION = "generation_config.json"
_STOPS_SAID = {  # The files that say where replies end, and how to correct them.
    _GENERATION: "correct it, or delete it: then config.json says where replies end",
    "config.json": "correct it, or write null: then the tokenizer says where replies"
    " end",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED = 64  # rows by which a tied model's head and embedding are compared
# Old files keep the rotary frequencies, which config.json says too.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def tensor_names(declared: Parameters, config: ModelConfig) -> dict[str, tuple]:
    """Name in the file -> where the tensor goes: (leaf path, layer or None)."""
    names: dict[str, tuple[tuple[str, ...], int | None]] = {
        _EMBEDDING: (("embedding",), None),
        "model.norm.weight": (("final_norm",), None),
    }
    if "head" in declared:
        names[_HEAD] = (("head",), None)
    for leaf in declared["layers"]:
        for index in range(config.layers):
            name = f"model.layers.{index}.{LAYER_NAMES[leaf]}"
            names[name] = (("layers", leaf), index)
    return names


def holds_adapters_alone(folder: Path) -> bool:
    """Whether it is a folder for `peft`: adapters, whose base model lies elsewhere."""
    return (folder / ADAPTERS).exists() and not (folder / "config.json").exists()


def read_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json.

    Raises:
      UserError: if the folder or file is missing, unreadable or not supported.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(
            f"model.path: there is no folder {folder}; give 'tiny' or a Hugging Face"
            " model folder"
        )
    if not path.exists():
        _check_kind(folder)
    elif (folder / ADAPTERS).exists():  # transformers would add them to the model.
        raise UserError(
            f"{folder} holds adapters ({ADAPTERS}), which are not read beside a model:"
            " merge them into it by peft's merge_and_unload and give the folder of"
            " that, or copy the folder without them"
        )
    try:
        parsed = json_files.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}); a model folder needs the"
            " config.json that came with its weights"
        ) from None
    return model_config.from_hugging_face(parsed, str(path))


def _check_kind(folder: Path) -> None:
    """Refuses what is written beside models and taken for one: a run, its steps."""
    is_run = (folder / "checkpoints").is_dir()
    is_step = folder.name.isdecimal() and folder.parent.name == "checkpoints"
    if is_run or is_step:
        made = shlex.join(["python", "launch/export.py", f"--checkpoint={folder}"])
        raise UserError(
            f"{folder} is a {'run' if is_run else 'checkpoint'} and no model: make one"
            f" of it by {made} --out=FOLDER, and name that folder here (evaluate.py"
            " also takes it as it is, as --checkpoint)"
        )


def open_parameters(
    folder: Path, config: ModelConfig, declared: Parameters
) -> partial_reads.ReadPart:
    """Checks the files' headers, and gives a reader of parts of the declared leaves.

    Raises:
      UserError: if a file is missing or damaged, a tensor is missing, superfluous or
        of another shape than config.json says, or a tied model has a head of its own.
    """
    places = _find_tensors(folder, config, declared)

    def read(path: partial_reads.Path, layer: int | None, block) -> np.ndarray:
        file, stored = places[path, layer]
        return stored.mapped(file)[block]

    return partial_reads.part_reader(read, declared)


def _find_tensors(
    folder: Path, config: ModelConfig, declared: Parameters
) -> dict[tuple, tuple[Path, Stored]]:
    """Where each declared tensor lies: (leaf path, layer or None) -> file and place."""
    files = safetensors_files.weight_files(folder)
    headers = {path: safetensors_files.read_header(path) for path in files}
    if config.layers > sum(map(len, headers.values())):  # Before so many are named.
        raise UserError(
            f"{folder}/config.json: num_hidden_layers = {config.layers}, and the files"
            f" hold {sum(map(len, headers.values()))} tensors; take config.json and"
            " weights of one model"
        )
    places = tensor_names(declared, config)
    unknown: list[str] = []
    heads: list[tuple[Path, Stored]] = []  # of a tied model
    tensors: dict[tuple[tuple[str, ...], int | None], tuple[Path, Stored]] = {}
    for path, header in headers.items():
        for name, stored in header.items():
            if name in places:
                where = places[name]
                if where in tensors:
                    raise UserError(
                        f"{folder}: tensor {name} is both in {tensors[where][0].name}"
                        f" and in {path.name}; take the files of one model"
                    )
                tensors[where] = path, stored
                leaf = partial_reads.find_leaf(declared, where[0])
                _check_tensor(
                    name, stored, partial_reads.shape_in_file(where[0], leaf), path
                )
            elif config.tied and name == _HEAD:
                _check_tensor(name, stored, (config.vocabulary, config.width), path)
                heads.append((path, stored))
            elif not _BUFFER.fullmatch(name):
                unknown.append(name)
    if heads and places[_EMBEDDING] not in tensors:
        # `save_model` of safetensors keeps the first of two names of one tensor.
        tensors[places[_EMBEDDING]] = heads.pop()
    missing = sorted(name for name, where in places.items() if where not in tensors)
    if missing or unknown:
        raise UserError(
            f"{folder}: the files do not match config.json: missing"
            f" {missing[:5]} ({len(missing)} in all), not used {unknown[:5]}"
            f" ({len(unknown)} in all); take config.json and weights of one model"
        )
    for head in heads:
        _check_copy(head, tensors[places[_EMBEDDING]])
    return tensors


def _check_copy(head: tuple[Path, Stored], embedding: tuple[Path, Stored]) -> None:
    """Refuses a tied model's head that is not a copy of the embedding, by some rows.

    Nobody knows which of the two is meant: transformers 4 leaves the head unread,
    transformers 5 unties it and computes with it.
    """
    tensors = [stored.mapped(path) for path, stored in (head, embedding)]
    narrow = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    rows = np.linspace(0, len(tensors[0]) - 1, _COMPARED).astype(int)
    head_rows, embedding_rows = (
        x[rows].astype(narrow).astype(np.float32) for x in tensors
    )
    if not np.array_equal(head_rows, embedding_rows, equal_nan=True):
        raise UserError(
            f"{head[0]}: {_HEAD} is another matrix than {_EMBEDDING}, and config.json"
            " says tie_word_embeddings = true: write false there to compute with it, or"
            " take the weights without it"
        )


def _check_tensor(
    name: str, stored: Stored, implied: tuple[int, ...], path: Path
) -> None:
    if stored.shape != implied:
        raise UserError(
            f"{path}: tensor {name} has shape {stored.shape}, config.json implies"
            f" {implied}; take config.json and weights of one model"
        )
    if stored.dtype not in safetensors_files.DTYPES:
        raise UserError(
            f"{path}: tensor {name} is stored as {stored.dtype}, which is not"
            f" supported; choose weights of {', '.join(safetensors_files.DTYPES)}"
        )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Reads the folder's tokenizer, without network and without remote code.

    The chat template of an exported agent is read as it was before the export.

    The tokens are those of tokenizer.json, whatever class the other files name:
    AutoTokenizer of transformers 5 gives every `qwen2` model Qwen's own way of cutting
    text into pieces, silently, and a model trained with another reads rubbish.

    Raises:
      UserError: if there is none, or one that cuts texts at random or changes them.
    """
    remedy = "copy the model's tokenizer.json and tokenizer_config.json into it"
    # Without this check some families are given a tokenizer that knows no words.
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json; {remedy}")
    try:
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                json_files.check_regular(folder / name, json_files.MOST_BYTES)
        tokenizer_files.check(path := folder / "tokenizer.json")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            tokenizer_file=str(path),  # tokenizer_config.json may name another.
        )
        tokenizer.chat_template = pinned_date.change_each(
            tokenizer.chat_template, agent_template.original
        )
        return tokenizer
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:  # A damaged file may raise anything, a panic too.
        raise UserError(
            f"{folder} has no tokenizer that can be read"
            f" ({type(error).__name__}: {error}".splitlines()[0]
            + f"); {remedy}"
        ) from None


def read_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end a reply by generation_config.json or, without it, config.json.

    So transformers has it. There are none where neither file is or names any.

    Raises:
      UserError: if the file says anything else.
    """
    for name, remedy in _STOPS_SAID.items():
        path = folder / name
        try:
            named = json_files.read_object(path).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}; {remedy}") from error
        ids = [] if named is None else named if isinstance(named, list) else [named]
        if not all(type(index) is int and index >= 0 for index in ids):
            raise UserError(
                f"{path}: eos_token_id = {named!r} is not a token; {remedy}"
            )
        return tuple(ids)
    return ()


def write_origin(folder: Path, origin: Mapping[str, Any]) -> None:
    """Writes ORIGIN into a folder."""
    _write_json(folder / ORIGIN, origin)


def _write_json(path: Path, written: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _view(tree: Parameters, where: tuple) -> np.ndarray:
    """One tensor of the files, as they lay it out."""
    path, layer = where
    leaf = np.asarray(partial_reads.find_leaf(tree, path))
    return partial_reads.to_file(path, leaf if layer is None else leaf[layer])


def _write_weights(
    folder: Path,
    config: ModelConfig,
    parameters: Parameters,
    dtype: np.dtype,
    most_bytes: int,
) -> None:
    places = tensor_names(parameters, config)

    def make(name: str) -> np.ndarray:
        return _view(parameters, places[name])

    shapes = {name: make(name).shape for name in places}
    safetensors_files.write_files(folder, shapes, make, dtype, most_bytes)


def write_folder(
    folder: Path,
    config: ModelConfig,
    parameters: Parameters,
    tokenizer: PreTrainedTokenizerFast,
    dtype=np.float32,
    max_shard_bytes: int = 5 * 2**30,
    stop_tokens: Sequence[int] = (),
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers loads; it appears whole or not at all.

    Args:
      folder: must not exist, or be empty.
      config: the model's shape.
      parameters: arrays laid out as `parameters.declare` says, on the host.
      tokenizer: saved beside the weights, with its chat template.
      dtype: of the stored weights, float32, bfloat16 or float16.
      max_shard_bytes: of weights a file; more are written as several with an index.
      stop_tokens: ids at which programs that generate with the model are to stop;
        without any it is the tokenizer's end of text.
      origin: what the weights come from, for ORIGIN, by which evaluations play.

    Raises:
      UserError: if `folder` holds anything.
    """
    with (
        atomic_files.new_folder(folder) as scratch,
        machine_errors.as_os_errors(folder),
    ):
        _write_weights(scratch, config, parameters, np.dtype(dtype), max_shard_bytes)
        ids = {
            kind: getattr(tokenizer, f"{kind}_token_id")
            for kind in ("bos", "eos", "pad")
        }
        config_json = model_config.to_hugging_face(
            config, dtype=np.dtype(dtype).name, **ids
        )
        _write_json(scratch / "config.json", config_json)
        generation = {f"{k}_token_id": x for k, x in ids.items() if x is not None}
        if stop_tokens:
            stops = sorted(stop_tokens)
            generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
        _write_json(scratch / _GENERATION, generation)
        tokenizer_files.write(scratch, tokenizer)
        if origin is not None:
            write_origin(scratch, origin)
