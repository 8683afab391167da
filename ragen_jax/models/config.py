"""The shape of a decoder-only transformer, read from or written as a config.json."""

import dataclasses
from typing import Any

from ragen_jax.errors import UserError

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",  # Llama 3.x, SmolLM2
    "Qwen2ForCausalLM": "qwen2",  # Qwen2, Qwen2.5
    "Qwen3ForCausalLM": "qwen3",
}
_REMEDY = "take the config.json that came with the model's weights"
LARGEST_SIZE = 2**31  # what arrays are indexed with is smaller
# Floats outside of these are 0 or infinite in float32.
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-37, 3e38
_FIRST_ROPE_BASE = 10_000.0  # Su et al. 2021, arXiv:2104.09864, 3.4.3
_OUTER_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# Our field -> the key under "rope_scaling" (or "rope_parameters").
_SCALING_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch their rotary positions: rope_type "llama3"."""

    factor: float  # slow rotations are this many times slower
    low_frequency_factor: float  # turns in `original_context` up to which all are slow
    high_frequency_factor: float  # turns from which none is; above the low factor
    original_context: int  # positions, before the stretching


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that the forward pass needs to know besides the parameters."""

    family: str  # "qwen2", "qwen3" or "llama"
    vocabulary: int  # V, rows of the embedding
    width: int  # D
    layers: int  # L
    heads: int  # query heads
    kv_heads: int  # key and value heads; divides `heads`
    head_dim: int
    mlp_width: int  # F
    rope_base: float  # theta of the rotary embedding
    norm_epsilon: float
    tied: bool  # logits come from the embedding's transpose
    qkv_bias: bool
    longest_context: int  # positions the model was made for
    qk_norm: bool = False  # query and key heads are normalized before rotation
    rope_scaling: RopeScaling | None = None


def from_hugging_face(config: dict[str, Any], where: str) -> ModelConfig:
    """Reads a parsed config.json, as transformers 4 or 5 writes it.

    Args:
      config: the parsed file.
      where: the file's path, for messages.

    Raises:
      UserError: if the architecture or one of its features is not supported, or a
        key that the forward pass needs is missing.
    """
    config = {key: value for key, value in config.items() if value is not None}
    family = _family(config, where)
    rope = _rope(config, where)
    if family == "llama":  # Files from before rotary bases were scaled lack it.
        rope = {"rope_theta": _FIRST_ROPE_BASE} | rope
    heads = _size(config, "num_attention_heads", where)
    width = _size(config, "hidden_size", where)
    usual = {"num_key_value_heads": heads}
    if family != "qwen3":  # There transformers takes 128, whatever the width.
        usual["head_dim"] = width // heads
    kv_heads = _size(usual | config, "num_key_value_heads", where)
    head_dim = _size(usual | config, "head_dim", where)
    if heads % kv_heads:
        raise _unusable("num_key_value_heads", kv_heads, where)
    if head_dim % 2:  # Rotary positions turn pairs.
        raise _unusable("head_dim", head_dim, where)
    read = ModelConfig(
        family=family,
        vocabulary=_size(config, "vocab_size", where),
        width=width,
        layers=_size(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=_size(config, "intermediate_size", where),
        rope_base=_positive(rope, "rope_theta", where),
        norm_epsilon=_positive(config, "rms_norm_eps", where),
        tied=_flag(config, "tie_word_embeddings", where),
        qkv_bias=family == "qwen2",
        longest_context=_size(config, "max_position_embeddings", where),
        qk_norm=family == "qwen3",
        rope_scaling=_rope_scaling(config, rope, where),
    )
    _check_features(config, read, where)
    return read


def _family(config: dict[str, Any], where: str) -> str:
    names = config.get("architectures") or "(none named)"
    name = str(names[0] if isinstance(names, list) else names)
    known = ", ".join(sorted(_ARCHITECTURES))
    if "moe" in name.lower() or "mixtral" in name.lower():
        raise UserError(
            f"{where}: architecture {name} is a mixture of experts, which is not"
            f" supported; choose a dense model of {known}"
        )
    if name not in _ARCHITECTURES:
        raise UserError(
            f"{where}: architecture {name} is not supported; choose a model of {known}"
        )
    family = _ARCHITECTURES[name]
    # transformers goes by the model type, and would compute something else.
    if (kind := config.get("model_type", family)) != family:
        raise UserError(
            f"{where}: model_type = {kind!r} contradicts architecture {name}; {_REMEDY}"
        )
    return family


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """All that concerns rotary positions, wherever the file keeps it.

    transformers 4 has "rope_theta" beside "rope_scaling", transformers 5 has both in
    "rope_parameters". Where a file has several, they count as transformers 5 takes
    them: "rope_scaling" before "rope_parameters", and either before the top level.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            raise _unusable(key, config[key], where)
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in nested.values()):
        raise UserError(
            f"{where}: rotary positions differ between kinds of layers, which is not"
            " supported; choose a model whose layers all rotate alike"
        )
    outer = {key: config[key] for key in _OUTER_ROPE_KEYS if key in config}
    rope = outer | {key: value for key, value in nested.items() if value is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{where}: rotary positions are scaled by {kind!r}, which is not supported;"
            " choose a model whose rope_type is 'default' or 'llama3'"
        )
    if (share := rope.get("partial_rotary_factor", 1)) != 1:
        raise UserError(
            f"{where}: partial_rotary_factor = {share!r} is not supported; choose a"
            " model that rotates whole heads"
        )
    return rope | {"rope_type": kind}


def _rope_scaling(
    config: dict[str, Any], rope: dict[str, Any], where: str
) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    key = _SCALING_KEYS["original_context"]
    values: dict[str, Any] = {"original_context": _size(rope, key, where)}
    # transformers 5 takes the outer one, transformers 4 the other.
    if (outer := config.get(key, rope[key])) != rope[key]:
        raise UserError(
            f"{where}: {key} is {outer!r} here and {rope[key]!r} beside rope_type;"
            f" {_REMEDY}"
        )
    for name in ("factor", "low_frequency_factor", "high_frequency_factor"):
        values[name] = _positive(rope, _SCALING_KEYS[name], where)
    scaling = RopeScaling(**values)
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        raise _unusable("high_freq_factor", scaling.high_frequency_factor, where)
    return scaling


def _check_features(config: dict[str, Any], read: ModelConfig, where: str) -> None:
    """Refuses what changes the computation and is not computed here."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(
            f"{where}: hidden_act = {activation!r} is not supported; choose a model of"
            " 'silu'"
        )
    if "quantization_config" in config:
        raise UserError(
            f"{where}: quantization_config says that the weights are quantized, which"
            " is not supported; choose the same model in bfloat16 or float32"
        )
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 has biases of query, key and value always, and knows neither key.
        if config.get(key) and read.family != "qwen2":
            raise UserError(
                f"{where}: {key} = {config[key]!r} is not supported for"
                f" {read.family}; choose a model without such biases"
            )
    _check_reach(config, read, where)


