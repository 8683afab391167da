"""Parameters as one nested dict, declared once: shape, logical axes, initial scale."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.models.config import ModelConfig

Parameters = dict[str, Any]  # nested dict of arrays, as `declare` lays it out


# How many leading axes of a layer's matrix (without L) are inputs; the rest are
# outputs.
AXES_IN = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical names, mapped to the mesh by mesh.py
    scale: float  # standard deviation of the initial values, normal around `mean`
    mean: float = 0.0


def declare(config: ModelConfig, *, value_head: bool = False) -> Parameters:
    """The tree of `Leaf`s of a model. Layers are stacked along a leading axis L.

    Args:
      config: the model's shape.
      value_head: adds "value_head", float[D], and leaves out the vocabulary head,
        for a critic.
    """
    c = config
    layer = {
        "attention_norm": Leaf((c.width,), ("embed",), 0, mean=1),
        "query": Leaf((c.width, c.heads, c.head_dim), ("embed", "heads", None), 0.02),
        "key": Leaf((c.width, c.kv_heads, c.head_dim), ("embed", "heads", None), 0.02),
        "value": Leaf(
            (c.width, c.kv_heads, c.head_dim), ("embed", "heads", None), 0.02
        ),
        "output": Leaf(
            (c.heads, c.head_dim, c.width),
            ("heads", None, "embed"),
            0.02 / (2 * c.layers) ** 0.5,
        ),
        "mlp_norm": Leaf((c.width,), ("embed",), 0, mean=1),
        "gate": Leaf((c.width, c.mlp_width), ("embed", "mlp"), 0.02),
        "up": Leaf((c.width, c.mlp_width), ("embed", "mlp"), 0.02),
        "down": Leaf(
            (c.mlp_width, c.width), ("mlp", "embed"), 0.02 / (2 * c.layers) ** 0.5
        ),
    }
    if c.qkv_bias:
        for name, heads in (("query", c.heads), ("key", c.kv_heads)):
            layer[f"{name}_bias"] = Leaf((heads, c.head_dim), ("heads", None), 0)
        layer["value_bias"] = Leaf((c.kv_heads, c.head_dim), ("heads", None), 0)
    if c.qk_norm:  # One scale for all heads, so that every device holds it whole.
        layer["query_norm"] = layer["key_norm"] = Leaf(
            (c.head_dim,), (None,), 0, mean=1
        )
    tree: Parameters = {
        "embedding": Leaf((c.vocabulary, c.width), ("vocabulary", "embed"), 0.02),
        "layers": {
            name: dataclasses.replace(
                leaf, shape=(c.layers, *leaf.shape), axes=("layers", *leaf.axes)
            )
            for name, leaf in layer.items()
        },
        "final_norm": Leaf((c.width,), ("embed",), 0, mean=1),
    }
    if value_head:
        # Zero, so that the critic starts with the value 0 everywhere.
        tree["value_head"] = Leaf((c.width,), ("embed",), 0)
    elif not c.tied:
        tree["head"] = Leaf((c.width, c.vocabulary), ("embed", "vocabulary"), 0.02)
    return tree


def is_leaf(x: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_leaf)` over a declared tree."""
    return isinstance(x, Leaf)


def initialize(key: jax.Array, declared: Parameters, dtype=jnp.float32) -> Parameters:
    """Random parameters as declared. One key per leaf, so that leaves are independent.

    Args:
      key: consumed.
      declared: from `declare`.
      dtype: of every parameter.
    """
    leaves, tree = jax.tree.flatten(declared, is_leaf=is_leaf)

    def one(leaf: Leaf, key: jax.Array) -> jax.Array:
        if leaf.scale == 0:
            return jnp.full(leaf.shape, leaf.mean, dtype)
        return leaf.mean + leaf.scale * jax.random.normal(key, leaf.shape, dtype)

    keys = jax.random.split(key, len(leaves))
    drawn = [one(*pair) for pair in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def shapes(declared: Parameters, dtype=jnp.float32) -> Parameters:
    """The declared tree as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), declared, is_leaf=is_leaf
    )


def count(parameters: Parameters) -> int:
    """How many numbers the tree holds; takes arrays, shapes or declared leaves."""
    leaves = jax.tree.leaves(parameters, is_leaf=is_leaf)
    return sum(math.prod(leaf.shape) for leaf in leaves)
