"""Writes family_logits.npz: logits of Hugging Face's own models on known weights.

  pip install torch transformers numpy && python tests/golden/make_family_logits.py

The stored file was made with torch 2.13.0 (CPU, float32, eager attention) and
transformers 5.23.0. The weights are not stored: `tensors` draws them from
numpy.random.RandomState, whose stream NumPy never changes. The test that reads the file
needs neither torch nor a network.
"""

import copy
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("family_logits.npz")
SEED, VOCABULARY = 30, 64
TOKENS = np.random.RandomState(SEED + 1).randint(0, VOCABULARY, (2, 24))
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    hidden_act="silu",
)
_LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama")
# Heads wider than hidden_size / num_attention_heads, as in Qwen3-0.6B.
_QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16)
# With base 1000 and 64 positions some pairs keep their speed, some get slow, and some
# lie between.
_SCALED = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# Each as transformers 4 or, where there are "rope_parameters", transformers 5 writes.
CONFIGS = {
    "qwen2": _COMMON
    | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1000.0)
    | dict(head_dim=10, sliding_window=8, use_sliding_window=False),
    "qwen3_untied": _COMMON | _QWEN3 | dict(rope_theta=1000.0),
    "qwen3_tied": _COMMON
    | _QWEN3
    | dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0))
    | dict(tie_word_embeddings=True, layer_types=["full_attention"] * 2),
    "llama": _COMMON | _LLAMA | dict(rope_theta=1000.0, rope_scaling=None),
    "llama3": _COMMON | _LLAMA | dict(rope_theta=1000.0, rope_scaling=_SCALED),
    "llama3_new": _COMMON
    | _LLAMA
    | dict(head_dim=12, rope_parameters=_SCALED | dict(rope_theta=500.0)),
    "smollm2": _COMMON
    | _LLAMA
    | dict(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    | dict(rope_theta=1000.0, tie_word_embeddings=True),
}


def tensors(config: dict) -> dict[str, np.ndarray]:
    """Every weight by its name in the file: no bias 0, no norm 1, attention sharp."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    sizes = {"q": config["num_attention_heads"] * head}
    sizes["k"] = sizes["v"] = config["num_key_value_heads"] * head
    layer = {
        "input_layernorm.weight": (width,),
        **{f"self_attn.{x}_proj.weight": (size, width) for x, size in sizes.items()},
        "self_attn.o_proj.weight": (width, sizes["q"]),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (head,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, width)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": x for name, x in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, width)
    rng = np.random.RandomState(SEED)
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {
        name: (1 + 0.2 * x if "norm" in name else 0.3 * x).astype(np.float32)
        for name, x in drawn.items()
    }


def main() -> None:
    """Runs the reference model of every configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for case, config in CONFIGS.items():
        changed = AutoConfig.for_model(**copy.deepcopy(config))  # It is changed there.
        model = AutoModelForCausalLM.from_config(changed, attn_implementation="eager")
        weights = {name: torch.tensor(x) for name, x in tensors(config).items()}
        missing = model.load_state_dict(weights, strict=False)
        tied = config["tie_word_embeddings"]
        assert missing.missing_keys == (["lm_head.weight"] if tied else [])
        assert not missing.unexpected_keys
        model.tie_weights()
        with torch.no_grad():
            found[case] = model.eval()(torch.tensor(TOKENS)).logits.numpy()
    np.savez_compressed(FILE, tokens=TOKENS.astype(np.int32), **found)


if __name__ == "__main__":
    main()
