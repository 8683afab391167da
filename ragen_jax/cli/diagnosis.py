"""Everything that can be measured of a checkpoint: one dict of numbers, one table.

`prepare` makes the run to measure by, `Instruments` its programs once for all
checkpoints, `diagnose` the numbers of one.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ragen_jax.diagnostics import (
    gradient_analysis,
    mutual_information,
    scored_batch,
    thought_samples,
)
from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.diagnostics.monitor import Monitor
from ragen_jax.diagnostics.mutual_information import SmoothedStd
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.evaluation.evaluator import standard_error
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout.rollout import Rollout, training_rollout_args
from ragen_jax.rollout.tasks import refuse_cut_messages
from ragen_jax.settings import (
    Settings,
    check_even_split,
    check_record,
    fit_mesh,
    turn_sizes,
)
from ragen_jax.starpo import Programs
from ragen_jax.text import token_bytes
from ragen_jax.training import checkpoints, weights
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training.run import Run
from ragen_jax.trajectory import is_played
from ragen_jax.utils import atomic_files
from ragen_jax.utils.finite import finite


@dataclasses.dataclass(frozen=True)
class DiagnosisOptions:
    """What to measure."""

    information: bool = True
    gradients: bool = True
    samples: int = 64  # thoughts that mutual information is measured on; 0: all
    buckets: str = "quantile"  # or "fixed"
    # Whether to skip mutual information, instead of failing, for a checkpoint whose
    # replies have no thoughts: among several, a collapsed one is worth comparing.
    may_lack_thoughts: bool = False
    # The iteration, counted from 0, whose prompts and noise are drawn; None: the one
    # after the checkpoint's, so that two checkpoints differ by their levels' difficulty
    # too. One of the run itself would have been seen by its later checkpoints.
    prompts_of: int | None = None


def reshape(settings: Settings, prompts: int, group_size: int) -> Settings:
    """The settings with another shape of the batch; 0 leaves a size as it is.

    Without a CUDA graph, which not every device can have.

    Raises:
      UserError: if several environments share the batch, whose shares are settings,
        or if the batch is too large.
    """
    rollout = settings.rollout
    if prompts and settings.env.mix:
        raise UserError(
            "--prompts cannot be used where several environments share a batch: set"
            " the shares in the config, and leave it out here"
        )
    shape = dict(
        prompts=prompts or rollout.prompts, group_size=group_size or rollout.group_size
    )
    flags = {f"--{name}": size for name, size in shape.items()}
    check_record(flags | turn_sizes(settings))
    rollout = dataclasses.replace(rollout, **shape, cuda_graph=False)
    return dataclasses.replace(settings, rollout=rollout)


def prepare(settings: Settings) -> Run:
    """The run to measure by, on as many devices as can share its batch evenly.

    The mesh follows the checkpoint's settings as far as the devices allow.

    Args:
      settings: from `reshape`.

    Raises:
      UserError: as `training.run.prepare`.
    """
    devices = backend.devices()
    for count in range(len(devices), 0, -1):
        sizes, fitted = fit_mesh(settings.mesh, count), settings
        if sizes["tensor"] == 1:  # layout = "tensor" needs a tensor axis.
            whole = dataclasses.replace(settings.rollout, layout="replicated")
            fitted = dataclasses.replace(settings, rollout=whole)
        with contextlib.suppress(SettingsError):  # Never for one device.
            check_even_split(fitted, sizes)
            break
    return run_lib.prepare(fitted, meshes.make_mesh(**sizes, devices=devices[:count]))


@dataclasses.dataclass(frozen=True)
class Instruments:
    """What measures a run's checkpoints, each made when it is first used, and kept.

    So that several checkpoints compile nothing twice.
    """

    run: Run  # from `prepare`
    _gradients: dict[tuple[float, float], Callable] = dataclasses.field(
        default_factory=dict, init=False
    )

    @functools.cached_property
    def plan(self) -> UpdatePlan:
        """Of the run's update."""
        return programs_lib.update_plan(self.run)

    @functools.cached_property
    def programs(self) -> Programs:
        """Those of training, with the frozen weights."""
        return programs_lib.make_programs(self.run)

    @functools.cached_property
    def monitor(self) -> Monitor:
        """The health metrics of training."""
        return monitor_lib.make_monitor(self.run, self.run.model.tokenizer, self.plan)

    @functools.cached_property
    def score(self) -> Callable:
        """Scores all episodes of a record, as `scored_batch.make_scoring`."""
        return scored_batch.make_scoring(self.plan, keep_all=True)

    @functools.cached_property
    def score_pairs(self) -> Callable:
        """(actor, Pairs) -> `mutual_information.score_pairs`."""
        model, temperature = self.run.model, self.run.settings.rollout.temperature
        return jax.jit(
            lambda actor, pairs: mutual_information.score_pairs(
                actor, pairs, model.config, temperature, model.dtype
            )
        )

    def gradients(self, iteration: int) -> Callable:
        """`gradient_analysis.make_gradients`, once for all equal coefficients."""
        chosen = gradient_analysis.coefficients(self.run.settings, iteration)
        if chosen not in self._gradients:
            made = gradient_analysis.make_gradients(self.plan, iteration)
            self._gradients[chosen] = made
        return self._gradients[chosen]


