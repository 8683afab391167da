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
from ragen_jax.learning.batch import ScoredRecord
from ragen_jax.learning.update_plan import UpdatePlan


@struct.dataclass
class Trained:
    """The fields of a `TrainState` that scoring reads; a whole one does as well."""

    actor: Any  # the trainable trees; the actor's is read with sampler_correction alone
    critic: Any  # {} without one
    iteration: jax.Array  # int32[], iterations finished


def make_scoring(plan: UpdatePlan, *, keep_all: bool) -> Callable[..., ScoredRecord]:
    """Compiles (Trained, frozen, reference, rows, episodes) -> ScoredRecord.

    Args:
      plan: of the run's update.
      keep_all: whether the rows of every group are scored, and advantages estimated
        and whitened over all of them; else those that the filter keeps, as training
        does. `selection.std` is the same either way.
    """
    settings = plan.settings
    if keep_all:
        everything = dataclasses.replace(settings.filter, strategy="none")
        settings = dataclasses.replace(settings, filter=everything)
    scoring = dataclasses.replace(plan, settings=settings)
    return jax.jit(functools.partial(starpo.score, scoring))
