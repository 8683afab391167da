"""A loss for first layers that translate symbols by the prompt's explanation.

They learn to turn each cell of a board into the embedding of the symbol that the layers
above already know for its meaning, and to leave all other tokens as they are. Of stages
with `read_layers`; walls.py uses `split` and `hidden_states` too.
"""

import jax
import jax.numpy as jnp

from ragen_jax.models import transformer
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.warm_start.batches import Batch

_RARE = 6.0  # Weight of cells with other than the two most frequent meanings.
_OTHERS = 0.5  # Weight of the mean over tokens that are to stay as they are.


def split(weights: Parameters, layers: int) -> tuple[Parameters, Parameters]:
    """(the first `layers` layers, everything else)."""
    first = jax.tree.map(lambda leaf: leaf[:layers], weights["layers"])
    above = jax.tree.map(lambda leaf: leaf[layers:], weights["layers"])
    return first, {**weights, "layers": above}


def join(first: Parameters, others: Parameters) -> Parameters:
    """The whole model: `split` undone."""
    layers = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), first, others["layers"]
    )
    return {**others, "layers": layers}


def loss(
    first: Parameters, batch: Batch, others: Parameters, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """How far the first layers are from reading each cell as what it means.

    Args:
      first: the first n layers, which are trained.
      batch: with `meant` and `opening_length`.
      others: the rest of the model, with the embedding; not trained here.
      config: of the whole model.

    Returns:
      float32[], the squared distance between hidden states after the layers and the
      wanted embeddings, in units of the latter's mean square: its weighted mean over
      cells, plus half of its mean over other tokens. And float32[], the share of cells
      whose hidden state is nearest in angle to the right one of the batch's meanings.
    """
    table = others["embedding"]
    states = hidden_states(first, table[batch.tokens], config)
    is_behind = jnp.arange(batch.tokens.shape[1]) >= batch.opening_length
    meant = jnp.where(is_behind, batch.meant, batch.tokens)
    is_cell = meant != batch.tokens
    target = table[meant]
    # Not between normalized states: the layers above add to these as they are.
    distance = ((states - target) ** 2).mean(-1) / (target**2).mean(-1)

    counts = jnp.zeros(table.shape[0]).at[meant].add(is_cell)
    is_rare = counts < jax.lax.top_k(counts, 2)[0][1]
    weight = is_cell * jnp.where(is_rare[meant], _RARE, 1.0)
    is_before_end = jnp.cumsum(batch.tokens[:, ::-1] != 0, 1)[:, ::-1] > 0
    is_other = ~is_cell & is_before_end  # Without the padding, which is 0.
    total = _mean(distance, weight) + _OTHERS * _mean(distance, is_other)

    directions = table / jnp.linalg.norm(table, axis=1, keepdims=True)
    closeness = jnp.where(counts > 0, states @ directions.T, -jnp.inf)
    return total, _mean(closeness.argmax(-1) == meant, is_cell)


def hidden_states(layers: Parameters, x: jax.Array, config: ModelConfig) -> jax.Array:
    """float32[R, T, D], the residual stream after some layers.

    Args:
      layers: n consecutive ones.
      x: float32[R, T, D], their input.
      config: of the whole model.
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])

    def one_layer(x, layer):
        attend = lambda *arguments: (transformer.causal_attention(*arguments), None)
        return transformer.block(layer, x, positions, config, attend)[0], None

    return jax.lax.scan(one_layer, x, layers)[0]


def _mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    return (values * weight).sum() / jnp.maximum(weight.sum(), 1.0)
