"""Gradient norms by the reward spread of the prompts they come from.

RAGEN-2 (arXiv:2604.06268) sorts groups by their in-group reward std into buckets and
compares, in each, the gradient of the task (the clipped policy loss) with those of the
regularizers (entropy and KL): where spread is small the task's signal is small, and the
regularizers' is not. No optimizer runs, and no state changes. For launch/diagnose.py.

A bucket is cut at random into minibatches of the update's size; norms are means over
them, as in RAGEN's code. Each minibatch's gradient is divided by the number of its real
tokens or rows (by `loss.aggregation`); RAGEN divides by the full size, so that small
buckets seem to have small gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from ragen_jax.learning import aggregation
from ragen_jax.learning.batch import Batch, ScoredRecord
from ragen_jax.learning.forward import prefix_states
from ragen_jax.learning.gradients import actor_loss
from ragen_jax.learning.minibatches import take_rows
from ragen_jax.learning.schedules import over_the_run
from ragen_jax.learning.update_plan import (
    UpdatePlan,
    by_length,
    split_into_microbatches,
    truncate,
)
from ragen_jax.settings import Settings

# One program: array by array, gathers over several CPU devices can deadlock.
_take_rows = jax.jit(take_rows)
COMPONENTS = ("task", "entropy", "kl")
FIXED_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)  # reward; the last bucket is open
QUANTILES = 6


class Bucket(NamedTuple):
    """Prompt groups of similar in-group std of the return."""

    name: str
    groups: np.ndarray  # int[n], their indices, 0 .. P - 1


@struct.dataclass
class ComponentGradients:
    """Of one minibatch, in the order of COMPONENTS."""

    norm: jax.Array  # float32[3], global norm of the gradient of the mean loss
    loss: jax.Array  # float32[3], that mean loss, times its coefficient
    tokens: jax.Array  # float32[], reply tokens with a loss


def quantile_buckets(spread: np.ndarray, buckets: int = QUANTILES) -> list[Bucket]:
    """Groups sorted by spread, in buckets of equal count; the last takes the rest.

    Args:
      spread: float[P], in-group std of the return; a group of NaN is in no bucket.
      buckets: how many, or one for each group where there are fewer.
    """
    order = np.argsort(spread, kind="stable")[: np.isfinite(spread).sum()]
    count = min(buckets, len(order))
    size = len(order) // max(1, count)
    edges = [size * i for i in range(count)] + [len(order)]
    return [
        Bucket(f"quantile_{i + 1}", order[edges[i] : edges[i + 1]])
        for i in range(count)
    ]


def fixed_buckets(spread: np.ndarray) -> list[Bucket]:
    """Groups whose spread lies in [edge, next edge); the last bucket is open.

    Args:
      spread: float[P], units of reward; a group of NaN is in no bucket.
    """
    index = np.searchsorted(FIXED_EDGES, spread, side="right") - 1
    index = np.where(np.isfinite(spread), index, -1)
    ends = [*(f"{edge:g}" for edge in FIXED_EDGES[1:]), "inf"]
    return [
        Bucket(f"spread_{edge:g}_{end}", np.flatnonzero(index == i))
        for i, (edge, end) in enumerate(zip(FIXED_EDGES, ends, strict=True))
    ]


def make_gradients(
    plan: UpdatePlan, iteration: int = 0
) -> Callable[..., ComponentGradients]:
    """Compiles (actor, frozen, Batch of one minibatch) -> ComponentGradients.

    Rows of weight 0 count nothing. A component whose coefficient is 0 is NaN: it has
    not been measured.

    Args:
      plan: of the update.
      iteration: finished iterations, at which scheduled coefficients are taken.
    """
    plan = _at_iteration(plan, iteration)
    loss_settings = plan.settings.loss
    # A KL term within the reward is part of the task's advantages.
    is_on = (
        True,
        loss_settings.entropy > 0,
        loss_settings.kl > 0 and loss_settings.kl_in == "loss",
    )

    def gradients(actor, frozen, batch: Batch) -> ComponentGradients:
        norms, means = [], []
        for name, on in zip(COMPONENTS, is_on, strict=True):
            norm = mean = jnp.float32(jnp.nan)
            if on:
                norm, mean = _component(plan, frozen, actor, batch, name)
            norms.append(norm)
            means.append(mean)
        counted = batch.policy_tokens & (batch.weight > 0)[:, None]
        return ComponentGradients(
            jnp.stack(norms), jnp.stack(means), counted.sum(dtype=jnp.float32)
        )

    return jax.jit(gradients)


def _component(plan: UpdatePlan, frozen, actor, batch: Batch, name: str):
    """(norm of the gradient, mean loss) of one component over a minibatch."""
    microbatches = split_into_microbatches(plan, batch)
    loss = functools.partial(_loss, plan, frozen, name)

    def of_length(length: int, piece: Batch):
        (_, mean), gradient = jax.value_and_grad(loss, has_aux=True)(
            actor, truncate(piece, length)
        )
        return gradient, mean

    def accumulate(index, carry):
        piece = jax.tree.map(lambda x: x[index], microbatches)
        new = by_length(plan, of_length, piece.is_reply, piece)
        return jax.tree.map(jnp.add, carry, new)

    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), actor)
    micro = plan.settings.optimizer.microbatch
    count = batch.weight.shape[0] // micro
    gradient, mean = jax.lax.fori_loop(
        0, count, accumulate, (none, aggregation.Mean.zero())
    )
    return optax.tree.norm(gradient) / jnp.maximum(mean.count, 1), mean.value()


def coefficients(settings: Settings, iteration: int) -> tuple[float, float]:
    """(entropy, kl): those of the loss after so many iterations."""
    now = functools.partial(over_the_run, settings, iteration=jnp.int32(iteration))
    loss = settings.loss
    entropy, kl = now(loss.entropy, loss.entropy_end), now(loss.kl, loss.kl_end)
    return float(entropy), float(kl)


def _at_iteration(plan: UpdatePlan, iteration: int) -> UpdatePlan:
    """The plan with its scheduled coefficients fixed at their values there."""
    entropy, kl = coefficients(plan.settings, iteration)
    loss = dataclasses.replace(
        plan.settings.loss, entropy=entropy, entropy_end=-1.0, kl=kl, kl_end=-1.0
    )
    settings = dataclasses.replace(plan.settings, loss=loss)
    return dataclasses.replace(plan, settings=settings)


def _with_regularizer(plan: UpdatePlan, name: str) -> UpdatePlan:
    """The plan with every regularizer's coefficient at 0 but that of `name`."""
    loss = plan.settings.loss
    off = {}
    if name != "entropy":
        off |= dict(entropy=0.0, entropy_end=0.0)
    if name != "kl":
        off |= dict(kl=0.0, kl_end=0.0)
    loss = dataclasses.replace(loss, **off)
    settings = dataclasses.replace(plan.settings, loss=loss)
    return dataclasses.replace(plan, settings=settings)