def _check_reach(config: dict[str, Any], read: ModelConfig, where: str) -> None:
    """Refuses layers that see less than all tokens before theirs, or those behind."""
    if not config.get("is_causal", True):
        raise UserError(
            f"{where}: is_causal = {config['is_causal']!r}: every token attends to"
            " later ones, which is not supported; choose a model that generates"
            " text"
        )
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list):
        raise _unusable("layer_types", kinds, where)
    others = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if others:
        raise UserError(
            f"{where}: layer_types has {others[0]!r}, which is not supported; choose a"
            " model whose layers all attend to the whole context"
        )
    if kinds:
        return
    if read.family == "llama":
        return _check_windows_of_llama(config, read, where)
    if not config.get("use_sliding_window"):
        return
    # The first `max_window_layers` layers attend to everything.
    unreached = _whole(config.get("max_window_layers"), least=read.layers)
    if unreached or _whole(config.get("sliding_window"), least=read.longest_context):
        return
    raise UserError(
        f"{where}: use_sliding_window is on, which is not supported; choose a"
        " model whose layers all attend to the whole context"
    )


def _check_windows_of_llama(
    config: dict[str, Any], read: ModelConfig, where: str
) -> None:
    """Refuses windows that transformers 5 generates in, and does not score in."""
    for key in ("sliding_window", "attention_chunk_size"):
        if key in config and not _whole(config[key], least=read.longest_context):
            raise UserError(
                f"{where}: {key} = {config[key]!r} is ambiguous for llama: in"
                " transformers it limits the KV cache, but not the full forward pass;"
                " write null there if the model attends to the whole context, or"
                " choose another"
            )


def _whole(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _size(config: dict[str, Any], key: str, where: str) -> int:
    value = _read(config, key, where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unusable(key, value, where)
    if not 1 <= value < LARGEST_SIZE:
        raise _unusable(key, value, where)
    return value


def _positive(config: dict[str, Any], key: str, where: str) -> float:
    value = _read(config, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unusable(key, value, where)
    if not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
        raise _unusable(key, value, where)
    return float(value)


def _flag(config: dict[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise _unusable(key, value, where)
    return value


def _read(config: dict[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise UserError(f"{where} lacks the key {key!r}; {_REMEDY}")
    return config[key]


def _unusable(key: str, value: Any, where: str) -> UserError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]} ..."
    return UserError(f"{where}: {key} = {shown} cannot be used; {_REMEDY}")


def to_hugging_face(
    config: ModelConfig,
    eos: int | None,
    pad: int | None,
    dtype: str,
    bos: int | None = None,
) -> dict[str, Any]:
    """The config.json that transformers 4 and 5 read back as the same model.

    Args:
      config: the model's shape.
      eos, pad: token ids; None where the tokenizer has none.
      dtype: of the stored weights, such as "float32".
      bos: token id; None of a model without one.
    """
    names = {family: name for name, family in _ARCHITECTURES.items()}
    family = _family_by_features(config)
    written = {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.longest_context,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": dtype,
    }
    if family == "llama":
        written |= {"attention_bias": False, "mlp_bias": False}
    else:
        written["use_sliding_window"] = False
    if family == "qwen3":
        written["attention_bias"] = False
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        written["rope_scaling"] = {"rope_type": "llama3"} | {
            key: scaling[name] for name, key in _SCALING_KEYS.items()
        }
    return written


def _family_by_features(config: ModelConfig) -> str:
    """The family whose computation the model's is.

    A GGUF file's Llama may have biases of query, key and value and none of the output:
    transformers knows such a model as Qwen2 alone, and its Llama would drop them.
    """
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias else "llama"
