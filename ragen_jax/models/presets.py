"""The embedded `tiny` model, and the shapes of models that benchmarks know by name."""

from pathlib import Path

from ragen_jax.models.config import ModelConfig

TINY_FOLDER = Path(__file__).parent / "tiny"

# About 1 M parameters: Qwen2-shaped, so that every path it takes is a real model's.
TINY = ModelConfig(
    family="qwen2",
    vocabulary=1024,
    width=128,
    layers=5,
    heads=8,
    kv_heads=2,
    head_dim=16,
    mlp_width=384,
    rope_base=10_000.0,
    norm_epsilon=1e-6,
    tied=True,
    qkv_bias=True,
    longest_context=4096,
)

# As the files' metadata say: SmolLM2-135M-Instruct and Qwen2.5-0.5B-Instruct.
SHAPES = {
    "tiny": TINY,
    "smollm2": ModelConfig(
        family="llama",
        vocabulary=49152,
        width=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        rope_base=100_000.0,
        norm_epsilon=1e-5,
        tied=True,
        qkv_bias=False,
        longest_context=8192,
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2",
        vocabulary=151936,
        width=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        mlp_width=4864,
        rope_base=1_000_000.0,
        norm_epsilon=1e-6,
        tied=True,
        qkv_bias=True,
        longest_context=32768,
    ),
}
