"""A whole run: resume or start, iterate, evaluate, save, and report."""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ragen_jax import (
    ahead,
    checkpoints,
    evaluation,
    loop,
    metrics,
    progress,
    weights,
)
from ragen_jax import mesh as meshes
from ragen_jax import settings as settings_lib
from ragen_jax.checkpoints import Checkpoints
from ragen_jax.envs.base import TEST, VALIDATION
from ragen_jax.evaluation import Evaluator, Score
from ragen_jax.learning.state import TrainState
from ragen_jax.loop import Run
from ragen_jax.metrics import Sinks
from ragen_jax.models import parameters
from ragen_jax.progress import Console
from ragen_jax.rollout.sample import Rollout
from ragen_jax.settings import Settings, UserError, WorldSettings
from ragen_jax.signals import Signals, StallWatch

_SETTINGS_FILE = "settings.json"
# An iteration is stalled, and the stacks are printed, after so many seconds:
_STALLED_AT_FIRST = 3600.0  # it compiles, which can take half an hour
_STALLED_AT_LEAST = 600.0
_STALLED_TIMES = 10.0  # as long as the longest so far


def check_workdir(workdir: Path, settings: Settings) -> None:
    """Refuses a workdir that holds a run made with other settings.

    One that holds settings and nothing else was given up before its first iteration
    ended: there is nothing to protect.

    Raises:
      UserError: naming the keys that differ.
    """
    path = workdir / _SETTINGS_FILE
    now = settings_lib.to_dict(settings)
    if path.exists():
        try:
            saved = json.loads(path.read_text())
            if not isinstance(saved, dict):
                raise ValueError("not an object")
        except ValueError:
            raise UserError(
                f"{path} is not readable as JSON; give another --workdir, or delete"
                f" {workdir} to start again"
            ) from None
        if checkpoints.scores(workdir / checkpoints.FOLDER) or metrics.read(workdir):
            settings_lib.check_same_run(saved, now, str(workdir))
    elif (workdir / checkpoints.FOLDER).exists():
        raise UserError(
            f"{workdir} holds checkpoints but no {_SETTINGS_FILE}, so it is not known"
            " what they were made with; give another --workdir"
        )


def claim_workdir(workdir: Path, settings: Settings) -> None:
    """Writes the settings into the workdir, once all checks are passed."""
    if jax.process_index() == 0:
        path = workdir / _SETTINGS_FILE
        scratch = path.with_suffix(f".{os.getpid()}")
        text = json.dumps(settings_lib.to_dict(settings), indent=2)
        scratch.write_text(text + "\n")
        scratch.replace(path)


def train(run: Run, workdir: Path, console: Console, command: str) -> None:
    """Trains until settings.iterations are done, or a signal asks to stop.

    Args:
      run: from `loop.prepare`.
      workdir: passed `check_workdir`.
      console: where progress is told; a silent one on all processes but the first.
      command: that resumes the run, for the message after a signal.

    Raises:
      UserError: if the workdir's checkpoints began with another model, or if training
        stopped itself: gradients not finite, nothing kept, or sampler and update
        disagreeing, for as long as the settings allow.
    """
    marks = weights.model_marks(run)
    if steps := checkpoints.scores(workdir / checkpoints.FOLDER):
        # All of it: the KL term and the last table read the model's weights again.
        folder = workdir / checkpoints.FOLDER
        weights.check_same_model(run, folder, max(steps), marks)
    console.line(banner(run, workdir))
    claim_workdir(workdir, run.settings)
    writer = Checkpoints(
        workdir / checkpoints.FOLDER,
        keep_last=run.settings.checkpoint.keep_last,
        keep_best=run.settings.checkpoint.keep_best,
    )
    with writer:
        state = _start(run, writer, console)
        done = int(state.iteration)
        sinks = Sinks(
            workdir, is_writer=jax.process_index() == 0, first_iteration=done + 1
        )
        with sinks, Signals(console.line) as signals, StallWatch() as watch:
            state, stopped = _iterate(
                run, marks, state, writer, sinks, signals, watch, console
            )
            if stopped:
                done = int(state.iteration)
                console.line(
                    f"saved after iteration {done}; the same command goes on from"
                    f" there:\n  {command}"
                )
                return
            _report(run, state, workdir, sinks, console)


def _start(run: Run, writer: Checkpoints, console: Console) -> TrainState:
    step = writer.latest_step()
    if step is None:
        return weights.new_state(run)
    console.line(f"resuming after iteration {step}")
    return writer.restore(step, weights.abstract_state(run))


