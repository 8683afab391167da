"""How the update's forward passes are computed on the mesh, operation by operation.

Where XLA would choose badly, an operation is put in a `shard_map` or its result is
constrained; all else is left to the compiler.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ragen_jax.learning.update_plan import UpdatePlan, constrain, shard_rows
from ragen_jax.learning.vocabulary_scores import TokenScores, score_vocabulary
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.parameters import Parameters, declare
from ragen_jax.models.transformer import ForwardOptions, embed
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes


def forward_options(
    plan: UpdatePlan, remat: bool, *, is_prefix: bool = False
) -> ForwardOptions:
    """How the transformer is computed on the plan's mesh.

    Args:
      plan: what is static.
      remat: whether layers are recomputed in the backward pass.
      is_prefix: of the one row that is `plan.prefix`, which all devices compute; else
        of rows, which are shared out. A microbatch, too, may be a single row.
    """
    return ForwardOptions(
        dtype=plan.dtype,
        remat=remat,
        constrain=functools.partial(shard_rows, plan),
        attention=_attention_on_shards(plan, is_prefix),
        embed=functools.partial(_embed_on_shards, plan, is_prefix),
    )


def _attention_on_shards(plan: UpdatePlan, is_prefix: bool) -> Callable[..., jax.Array]:
    """Attention in a `shard_map`: each device's rows and heads, no communication.

    Left to the compiler, all devices would step through the loop over rows together.
    And outside `shard_map` cuDNN's custom call holds an address of this process, so
    that the compilation cache never hits.
    """
    config, mesh, kernel = plan.config, plan.mesh, plan.settings.model.attention
    if mesh is None:
        return functools.partial(causal_attention, kernel=kernel)
    chosen = backend_choices.row_attention(kernel, plan.dtype, config.head_dim)
    if is_prefix and chosen == "splash":
        # Checked as below, a prefix cannot be a Pallas kernel's, which does not say
        # over which devices its results vary.
        kernel = "xla"
    heads_are_sharded = meshes.shards_heads(config.heads, config.kv_heads, mesh)
    heads = (None, meshes.TENSOR if heads_are_sharded else None, None)
    of_prefix = PartitionSpec(None, *heads)
    spec = of_prefix if is_prefix else PartitionSpec(*meshes.ROWS, *heads)

    def attention(query, key, value, *prefix):
        return jax.shard_map(
            functools.partial(causal_attention, kernel=kernel),
            mesh=mesh,
            in_specs=(spec, spec, spec) + (of_prefix,) * len(prefix),
            out_specs=spec,
            # Unchecked, the transpose would sum the equal gradients of all devices.
            check_vma=is_prefix,
        )(query, key, value, *prefix)

    return attention


def _embed_on_shards(
    plan: UpdatePlan, is_prefix: bool, parameters: Parameters, tokens: jax.Array, dtype
) -> jax.Array:
    """`transformer.embed` where the embedding's features are sharded (fsdp).

    Each device looks up the tokens of all rows in its features; an all-to-all then
    trades features for rows. That sends activations instead of gathering the embedding
    and its gradient in float32.
    """
    if plan.mesh is None:
        return embed(parameters, tokens, dtype)
    features = _sharding_axes(plan, "embedding")[1]
    rows = None if is_prefix else meshes.DATA
    embedding = constrain(plan, parameters["embedding"], PartitionSpec(None, features))
    tokens = constrain(plan, tokens, PartitionSpec(rows))
    x = embed({"embedding": embedding}, tokens, dtype)
    x = constrain(plan, x, PartitionSpec(rows, None, features))
    return constrain(plan, x, PartitionSpec() if is_prefix else meshes.ROWS)


def _sharding_axes(plan: UpdatePlan, name: str) -> tuple[str | None, ...]:
    """For each dimension of "embedding" or "head": the mesh axis that shards it."""
    mesh = plan.mesh
    assert mesh is not None
    spec = meshes.training_specs(declare(plan.config), mesh)[name]
    return tuple(axis if axis and mesh.shape[axis] > 1 else None for axis in spec)


def score_on_shards(
    plan: UpdatePlan, weight, hidden, token, is_scored, *, temperature, **options
) -> TokenScores:
    """`score_vocabulary` in a `shard_map`, of each device's rows.

    Each device accumulates its gradient of the weight; one all-reduce sums them.
    """
    if plan.mesh is None:
        return score_vocabulary(
            weight, hidden, token, is_scored, temperature=temperature, **options
        )
    rows, replicated = meshes.ROWS, PartitionSpec()
    axes = _sharding_axes(plan, "embedding" if options["is_tied"] else "head")

    def score_shard(weight, hidden, token, is_scored, temperature):
        return score_vocabulary(
            weight,
            hidden,
            token,
            is_scored,
            temperature=temperature,
            sharding_axes=axes,
            **options,
        )

    return jax.shard_map(
        score_shard,
        mesh=plan.mesh,
        in_specs=(PartitionSpec(*axes), rows, rows, rows, replicated),
        out_specs=rows,
        check_vma=False,
    )(weight, hidden, token, is_scored, jnp.float32(temperature))
