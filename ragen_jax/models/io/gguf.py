"""Models in GGUF files: shape and weights, as `hugging_face` reads them of folders."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.models import config as model_config
from ragen_jax.models.config import ModelConfig, RopeScaling
from ragen_jax.models.io import gguf_file, gguf_tokenizer, partial_reads
from ragen_jax.models.io.gguf_file import GgufFile
from ragen_jax.models.parameters import Parameters

_FAMILIES = ("llama", "qwen2", "qwen3")
# Our layer leaves -> name in the file behind "blk.0.".
_LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "output": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_FACTORS = "rope_freqs.weight"  # what each pair's rotation is slower by
# Llama 3.1 and 3.3, and Llama 3.2. Files hold the factors that follow, not these.
_SCALINGS = tuple(RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0))
_REMEDY = "take another GGUF file of the model, or its Hugging Face folder"
_COMPARED = 32  # rows by which head and embedding are compared
_UNQUANTIZED = {"F32", "F16", "BF16"}
# Of the embedding's norm, by how much two copies may be apart: one rounded to BF16 by
# up to 2^-8, one quantized by a few hundredths; independent matrices are by sqrt(2).
_ROUNDED, _QUANTIZED = 2**-7, 0.7


def read_config(path: Path) -> ModelConfig:
    """Reads the model's shape.

    Raises:
      UserError: if the file cannot be read, or its architecture or one of its features
        is not supported.
    """
    file = gguf_file.open_file(path)
    family = file.metadata.get("general.architecture", "(none named)")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(
            f"{path}: architecture {family} is not supported; choose a model of"
            f" {', '.join(_FAMILIES)}"
        )
    _check_features(file, family)
    heads = _number(file, f"{family}.attention.head_count")
    kv_heads = _number(file, f"{family}.attention.head_count_kv", heads)
    width = _number(file, f"{family}.embedding_length")
    head_dim = _number(file, f"{family}.attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _number(file, f"{family}.{key}", head_dim) != head_dim:
            raise _unusable(file, f"{family}.{key}")
    if heads % kv_heads:
        raise _unusable(file, f"{family}.attention.head_count_kv")
    if head_dim % 2 or not head_dim:  # Rotary positions turn pairs.
        raise _unusable(file, f"{family}.attention.key_length")
    layers = _number(file, f"{family}.block_count")
    if layers > len(file.tensors):  # Before names of so many are made.
        raise _unusable(file, f"{family}.block_count")
    if _EMBEDDING not in file.tensors:
        raise UserError(f"{path} lacks the tensor {_EMBEDDING!r}; {_REMEDY}")
    rope_base = float(_number(file, f"{family}.rope.freq_base", 10_000.0, float))
    epsilon = _number(file, f"{family}.attention.layer_norm_rms_epsilon", None, float)
    return ModelConfig(
        family=family,
        vocabulary=file.tensors[_EMBEDDING].shape[0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=_number(file, f"{family}.feed_forward_length"),
        rope_base=rope_base,
        # Stored as float32: 9.999999747378752e-06 was 1e-5.
        norm_epsilon=float(str(np.float32(epsilon))),
        tied=_is_tied(file),
        # With norms of query and key no folder could hold them: then they are refused.
        qkv_bias=family != "qwen3" and "blk.0.attn_q.bias" in file.tensors,
        longest_context=_number(file, f"{family}.context_length"),
        qk_norm=family == "qwen3",
        rope_scaling=_rope_scaling(file, head_dim // 2, rope_base),
    )


def open_parameters(
    path: Path, config: ModelConfig, declared: Parameters
) -> partial_reads.ReadPart:
    """Checks the file's header, and gives a reader of parts of the declared leaves.

    Raises:
      UserError: if the file is damaged, or a tensor is missing, superfluous, of another
        shape than the metadata say or of a kind that cannot be read.
    """
    file = gguf_file.open_file(path)
    _check(file, config, declared)
    places = {where: name for name, where in _places(file, config, declared).items()}

    def read(leaf: partial_reads.Path, layer: int | None, block) -> np.ndarray:
        name = places[leaf, layer]
        kind = leaf[-1].removesuffix("_bias")
        is_rotary = config.family == "llama" and kind in ("query", "key")

        def read_rows(*limits: int) -> np.ndarray:
            rows = gguf_file.read_rows(file, name, *limits)
            return _halves(rows, config.head_dim) if is_rotary else rows

        if len(block) == 1:
            return read_rows()[block]
        rows, columns = block
        return read_rows(rows.start, rows.stop)[:, columns]

    return partial_reads.part_reader(read, declared)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer that the file describes. See `gguf_tokenizer.build`."""
    return gguf_tokenizer.build(gguf_file.open_file(path))


def read_stop_tokens(path: Path) -> tuple[int, ...]:
    """Ids at which llama.cpp ends a reply. See `gguf_tokenizer.stop_tokens`."""
    return gguf_tokenizer.stop_tokens(gguf_file.open_file(path))