def _iterate(
    run: Run, marks, state: TrainState, writer, sinks, signals, watch, console: Console
):
    """Iterations until the last; returns the state and whether a signal stopped it."""
    settings = run.settings
    programs = ahead.compile_ahead(run, loop.make_programs(run))
    chosen, durations = settings.evaluation, []
    validators = loop.make_evaluators(
        run, rollouts=chosen.rollouts, prompts=chosen.prompts, greedy=_greedy(settings)
    )
    best, total = writer.best_step(), settings.iterations
    best = -1.0 if best is None else writer.read_info(best)["validation"] or -1.0
    for done in range(int(state.iteration) + 1, total + 1):
        started = time.perf_counter()
        watch.expect_within(stalled_after(durations))
        console.status(f"iteration {done}/{total}: sampling and learning ...")
        state, values, rollout = loop.iterate(run, programs, state)
        if done == 1:
            console.line(example(run, rollout))
        score = None
        if _is_due(done, settings.every.evaluate, total):
            console.status(f"iteration {done}/{total}: validation ...")
            actor = programs.merge(state.actor, programs.frozen)
            scores = _evaluate(run, validators, actor, VALIDATION, chosen.prompts)
            values |= _named("validation", scores)
            score = values["validation/success"]
        durations.append(time.perf_counter() - started)
        values["time/iteration_seconds"] = durations[-1]
        values["memory/peak_gib"] = peak_memory()
        if _is_due(done, settings.every.log, total):
            sinks.write(done, values)
            left = progress.seconds_left(durations[1:], total - done)
            line = progress.iteration_line(done, total, values, left)
            console.iteration(line, total)
        reason = problem(settings, state, values)
        stops = signals.should_stop(done)
        is_best = score is not None and score > best and settings.checkpoint.keep_best
        due = _is_due(done, settings.every.checkpoint, total)
        if due or is_best or reason or stops:
            wait = bool(reason or stops)
            _save(run, marks, writer, state, done, score, wait=wait)
            best = max(best, -1.0 if score is None else score)
        if reason:
            raise UserError(reason)
        if stops:
            return state, True
    writer.wait()
    return state, False


def stalled_after(durations: Sequence[float]) -> float:
    """Seconds after which an iteration is stalled, given those of the ones before."""
    if not durations:
        return _STALLED_AT_FIRST
    # The first one compiled; it counts only while there is no other.
    longest = max(durations[1:] or durations)
    return max(_STALLED_AT_LEAST, _STALLED_TIMES * longest)


def _is_due(done: int, every: int, total: int) -> bool:
    return every > 0 and (done % every == 0 or done == total)


def _save(
    run: Run, marks, writer, state: TrainState, done: int, score, *, wait: bool
) -> None:
    info = {
        "settings": settings_lib.to_dict(run.settings),
        "iteration": done,
        "validation": score,
        "model": marks,
    }
    writer.save(done, state, info, score=score, wait=wait)


def problem(settings: Settings, state: TrainState, values: dict[str, float]) -> str:
    """Why the run has to stop, in one sentence, or an empty string."""
    safety = settings.safety
    if 0 < safety.max_bad_updates <= int(state.bad_in_row):
        return (
            f"gradients were not finite in {int(state.bad_in_row)} iterations running"
            f" (safety.max_bad_updates = {safety.max_bad_updates}); the state was"
            " saved: start in another --workdir with a lower optimizer.actor_lr, or"
            " delete the last of this one's checkpoints to go on from an earlier one"
        )
    if 0 < safety.max_empty_updates <= int(state.empty_in_row):
        return (
            f"no group was kept in {int(state.empty_in_row)} iterations running"
            f" (safety.max_empty_updates = {safety.max_empty_updates}), for all"
            " episodes of each group earned the same; the state was saved: raise the"
            " limit and start the same command again, or begin with an easier world"
        )
    gap, limit = values["update/logprob_gap"], settings.loss.logprob_gap_limit
    if gap > limit:
        return (
            f"sampler and update disagree by {gap:.3g} nats a token, more than"
            f" loss.logprob_gap_limit = {limit}; the state was saved: raise the limit"
            " and start the same command again if that is rounding, else try"
            " model.compute_dtype = 'float32' in another --workdir"
        )
    return ""


def _greedy(settings: Settings) -> bool:
    return settings.evaluation.temperature == 0


def _evaluate(
    run: Run, evaluators: dict[str, Evaluator], actor, split: int, prompts: int
) -> dict[str, Score]:
    """The score in each evaluated world, by label."""
    return {
        label: evaluation.evaluate(
            evaluator,
            actor,
            prompts=prompts,
            split=split,
            seed=run.settings.seed,
            temperature=run.settings.evaluation.temperature,
        )
        for label, evaluator in evaluators.items()
    }


def _named(prefix: str, scores: dict[str, Score]) -> dict[str, float]:
    """Metrics by name; of several worlds each one's, and their mean success."""
    if len(scores) == 1:
        (score,) = scores.values()
        return {f"{prefix}/{name}": value for name, value in score.metrics().items()}
    successes = [score.success for score in scores.values()]
    values = {f"{prefix}/success": sum(successes) / len(successes)}
    for label, score in scores.items():
        own = score.metrics()
        values |= {f"{prefix}/{label}/{name}": value for name, value in own.items()}
    return values