def sample(run: Run, programs: Programs, actor: Parameters, iteration: int) -> Rollout:
    """A batch of training episodes by a policy.

    Args:
      run: with the batch's shape.
      programs: `starpo.Programs` of it.
      actor: plain parameters.
      iteration: whose prompts and noise are drawn.

    Raises:
      UserError: if an environment showed longer observations than its
        `longest_observation` allows.
    """
    rollout_args = training_rollout_args(run.settings, np.int32(iteration), np.int32(0))
    rollout = programs.rollout(actor, run.tokens, rollout_args)
    too_long = jax.device_get(rollout.too_long.sum(axis=0))
    refuse_cut_messages([task.label for task in run.tasks], too_long)
    return rollout


def text_statistics(instruments: Instruments, rollout: Rollout) -> dict[str, float]:
    """The indicators of a batch, and how far thoughts agree with answers."""
    run, monitor = instruments.run, instruments.monitor
    values = monitor_lib.batch_indicators(monitor, run, rollout)
    episodes = jax.device_get(rollout.episodes)
    by_prompt = [
        episodes.success[episodes.group == group].mean()
        for group in np.unique(episodes.group)
    ]
    values |= {
        "episodes": len(episodes.success),
        "prompts": len(by_prompt),
        "success": float(episodes.success.mean()),
        "success_standard_error": standard_error(np.array(by_prompt)),
    }
    if run.rollout_context.with_grounding:
        values["grounded"] = float(episodes.grounded[is_played(episodes)].mean())
    return values


def information(
    instruments: Instruments,
    actor: Parameters,
    rollout: Rollout,
    options: DiagnosisOptions,
    smoothed: SmoothedStd,
) -> tuple[dict[str, float], SmoothedStd]:
    """Mutual information of prompts and thoughts, over first turns and trajectories.

    Raises:
      NoThoughtError: if one of the two has no thought, unless the options allow it.
    """
    run = instruments.run
    rows, group = jax.device_get((rollout.rows, rollout.episodes.group))
    words = token_bytes.token_bytes(run.model.tokenizer)
    turns = thought_samples.find_turns(rows, words)
    seed, values = run.settings.seed, {}
    draws = {
        "first_turn": functools.partial(
            thought_samples.sample_first_turns, rows, turns, group
        ),
        "trajectory": functools.partial(
            thought_samples.sample_trajectories, rows, turns
        ),
    }
    samples = {}
    for name, draw in draws.items():
        try:
            samples[name] = draw(samples=options.samples, seed=seed)
        except thought_samples.NoThoughtError:
            if not options.may_lack_thoughts:
                raise
    for name, pairs in samples.items():
        pairs = mutual_information.as_arrays(pairs)
        # On the host: what follows is many small programs, for one device.
        scores = jax.device_get(instruments.score_pairs(actor, pairs))
        report, smoothed = mutual_information.report(scores, pairs, name, smoothed)
        values |= report
        costs = mutual_information.cost(pairs)
        costs |= {"prompts": len(pairs.prompts), "thoughts": len(pairs.thoughts)}
        values |= {f"{name}/{what}": float(count) for what, count in costs.items()}
    values["valid_thinking_rate"] = float((turns.thought > 0).mean())
    return values, smoothed