def _loss(plan: UpdatePlan, frozen, name: str, actor, piece: Batch):
    """(sum of one component's loss, its Mean), each times its coefficient.

    The update's own loss with the other components at 0. Advantages of 0 remove the
    task, whatever the estimator and the clipping.
    """
    if name != "task":
        piece = piece.replace(advantages=jnp.zeros_like(piece.advantages))
    remat = plan.settings.model.remat
    total, (count, _) = actor_loss(
        _with_regularizer(plan, name),
        frozen,
        actor,
        prefix_states(plan, plan.assemble(actor, frozen), remat=remat),
        piece,
        jnp.zeros((), bool),
        jnp.zeros((), jnp.int32),
    )
    return total, aggregation.Mean(total, count)


# Over buckets, on the host ------------------------------------------------------------


def analyze(
    plan: UpdatePlan,
    gradients: Callable[..., ComponentGradients],
    actor: Any,
    frozen: Any,
    scored: ScoredRecord,
    group_of_episode: np.ndarray,
    buckets: Sequence[Bucket],
) -> dict[str, float]:
    """Norms, losses and counts of every bucket and of "all", by name.

    `BUCKET/COMPONENT` is the mean norm over minibatches. `per_sample` and `per_token`
    divide each norm by the rows or reply tokens of its own minibatch; RAGEN divides the
    mean by those of the whole bucket, so that large buckets seem to have small norms.

    Args:
      plan: of the update; its minibatch and microbatch are used.
      gradients: from `make_gradients`.
      actor, frozen: the trained tree and what it is assembled with.
      scored: from `scored_batch.make_scoring` with `keep_all`.
      group_of_episode: int[B].
      buckets: groups of similar spread; empty ones get a count of 0 and no norms.
    """
    weight, episode, spread = jax.device_get(
        (scored.batch.weight, scored.kept.rows.episode, scored.selection.std)
    )
    episode_of_row = np.maximum(episode.max(axis=1), 0)  # Padding tokens have -1.
    group = np.where(weight > 0, group_of_episode[episode_of_row], -1)
    every = Bucket("all", np.arange(len(spread)))
    values: dict[str, float] = {}
    for bucket in (every, *buckets):
        rows = np.flatnonzero(np.isin(group, bucket.groups))
        found = {"rows": float(len(rows)), "groups": float(len(bucket.groups))}
        found["row_share"] = len(rows) / max(1, int((weight > 0).sum()))
        if len(rows):
            found |= _spread_of(spread[bucket.groups])
            found |= _bucket_norms(plan, gradients, actor, frozen, scored.batch, rows)
        values |= {f"{bucket.name}/{name}": value for name, value in found.items()}
    return values