def _report(run: Run, state: TrainState, workdir: Path, sinks: Sinks, console) -> None:
    """Test success before and after, on the same levels, and what to do next."""
    chosen = run.settings.evaluation
    console.status("test levels, before and after ...")
    evaluators = loop.make_evaluators(
        run,
        rollouts=chosen.test_rollouts,
        prompts=chosen.test_prompts,
        greedy=_greedy(run.settings),
    )
    first = weights.load_parameters(run, value_head=False)
    before = _evaluate(run, evaluators, first, TEST, chosen.test_prompts)
    last = weights.make_merge(run)(state.actor, first)
    after = _evaluate(run, evaluators, last, TEST, chosen.test_prompts)
    done = int(state.iteration)
    if not any("test/success" in last for last in metrics.read(workdir)[-1:]):
        sinks.write(done, _named("test", after))  # Once, however often it is shown.
    sinks.draw()
    records = {label: _test_record(before[label], after[label]) for label in after}
    if jax.process_index() == 0:
        record = records if len(records) > 1 else next(iter(records.values()))
        (workdir / "test.json").write_text(json.dumps(record, indent=2) + "\n")
    for label, record in records.items():
        title = label if len(records) > 1 else ""
        console.line(_before_after(run, record, title))
    console.line(
        f"checkpoints  {workdir / checkpoints.FOLDER}\n"
        f"metrics      {workdir / metrics.FILE}\n"
        f"curves       {workdir / 'curves.png'}\n\n"
        f"next: python launch/evaluate.py --checkpoint={workdir} --show=3"
    )


def _test_record(before: Score, after: Score) -> dict[str, Any]:
    gain, error = evaluation.paired_difference(before, after)
    record = {"before": before.metrics(), "after": after.metrics()}
    return record | {"gain": gain, "gain_standard_error": error}


def _before_after(run: Run, record: dict[str, Any], title: str) -> str:
    """The table of one world."""
    chosen = run.settings.evaluation
    rows = (
        ("success", "success"),
        ("valid replies", "valid_reply_rate"),
        ("turns", "turns"),
        ("actions", "actions"),
        ("reply tokens", "reply_tokens"),
    )
    table = progress.before_after(record["before"], record["after"], rows)
    episodes = chosen.test_prompts * chosen.test_rollouts
    return (
        f"\n{title}{': ' if title else ''}{episodes} episodes on"
        f" {chosen.test_prompts} test levels, temperature {chosen.temperature:g},"
        f" before and after training\n{table}\n"
        f"gain on the same levels: {record['gain']:+.1%} ±"
        f" {record['gain_standard_error']:.1%} (standard error)\n"
    )


# What is printed ---------------------------------------------------------------------


def banner(run: Run, workdir: Path) -> str:
    """What the run is about to do."""
    s, rollout = run.settings, run.settings.rollout
    count = parameters.count(parameters.declare(run.config))
    episodes = rollout.prompts * rollout.group_size
    critic = "a critic of the same size" if s.estimator == "ppo" else "no critic"
    if run.adapters is not None:
        own = parameters.count(weights.trainable(run, value_head=False))
        critic += f"; trained are adapters of rank {s.lora.rank}, {own / 1e6:.2f} M"
    worlds = [
        f"{world.prompts} prompts of {world.label}: {_options(world)}"
        if s.env.mix
        else f"{world.name}: {_options(world)}"
        for world in s.worlds()
    ]
    kept = f"keeps {s.filter.strategy}"
    if s.filter.strategy != "none":
        kept += f" {s.filter.fraction:g} of the prompts by {s.filter.metric}"
    window = rollout.window_turns
    held = f", one for each turn, of {window} turns at most" if window else ""
    rows = [
        ("model", f"{s.model.path}, {count / 1e6:.2f} M parameters; {critic}"),
        ("mesh", f"{meshes.describe(run.mesh)}, {run.dtype} computation"),
        *(("environment", world) for world in worlds),
        (
            "algorithm",
            f"{s.algorithm} with {s.estimator}: {kept}, clip {s.loss.clip_low:g} /"
            f" {s.loss.clip_high:g}, KL {s.loss.kl:g}, entropy {s.loss.entropy:g}",
        ),
        (
            "iteration",
            f"{rollout.prompts} prompts x {rollout.group_size} = {episodes} episodes of"
            f" up to {rollout.turns} turns; rows of {run.plan.context} tokens{held};"
            f" updates on {s.optimizer.minibatch} rows",
        ),
        ("run", f"{s.iterations} iterations in {workdir}"),
        ("time", "the first iteration compiles; then the time left is shown"),
    ]
    return progress.banner("ragen_jax", rows) + "\n"


def _options(world: WorldSettings) -> str:
    return ", ".join(f"{k} {v}" for k, v in world.options) or "as it comes"


def example(run: Run, rollout: Rollout) -> str:
    """The first prompt of the batch and the reply that was sampled to it."""
    rows = rollout.rows
    tokens, turn, is_reply = (
        np.asarray(field.addressable_shards[0].data[0])
        for field in (rows.tokens, rows.turn, rows.is_reply)
    )
    prompt = run.tokenizer.decode(tokens[(turn == 0) & ~is_reply])
    reply = run.tokenizer.decode(tokens[(turn == 0) & is_reply])
    text = f"--- an example prompt\n{prompt}\n--- its reply\n{reply}"
    return text.replace("\n", "\n  ") + "\n"


def peak_memory() -> float:
    """GiB: the most a local device has held, or this process where that is unknown."""
    stats: Any = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 2**30
