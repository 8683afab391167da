"""The shape of a decoder-only transformer, read from or written as a config.json."""

import dataclasses
from typing import Any

from ragen_jax.settings import UserError

_ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2"}


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
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in _ARCHITECTURES:
        raise UserError(
            f"{where}: architecture {names[0]} is not supported; choose a model of"
            f" {', '.join(sorted(_ARCHITECTURES))}"
        )
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
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
    try:
        heads = config["num_attention_heads"]
        return ModelConfig(
            family=_ARCHITECTURES[names[0]],
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_width=config["intermediate_size"],
            rope_base=float(config.get("rope_theta") or parameters["rope_theta"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True,
            longest_context=config["max_position_embeddings"],
        )
    except KeyError as missing:
        raise UserError(
            f"{where} lacks the key {missing}; take the config.json that came with the"
            " model's weights"
        ) from None


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
