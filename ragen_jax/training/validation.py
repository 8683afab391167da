"""Evaluations of a run: validation while it trains, test levels at its end."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation.evaluator import Evaluator, Score
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout.tasks import Task
from ragen_jax.text.prompts import DialogueTokens
from ragen_jax.training.model import Model
from ragen_jax.training.run import Run
from ragen_jax.training.tasks import rollout_context, rollout_options

# Of evaluations, as programs and metrics name them; envs/base.py numbers the splits.
KINDS = ("validation", "test")


def make_evaluator(
    model: Model,
    task: Task,
    tokens: DialogueTokens,
    *,
    rollouts: int,
    prompts: int,
    greedy: bool,
) -> Evaluator:
    """An evaluator of one environment, by the model's settings.

    See `evaluator.make_evaluator`.
    """
    return evaluator_lib.make_evaluator(
        rollout_context(model, ()),
        task,
        tokens,
        rollout_options(model.settings, is_training=False, greedy=greedy),
        prompts=prompts,
        rollouts=rollouts,
        slots=model.settings.evaluation.slots,
        shards=meshes.row_shards(model.mesh),
    )


def make_evaluators(run: Run, *, rollouts: int, prompts: int) -> dict[str, Evaluator]:
    """An evaluator for each environment that is evaluated, by its label.

    Args:
      run: with `evaluation.temperature`, of which 0 means the likeliest token.
      rollouts: n, episodes of each level.
      prompts: P, levels of each environment.
    """
    make = functools.partial(
        make_evaluator,
        run.model,
        rollouts=rollouts,
        prompts=prompts,
        greedy=run.settings.evaluation.temperature == 0,
    )
    return {task.label: make(task, tokens) for task, tokens in run.evaluated}


def programs_of(
    run: Run, kinds: Sequence[str] = KINDS
) -> Iterator[tuple[str, Evaluator]]:
    """Yields (kind and label, Evaluator) of what the run will compile, for plans of it.

    Left out are a validation that it never makes, and a test that would be the same
    program as the validation.
    """
    chosen = run.settings.evaluation
    sizes = {
        "validation": (chosen.prompts, chosen.rollouts),
        "test": (chosen.test_prompts, chosen.test_rollouts),
    }
    if run.settings.every.evaluate == 0:
        del sizes["validation"]
    seen = set()
    for kind in [kind for kind in kinds if kind in sizes]:
        prompts, rollouts = sizes[kind]
        made = make_evaluators(run, rollouts=rollouts, prompts=prompts)
        for label, evaluator in made.items():
            size = (label, evaluator.prompts, evaluator.rollouts)
            if size not in seen:
                seen.add(size)
                yield f"{kind} {label}", evaluator


def evaluate(
    run: Run,
    evaluators: dict[str, Evaluator],
    actor: Parameters,
    *,
    split: int,
    prompts: int,
    on_batch: Callable[..., None] | None = None,
) -> dict[str, Score]:
    """The score in each evaluated environment, by label.

    Args:
      run: for the seed and the temperature.
      evaluators: from `make_evaluators`.
      actor: plain parameters.
      split: of envs/base.py, that of validation or of test.
      prompts: P, levels of each environment.
      on_batch: called with an environment's label and what `evaluator.evaluate` hands
        to its own.
    """
    return {
        label: evaluator_lib.evaluate(
            evaluator,
            actor,
            prompts=prompts,
            split=split,
            seed=run.settings.seed,
            temperature=run.settings.evaluation.temperature,
            on_batch=None if on_batch is None else functools.partial(on_batch, label),
        )
        for label, evaluator in evaluators.items()
    }


def named(prefix: str, scores: dict[str, Score]) -> dict[str, float]:
    """Metrics by name; of several environments each one's, and their mean success."""
    if len(scores) == 1:
        (score,) = scores.values()
        return {f"{prefix}/{name}": value for name, value in score.metrics().items()}
    # All draw their levels by the same keys, and those that differ in symbols alone
    # draw the same: only what several make of one key is an independent value.
    by_key = np.mean([s.by_level.mean(axis=1) for s in scores.values()], axis=0)
    values = {
        f"{prefix}/success": float(by_key.mean()),
        f"{prefix}/success_standard_error": evaluator_lib.standard_error(by_key),
    }
    for label, score in scores.items():
        metrics = score.metrics()
        values |= {f"{prefix}/{label}/{name}": value for name, value in metrics.items()}
    return values
