"""Writes qwen2_logits.npz: logits of Hugging Face's Qwen2ForCausalLM on known weights.

  pip install torch transformers numpy && python tests/golden/make_qwen2_logits.py

The stored file was made with torch 2.13.0 (CPU, float32, eager attention) and
transformers 5.23.0. The weights are not stored: `tensors` draws them from
numpy.random.RandomState, whose stream NumPy never changes. The test that reads the file
needs neither torch nor a network.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("qwen2_logits.npz")
SEED = 20
VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, MLP_WIDTH = 64, 32, 2, 4, 2, 48
TOKENS = np.random.RandomState(SEED + 1).randint(0, VOCABULARY, (2, 21))


def config(tied: bool) -> dict:
    """The model's config.json."""
    return dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=MLP_WIDTH,
        max_position_embeddings=128,
        rope_theta=1000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        hidden_act="silu",
        use_sliding_window=False,
    )


def tensors(tied: bool) -> dict[str, np.ndarray]:
    """Every weight by its name in the file: no bias 0, no norm 1, attention sharp."""
    head = WIDTH // HEADS
    key = (KV_HEADS * head, WIDTH)
    layer = {
        "input_layernorm.weight": (WIDTH,),
        "self_attn.q_proj.weight": (WIDTH, WIDTH),
        "self_attn.q_proj.bias": (WIDTH,),
        "self_attn.k_proj.weight": key,
        "self_attn.k_proj.bias": key[:1],
        "self_attn.v_proj.weight": key,
        "self_attn.v_proj.bias": key[:1],
        "self_attn.o_proj.weight": (WIDTH, WIDTH),
        "post_attention_layernorm.weight": (WIDTH,),
        "mlp.gate_proj.weight": (MLP_WIDTH, WIDTH),
        "mlp.up_proj.weight": (MLP_WIDTH, WIDTH),
        "mlp.down_proj.weight": (WIDTH, MLP_WIDTH),
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}": x for name, x in layer.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    rng = np.random.RandomState(SEED)
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {
        name: (1 + 0.2 * x if "norm" in name else 0.3 * x).astype(np.float32)
        for name, x in drawn.items()
    }


def main() -> None:
    """Runs the reference model on both kinds of head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    found = {}
    for tied in (False, True):
        model = Qwen2ForCausalLM(
            Qwen2Config(**config(tied), attn_implementation="eager")
        )
        weights = {name: torch.tensor(x) for name, x in tensors(tied).items()}
        missing = model.load_state_dict(weights, strict=False)
        assert missing.missing_keys == (["lm_head.weight"] if tied else [])
        assert not missing.unexpected_keys
        model.tie_weights()
        with torch.no_grad():
            logits = model.eval()(torch.tensor(TOKENS)).logits
        found["tied" if tied else "untied"] = logits.numpy()
    np.savez_compressed(FILE, tokens=TOKENS.astype(np.int32), **found)


if __name__ == "__main__":
    main()
