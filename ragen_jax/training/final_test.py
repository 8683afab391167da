"""The test at the end of a run: the same levels before and after training.

It changes nothing that a resumed run reads: killed at any moment, it is played again
and ends in the same files.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ragen_jax.diagnostics import episode_log
from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.envs.base import TEST
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation.evaluator import Score
from ragen_jax.learning.train_state import TrainState
from ragen_jax.models.parameters import Parameters
from ragen_jax.reporting import metrics
from ragen_jax.reporting.console import Console
from ragen_jax.reporting.metrics import MetricsWriter
from ragen_jax.training import messages, safety, validation, weights
from ragen_jax.training.interrupts import STALLED_AT_FIRST, StoppedAtOnce
from ragen_jax.training.loop import Outputs
from ragen_jax.training.run import Run
from ragen_jax.utils import atomic_files, workdir_files
from ragen_jax.utils.finite import finite


def report(
    run: Run,
    state: TrainState,
    base: Parameters | None,
    outputs: Outputs,
    last_words: str,
) -> bool:
    """Plays the test, writes it down and shows its table; False if a signal came.

    Args:
      run: the run.
      state: after its last iteration, saved. All but its actor is freed.
      base: the weights of `model.path`, if they are in memory.
      outputs: where the results go. Interrupts and watchdog are entered: a signal ends
        the test within seconds, and each batch of it has to end in time.
      last_words: said if the process has to be ended by force.
    """
    workdir, console, watchdog = outputs.workdir.path, outputs.console, outputs.watchdog
    try:
        with outputs.interrupts.nothing_to_save(last_words) as raise_if_asked:
            what = "a batch of the final test"

            def check_in() -> None:
                watchdog.expect_within(STALLED_AT_FIRST, what)
                raise_if_asked()

            watchdog.expect_within(STALLED_AT_FIRST, what)
            before, after = _play(run, state, base, workdir, console, check_in)
            watchdog.rest()
            iteration = int(state.iteration)
            said = _nothing_learned(run, state, workdir)
            scores = (before, after)
            _write(run, iteration, workdir, outputs.metrics, console, *scores, said)
    except StoppedAtOnce:
        return False
    return True


def _play(
    run: Run,
    state: TrainState,
    base: Parameters | None,
    workdir: Path,
    console: Console,
    check_in: Callable[[], None],
) -> tuple[dict[str, Score], dict[str, Score]]:
    """The scores of the first and of the last policy, by environment."""
    evaluation, iteration = run.settings.evaluation, int(state.iteration)
    console.status("test levels, before and after ...")
    tasks = [task for task, _ in run.evaluated]
    evaluators = validation.make_evaluators(
        run, rollouts=evaluation.test_rollouts, prompts=evaluation.test_prompts
    )
    if jax.process_index() == 0:
        episode_log.forget_tests(workdir, console.line)

    def watch(phase: str, iteration: int) -> Callable[..., None]:
        record = monitor_lib.recorder(
            run.settings, run.model.tokenizer, tasks, workdir, phase, iteration
        )

        def on_batch(*batch: Any) -> None:
            record(*batch)
            check_in()

        return on_batch

    play = functools.partial(
        validation.evaluate,
        run,
        evaluators,
        split=TEST,
        prompts=evaluation.test_prompts,
    )
    _free_what_trains(state)
    first = base or weights.load_parameters(run.model)
    before = play(actor=first, on_batch=watch("before", 0))
    last = weights.make_merge(run.model)(state.actor, first)
    return before, play(actor=last, on_batch=watch("after", iteration))


def _free_what_trains(state: TrainState) -> None:
    """Frees critic and optimizers, to make room for the model before training.

    It is at most as large as the actor's optimizer, so that the test fits wherever a
    validation does (memory_plan.py). With adapters it is already in memory.
    """
    trains = (state.critic, state.actor_optimizer, state.critic_optimizer)
    for leaf in jax.tree.leaves(trains):
        if leaf.ndim:
            leaf.delete()


def _write(
    run: Run,
    iteration: int,
    workdir: Path,
    writer: MetricsWriter,
    console: Console,
    before: dict[str, Score],
    after: dict[str, Score],
    warning: str,
) -> None:
    # A resumed run shows the report again, but writes its figures only if they differ.
    figures = validation.named("test", after)
    written = {k: v for record in metrics.read(workdir)[-1:] for k, v in record.items()}
    if any(written.get(name, "none") != v for name, v in finite(figures).items()):
        writer.write(iteration, figures)
    writer.draw()
    warned = {"warning": warning} if warning else {}
    records = {label: _record(before[label], after[label]) | warned for label in after}
    several = len(records) > 1
    if jax.process_index() == 0:
        record = records if several else next(iter(records.values()))
        text = json.dumps(record, indent=2) + "\n"
        atomic_files.write_text(workdir / workdir_files.TEST, text)
    for label, record in records.items():
        console.line(messages.before_after(run, record, label if several else ""))
    console.line(messages.finished(workdir, run.settings))
    if warning:
        console.line(f"warning: {warning}")


def _nothing_learned(run: Run, state: TrainState, workdir: Path) -> str:
    """`safety.nothing_learned`: without an update both sides show the same policy."""
    name, lines = "filter/reward_std", metrics.read(workdir)
    spreads = [line[name] for line in lines if name in line]
    # What is not finite is written as none.
    spread = math.nan if None in spreads else max(spreads, default=0.0)

    def known(name: str) -> list[float]:
        return [x for line in lines if (x := line.get(name)) is not None]

    valid = max(known("rollout/valid_reply_rate"), default=math.nan)
    shares = known("rollout/cut_replies")
    cut = sum(shares) / len(shares) if shares else math.nan
    return safety.nothing_learned(run.settings, state, spread, valid, cut)


def _record(before: Score, after: Score) -> dict[str, Any]:
    """One environment's part of test.json. `..._by_level`: success rates, float[P].

    Unknown numbers, such as the standard error of a single level, are None.
    """
    gain, error = evaluator_lib.paired_difference(before, after)
    record = {
        "before": before.metrics(),
        "after": after.metrics(),
        "gain": gain,
        "gain_standard_error": error,
        "before_by_level": before.by_level.mean(axis=1).tolist(),
        "after_by_level": after.by_level.mean(axis=1).tolist(),
    }
    return finite(record)
