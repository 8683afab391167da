"""More layers for a trained model, which at first change nothing."""

import dataclasses

import jax
import jax.numpy as jnp

from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters

_ADDED = ("output", "down")  # What a layer adds to the residual stream ends in these.


def can_grow(found: ModelConfig, wanted: ModelConfig, last: int = 0) -> bool:
    """Whether one shape is the other but for its layers, which `deepen` can add."""
    if dataclasses.replace(found, layers=wanted.layers) != wanted:
        return False
    more = wanted.layers - found.layers
    return more == 0 or last <= min(more, found.layers) and more - last <= found.layers


def deepen(
    weights: Parameters, found: ModelConfig, wanted: ModelConfig, last: int = 0
) -> Parameters:
    """`weights` with new layers, which add nothing yet: the same function.

    First layers change how tokens are read, for the layers that know what to do with
    what was read; last ones have time to use what the others found out. They look
    where the model's own first and last layers look: copies of these but for their last
    matrices, which are 0.

    Args:
      weights: of the shape `found`, which `can_grow`.
      wanted: the deeper shape.
      last: how many of the new layers come last; the others come first.
    """
    first = wanted.layers - found.layers - last

    def grown(path, layers):
        new = layers[:first], layers[found.layers - last :]
        if path[-1].key in _ADDED:
            new = jax.tree.map(jnp.zeros_like, new)
        return jnp.concatenate([new[0], layers, new[1]])

    layers = jax.tree.map(jnp.asarray, weights["layers"])
    return {**weights, "layers": jax.tree_util.tree_map_with_path(grown, layers)}


def draw_embeddings(
    weights: Parameters, tokens: jax.Array, key: jax.Array
) -> Parameters:
    """`weights` with new embeddings, as long as the others, of int32[n] tokens.

    A token that no stage has met is pushed away from every reply, like all the others
    of its kind, until they point the same way: at the cosine of 0.99 that was measured,
    two names are one to the model, and it cannot learn to copy them.
    """
    table = jnp.asarray(weights["embedding"])
    length = jnp.linalg.norm(table, axis=1).mean()
    drawn = jax.random.normal(key, (len(tokens), table.shape[1]))
    drawn *= length / jnp.linalg.norm(drawn, axis=1, keepdims=True)
    return {**weights, "embedding": table.at[tokens].set(drawn)}


def add_tokens(
    weights: Parameters, old: dict[str, int], new: dict[str, int], key: jax.Array
) -> Parameters:
    """`weights` for a tokenizer with more tokens, whose embeddings are drawn.

    Args:
      weights: with a tied embedding of at least as many rows as `new` has tokens.
      old: token -> id, of the tokenizer that they know.
      new: the same tokens and more, of any ids.
      key: of the drawn embeddings.
    """
    known = list(old)
    rows = jnp.asarray(weights["embedding"])[jnp.array([old[word] for word in known])]
    table = jnp.asarray(weights["embedding"])
    table = table.at[jnp.array([new[word] for word in known])].set(rows)
    added = jnp.array([new[word] for word in new if word not in old], jnp.int32)
    return draw_embeddings({**weights, "embedding": table}, added, key)
