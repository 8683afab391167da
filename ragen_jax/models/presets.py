"""The embedded models, and the shapes of models that are known by name."""

import dataclasses
from pathlib import Path

from ragen_jax.models.config import ModelConfig

# The embedded models, and the environments that each was taught (docs/tiny_model.md).
TAUGHT = {
    "tiny": ("frozen_lake", "sokoban", "bandit"),
    "tiny_sokoban": ("sokoban",),
    "tiny_symbols": ("sokoban",),
    "tiny_rooms": ("sokoban",),
    "tiny_words": ("search_qa", "webshop"),
}
EMBEDDED = {name: Path(__file__).parent / name for name in TAUGHT}

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

TINY_SYMBOLS = dataclasses.replace(TINY, layers=8)
TINY_ROOMS = dataclasses.replace(TINY, layers=12)
TINY_WORDS = dataclasses.replace(TINY, vocabulary=2048)

_QWEN = ModelConfig(
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
)


def _qwen(**changes) -> ModelConfig:
    return dataclasses.replace(_QWEN, **changes)


# As the files' metadata say: SmolLM2-135M-Instruct and Qwen2.5's Instruct models.
SHAPES = {
    "tiny": TINY,
    "tiny_symbols": TINY_SYMBOLS,
    "tiny_rooms": TINY_ROOMS,
    "tiny_words": TINY_WORDS,
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
    "qwen2.5-0.5b": _QWEN,
    "qwen2.5-1.5b": _qwen(
        width=1536, layers=28, heads=12, head_dim=128, mlp_width=8960
    ),
    "qwen2.5-3b": _qwen(width=2048, layers=36, heads=16, head_dim=128, mlp_width=11008),
    "qwen2.5-7b": _qwen(
        vocabulary=152064,
        width=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        mlp_width=18944,
        tied=False,
    ),
}
