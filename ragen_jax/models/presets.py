"""The embedded `tiny` model."""

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