def gradients(
    instruments: Instruments,
    state: scored_batch.Trained,
    rollout: Rollout,
    options: DiagnosisOptions,
) -> dict[str, float]:
    """Gradient norms by bucket of reward spread.

    Args:
      instruments: of the batch's shape.
      state: the trees that the update trains.
      rollout: by the same actor.
      options: which buckets.
    """
    programs = instruments.programs
    scored = instruments.score(
        state, programs.frozen, programs.reference, rollout.rows, rollout.episodes
    )
    spread, group = jax.device_get((scored.selection.std, rollout.episodes.group))
    cut = {
        "quantile": gradient_analysis.quantile_buckets,
        "fixed": gradient_analysis.fixed_buckets,
    }[options.buckets]
    return gradient_analysis.analyze(
        instruments.plan,
        instruments.gradients(int(state.iteration)),
        state.actor,
        programs.frozen,
        scored,
        group,
        cut(spread),
    )


def diagnose(
    instruments: Instruments,
    folder: Path,
    step: int,
    options: DiagnosisOptions,
    smoothed: SmoothedStd,
) -> tuple[dict[str, Any], SmoothedStd]:
    """All numbers of one checkpoint, and the next state of the z-scores.

    Args:
      instruments: of the run to measure by.
      folder, step: the checkpoint.
      options: what to measure.
      smoothed: from the checkpoint before.

    Raises:
      UserError: if the checkpoint cannot be read, began with another model, or there
        is nothing to measure; or if `sample` refuses its batch.
    """
    run = instruments.run
    reads = run.model.adapters is not None or run.settings.has_reference
    weights.check_origin(run.model, folder, step, with_weights=reads)
    programs = instruments.programs  # Read after the check.
    state = weights.abstract_state(run)
    parts = {"actor": state.actor}
    if run.settings.has_critic:
        parts["critic"] = state.critic
    restored = checkpoints.restore(folder, step, parts, partial=True)
    actor = programs.merge(restored["actor"], programs.frozen)
    drawn = step if options.prompts_of is None else options.prompts_of
    rollout = sample(run, programs, actor, drawn)
    numbers: dict[str, Any] = {
        "step": step,
        "text": text_statistics(instruments, rollout),
    }
    if options.information:
        numbers["information"], smoothed = information(
            instruments, actor, rollout, options, smoothed
        )
    if options.gradients:
        trained = scored_batch.Trained(
            restored["actor"], restored.get("critic", {}), np.int32(step)
        )
        numbers["gradients"] = gradients(instruments, trained, rollout, options)
    return numbers, smoothed


def diagnose_all(
    instruments: Instruments,
    folder: Path,
    steps: Sequence[int],
    options: DiagnosisOptions,
    out: Path,
    warn: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The numbers of each step, written to `out` whenever one more is measured.

    A run that trains meanwhile may delete a step before its turn comes.

    Args:
      instruments, folder, options: as in `diagnose`.
      steps: in order.
      out: a JSON file.
      warn: is told of each step that was deleted.

    Raises:
      UserError: as `diagnose`, for a step that is there; or if none is left.
    """
    smoothed, results = SmoothedStd(), []
    for step in steps:
        try:
            one, smoothed = diagnose(instruments, folder, step, options, smoothed)
        except (UserError, OSError):
            if len(steps) == 1 or step in checkpoints.scores(folder):
                raise
            warn(f"warning: step {step} was deleted meanwhile, and is left out")
            continue
        results.append(one)
        with atomic_files.new_file(out) as file:
            file.write(json.dumps(finite(results), indent=2, allow_nan=False) + "\n")
    if not results:
        raise UserError(
            f"every step of {folder} was deleted meanwhile: start again, or let the"
            " run keep more (checkpoint.keep_last)"
        )
    return results
