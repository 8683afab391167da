"""A record as the update sees it: old values, advantages, returns, and no update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from ragen_jax.learning import forward, shaping
from ragen_jax.learning.batch import Batch, KeptRows, gather_kept_rows, make_batch
from ragen_jax.learning.estimators import ESTIMATORS, Evidence
from ragen_jax.learning.filters import uncertainty_filter
from ragen_jax.learning.forward import UpdatePlan
from ragen_jax.learning.rescale import rescale
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class Trained:
    """What is read of a `TrainState`, which would do as well."""

    actor: Any  # the trainable trees; the actor's is read with sampler_correction alone
    critic: Any  # {} without one
    iteration: jax.Array  # int32[], iterations finished


@struct.dataclass
class ScoredBatch:
    """C rows with what their losses read, and where they come from."""

    kept: KeptRows  # the rows as recorded, longest first, padding rows last
    batch: Batch  # of the same rows
    keep: jax.Array  # bool[B], episodes that the filter keeps
    spread: jax.Array  # float32[P], in-group std of the task return


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
    """The steps of `starpo.update` up to the batch. `frozen`, `reference`: as there."""
    settings, iteration = scoring.settings, state.iteration
    by_run = uncertainty_filter(plan.settings, rows, episodes, iteration)
    chosen = uncertainty_filter(settings, rows, episodes, iteration)
    kept = gather_kept_rows(settings, rows, episodes, chosen.keep)
    kept = kept.replace(rows=forward.share_rows(scoring, kept.rows))
    scores = forward.score_before(scoring, state, frozen, reference, kept)
    by_turn = shaping.turn_rewards(settings.reward, episodes, settings.rollout.prompts)
    by_token = shaping.token_rewards(
        settings, kept.rows, by_turn, scores.ref_logprobs, iteration
    )
    evidence = Evidence(
        kept.rows, episodes, chosen.keep, by_turn, by_token, scores.old_values
    )
    estimate = ESTIMATORS[settings.estimator](settings, evidence)
    gains = rescale(settings, estimate, kept, episodes, chosen)
    batch = make_batch(settings, kept, episodes, scores, estimate, gains)
    return ScoredBatch(kept, batch, by_run.keep, by_run.std)