def _spread_of(spread: np.ndarray) -> dict[str, float]:
    spread = spread[np.isfinite(spread)]
    if not spread.size:  # Of no group is every return finite.
        return {}
    return {
        "reward_std_mean": float(spread.mean()),
        "reward_std_min": float(spread.min()),
        "reward_std_max": float(spread.max()),
    }


def _bucket_norms(
    plan: UpdatePlan, gradients, actor, frozen, batch: Batch, rows: np.ndarray
) -> dict[str, float]:
    """Means over the minibatches of the given rows."""
    size = plan.settings.optimizer.minibatch
    sums: dict[str, float] = {}
    minibatches = minibatches_of(rows, size)
    for own in minibatches:
        found = jax.device_get(gradients(actor, frozen, minibatch_of(batch, own, size)))
        for index, name in enumerate(COMPONENTS):
            norm, loss = float(found.norm[index]), float(found.loss[index])
            new = {
                name: norm,
                f"{name}/per_sample": norm / len(own),
                f"{name}/per_token": norm / max(1.0, float(found.tokens)),
                f"{name}/loss": loss,
            }
            for key, value in new.items():
                sums[key] = sums.get(key, 0.0) + value
    return {key: value / len(minibatches) for key, value in sums.items()}


def minibatches_of(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """The rows cut into even minibatches in random order, the same one in each call.

    As the update cuts its rows. Scored rows stand longest first: unshuffled, each
    minibatch would hold rows of one length, which may have won or lost together, and
    its gradient would be larger than any that the update sees.

    Args:
      rows: int[n].
      size: most rows of a minibatch.
    """
    mixed = np.random.default_rng(0).permutation(rows)
    return np.array_split(mixed, -(-len(mixed) // size))


def minibatch_of(batch: Batch, rows: np.ndarray, size: int) -> Batch:
    """The given rows of a batch, longest first, with padding rows of weight 0 behind.

    Args:
      batch: C rows.
      rows: int[n], n at most `size`.
      size: rows of the result.
    """
    padded = np.concatenate([rows, np.zeros(size - len(rows), int)])
    return _take_rows(batch, padded, np.arange(size) < len(rows))