def _halves(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads of Q or K of the llama architecture, in our order.

    llama.cpp turns neighbouring features of such a head, and its converter orders the
    rows for that; we turn feature i with feature i + d / 2, as Hugging Face does.
    """
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _rope_scaling(file: GgufFile, half: int, base: float) -> RopeScaling | None:
    """The scaling whose factors the file holds. See transformer.rotary_frequencies."""
    if _FACTORS not in file.tensors:
        return None
    _check_kinds(file, (_FACTORS,))
    factors = gguf_file.read_rows(file, _FACTORS)
    frequency = base ** (-np.arange(half) / half)
    for scaling in _SCALINGS:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_context * frequency / (2 * np.pi)
        unscaled = np.clip((turns - low) / (high - low), 0, 1)
        implied = 1 / (unscaled + (1 - unscaled) / scaling.factor)
        if factors.shape == implied.shape and np.allclose(factors, implied, rtol=1e-4):
            return scaling
    raise UserError(
        f"{file.path}: rotary positions are scaled by the tensor {_FACTORS} in another"
        " way than Llama 3.1's or 3.2's; take the model's Hugging Face folder"
    )


def _is_tied(file: GgufFile) -> bool:
    """Whether logits come from the embedding: no head, or the same one twice.

    Some files hold a tied embedding a second time, as the head, rounded otherwise. A
    head that was once the embedding, and trained since, is told from a copy by what no
    rounding explains, unless one of the two is quantized.
    """
    if _HEAD not in file.tensors:
        return True
    shape = file.tensors[_HEAD].shape
    if shape != file.tensors[_EMBEDDING].shape:
        return False
    names = (_HEAD, _EMBEDDING)
    _check_kinds(file, names)
    rows = np.unique(np.linspace(0, shape[0] - 1, _COMPARED).astype(int)).tolist()
    head, embedding = (
        np.concatenate([gguf_file.read_rows(file, name, i, i + 1) for i in rows])
        for name in names
    )
    kinds = {file.tensors[name].kind for name in names}
    allowed = _ROUNDED if len(kinds) > 1 else 0
    if not kinds <= _UNQUANTIZED:
        allowed = _QUANTIZED
    with np.errstate(invalid="ignore"):  # Damaged numbers are refused when read.
        head, embedding = head.astype(np.float64), embedding.astype(np.float64)
        apart, size = np.linalg.norm(head - embedding), np.linalg.norm(embedding)
    return bool(apart <= allowed * size)


def _places(
    file: GgufFile, config: ModelConfig, declared: Parameters
) -> dict[str, tuple[partial_reads.Path, int | None]]:
    """Name in the file -> (our leaf's path, its layer or None)."""
    embedding = _EMBEDDING
    if config.tied and _HEAD in file.tensors:  # The copy with more bits.
        copies = (_EMBEDDING, _HEAD)
        embedding = max(copies, key=lambda name: file.tensors[name].row_bytes)
    names: dict[str, tuple[tuple[str, ...], int | None]] = {
        embedding: (("embedding",), None),
        "output_norm.weight": (("final_norm",), None),
    }
    if "head" in declared:
        names[_HEAD] = (("head",), None)
    for leaf in declared["layers"]:
        for index in range(config.layers):
            names[f"blk.{index}.{_LAYER_NAMES[leaf]}"] = (("layers", leaf), index)
    return names


def _check(file: GgufFile, config: ModelConfig, declared: Parameters) -> None:
    places = _places(file, config, declared)
    expected = {*places, *((_EMBEDDING, _HEAD) if config.tied else ())}
    expected |= {_FACTORS} if config.rope_scaling is not None else set()
    missing = sorted(set(places) - set(file.tensors))
    unknown = sorted(set(file.tensors) - expected)
    if missing or unknown:
        raise UserError(
            f"{file.path}: the tensors do not match the metadata: missing"
            f" {missing[:5]} ({len(missing)} in all), not used {unknown[:5]}"
            f" ({len(unknown)} in all); {_REMEDY}"
        )
    _check_kinds(file, places)
    for name, (leaf, _) in places.items():
        implied = partial_reads.shape_in_file(
            leaf, partial_reads.find_leaf(declared, leaf)
        )
        if (shape := file.tensors[name].shape) != implied:
            raise UserError(
                f"{file.path}: tensor {name} has shape {shape}, the metadata imply"
                f" {implied}; {_REMEDY}"
            )


def _check_kinds(file: GgufFile, names) -> None:
    for name in names:
        if (kind := file.tensors[name].kind) not in gguf_file.KINDS:
            raise UserError(
                f"{file.path}: tensor {name} is stored as {kind}, which is not"
                f" supported; take a file of {', '.join(gguf_file.KINDS)}"
            )


def _check_features(file: GgufFile, family: str) -> None:
    """Refuses by name what would silently make another model of it."""
    metadata = file.metadata
    usual = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scale_linear": 1.0,
        "attention.sliding_window": 0,
        "attention.causal": True,
        "expert_count": 0,
    }
    scaling = metadata.get(f"{family}.rope.scaling.type")
    if isinstance(scaling, str) and scaling == "none":
        del usual["rope.scaling.factor"]  # Without a meaning then.
    for key, value in usual.items():
        stored = metadata.get(f"{family}.{key}", value)
        if isinstance(stored, np.ndarray | list) or stored != value:
            raise UserError(
                f"{file.path}: {family}.{key} = {stored!r:.60} is not supported; choose"
                f" a model where it is {value!r} or absent"
            )


def _number(file: GgufFile, key: str, usual: Any = None, kind: type = int) -> Any:
    """A positive number of the metadata, whole or not."""
    value = file.metadata.get(key, usual)
    if value is None:
        raise UserError(f"{file.path} lacks the key {key!r}; {_REMEDY}")
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number:
        raise _unusable(file, key)
    is_size = kind is int and 1 <= value < model_config.LARGEST_SIZE
    if kind is float:
        is_size = model_config.SMALLEST_NUMBER <= value <= model_config.LARGEST_NUMBER
    if not is_size:
        raise _unusable(file, key)
    return value


def _unusable(file: GgufFile, key: str) -> UserError:
    value = (str(file.metadata.get(key))[:40].splitlines() or ["''"])[0]
    return UserError(f"{file.path}: {key} = {value} cannot be used; {_REMEDY}")
