"""More layers and tokens for a trained model; at first they do not change its outputs.

Called by stages.py, for models that start from another one (GROWN).
"""

import dataclasses

import jax
import jax.numpy as jnp

from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters

# The matrices that end a layer's two branches, into the residual stream.
_ADDED = ("output", "down")


def can_grow(shape: ModelConfig, wanted: ModelConfig, last: int = 0) -> bool:
    """Whether shapes differ in layers alone, and `deepen` can add those."""
    if dataclasses.replace(shape, layers=wanted.layers) != wanted:
        return False
    more = wanted.layers - shape.layers
    return more == 0 or last <= min(more, shape.layers) and more - last <= shape.layers


def deepen(
    weights: Parameters, shape: ModelConfig, wanted: ModelConfig, last: int = 0
) -> Parameters:
    """`weights` with new layers that add nothing yet, so the function is the same.

    New first layers can learn to read tokens differently for the layers above; new last
    ones can compute more from what the others found. They are copies of the model's own
    first and last layers, so that they attend where these do, but with their output
    matrices at 0.

    Args:
      weights: of the model that grows; `can_grow` says whether it can.
      shape: the shape of `weights`.
      wanted: the deeper shape.
      last: how many of the new layers come last; the others come first.
    """
    first = wanted.layers - shape.layers - last

    def grown(path, layers):
        new = layers[:first], layers[shape.layers - last :]
        if path[-1].key in _ADDED:
            new = jax.tree.map(jnp.zeros_like, new)
        return jnp.concatenate([new[0], layers, new[1]])

    layers = jax.tree.map(jnp.asarray, weights["layers"])
    return {**weights, "layers": jax.tree_util.tree_map_with_path(grown, layers)}


def draw_embeddings(
    weights: Parameters, tokens: jax.Array, key: jax.Array
) -> Parameters:
    """`weights` with random embeddings, of the mean norm, for int32[n] tokens.

    Training pushes all tokens that it never meets away from every reply, until their
    embeddings point the same way: at the measured cosine of 0.99 the model cannot tell
    two names apart, and cannot learn to copy them.
    """
    table = jnp.asarray(weights["embedding"])
    length = jnp.linalg.norm(table, axis=1).mean()
    embeddings = jax.random.normal(key, (len(tokens), table.shape[1]))
    embeddings *= length / jnp.linalg.norm(embeddings, axis=1, keepdims=True)
    return {**weights, "embedding": table.at[tokens].set(embeddings)}


def add_tokens(
    weights: Parameters, old: dict[str, int], new: dict[str, int], key: jax.Array
) -> Parameters:
    """`weights` for a tokenizer with more tokens, whose embeddings are random.

    Args:
      weights: with a tied embedding of at least as many rows as `new` has tokens.
      old: token -> id, of the tokenizer that `weights` were trained with.
      new: token -> id, of the same tokens and more; the ids may differ.
      key: of the drawn embeddings.
    """
    words = list(old)
    rows = jnp.asarray(weights["embedding"])[jnp.array([old[word] for word in words])]
    table = jnp.asarray(weights["embedding"])
    table = table.at[jnp.array([new[word] for word in words])].set(rows)
    added = jnp.array([new[word] for word in new if word not in old], jnp.int32)
    return draw_embeddings({**weights, "embedding": table}, added, key)
