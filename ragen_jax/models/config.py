"""The shape of a decoder-only transformer, read from or written as a config.json."""

import dataclasses
from typing import Any

from ragen_jax.settings import UserError

_ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2"}
_REMEDY = "take the config.json that came with the model's weights"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that the forward pass needs to know besides the parameters."""

    family: str  # "qwen2"
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

    @property
    def query_groups(self) -> int:
        """How many query heads share one key/value head."""
        return self.heads // self.kv_heads


def from_hugging_face(config: dict[str, Any], where: str) -> ModelConfig:
    """Reads a parsed config.json.

    Args:
      config: the parsed file.
      where: the file's path, for messages.

    Raises:
      UserError: if the architecture or one of its features is not supported, or a
        key that the forward pass needs is missing.
    """
    config = {key: value for key, value in config.items() if value is not None}
    names = config.get("architectures") or "(none named)"
    name = names[0] if isinstance(names, list) else names
    if str(name) not in _ARCHITECTURES:
        raise UserError(
            f"{where}: architecture {name} is not supported; choose a model of"
            f" {', '.join(sorted(_ARCHITECTURES))}"
        )
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise _unusable("rope_parameters", parameters, where)
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling != "default":
        raise UserError(
            f"{where}: rotary positions are scaled by {scaling!r}, which is not"
            " supported; choose a model whose rope_type is 'default'"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(
            f"{where}: hidden_act = {activation!r} is not supported; choose a model of"
            " 'silu'"
        )
    if config.get("use_sliding_window"):
        raise UserError(
            f"{where}: use_sliding_window is on, which is not supported; choose a"
            " model whose layers all attend to the whole context"
        )
    heads = _size(config, "num_attention_heads", where)
    width = _size(config, "hidden_size", where)
    usual = {"num_key_value_heads": heads, "head_dim": width // heads}
    kv_heads = _size(usual | config, "num_key_value_heads", where)
    head_dim = _size(usual | config, "head_dim", where)
    if heads % kv_heads:
        raise _unusable("num_key_value_heads", kv_heads, where)
    if head_dim % 2:  # Rotary positions turn pairs.
        raise _unusable("head_dim", head_dim, where)
    return ModelConfig(
        family=_ARCHITECTURES[name],
        vocabulary=_size(config, "vocab_size", where),
        width=width,
        layers=_size(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=_size(config, "intermediate_size", where),
        rope_base=_positive(parameters | config, "rope_theta", where),
        norm_epsilon=_positive(config, "rms_norm_eps", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True,
        longest_context=_size(config, "max_position_embeddings", where),
    )


def _size(config: dict[str, Any], key: str, where: str) -> int:
    value = _read(config, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(key, value, where)
    return value


def _positive(config: dict[str, Any], key: str, where: str) -> float:
    value = _read(config, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _unusable(key, value, where)
    return float(value)


def _read(config: dict[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise UserError(f"{where} lacks the key {key!r}; {_REMEDY}")
    return config[key]


def _unusable(key: str, value: Any, where: str) -> UserError:
    return UserError(f"{where}: {key} = {value!r} cannot be used; {_REMEDY}")


def to_hugging_face(
    config: ModelConfig, eos: int, pad: int, dtype: str
) -> dict[str, Any]:
    """The config.json that transformers reads back as the same model.

    Args:
      config: the model's shape.
      eos, pad: token ids.
      dtype: of the stored weights, such as "float32".
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.longest_context,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": dtype,
    }
