"""Scores a record as the update does (old values, advantages), without an update.

For recorded episodes (monitor.py) and the gradient analysis of launch/diagnose.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from ragen_jax import starpo
from ragen_jax.learning import shaping
from ragen_jax.learning.batch import Batch, KeptRows
from ragen_jax.learning.filters import uncertainty_filter
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class Trained:
    """The fields of a `TrainState` that scoring reads; a whole one does as well."""

    actor: Any  # the trainable trees; the actor's is read with sampler_correction alone
    critic: Any  # {} without one
    iteration: jax.Array  # int32[], iterations finished


@struct.dataclass
class ScoredBatch:
    """C rows with the inputs of their losses, and the decisions of the filter."""

    kept: KeptRows  # the rows as recorded, longest first, padding rows last
    batch: Batch  # of the same rows
    keep: jax.Array  # bool[B], episodes that the filter keeps
    spread: jax.Array  # float32[P], `Selection.std` by the run's filter


def make_scoring(plan: UpdatePlan, *, keep_all: bool) -> Callable[..., ScoredBatch]:
    """Compiles (Trained, frozen, reference, rows, episodes) -> ScoredBatch.

    Args:
      plan: of the run's update.
      keep_all: whether the rows of every group are scored, and advantages estimated
        and whitened over all of them; else those that the filter keeps, as training
        does. `keep` and `spread` are the same either way.
    """
    settings = plan.settings
    if keep_all:
        everything = dataclasses.replace(settings.filter, strategy="none")
        settings = dataclasses.replace(settings, filter=everything)
    scoring = dataclasses.replace(plan, settings=settings)
    return jax.jit(functools.partial(_score, plan, scoring))


def _score(
    plan: UpdatePlan,
    scoring: UpdatePlan,
    state: Trained,
    frozen,
    reference,
    rows: Rows,
    episodes: Episodes,
) -> ScoredBatch:
    """`starpo.score` by the plan `scoring`; what the filter of `plan` keeps."""
    record = starpo.score(scoring, state, frozen, reference, rows, episodes)
    settings = plan.settings
    earned = shaping.turn_rewards(settings.reward, episodes, settings.rollout.prompts)
    by_run = uncertainty_filter(settings, rows, episodes, state.iteration, earned)
    return ScoredBatch(record.kept, record.batch, by_run.keep, by_run.std)
