"""Measures what diagnostics cost: indicators, records, mutual information, the report.

Called by `launch/benchmark.py --instruments`. "Wall" is elapsed time, "work" the
processor time of all cores.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from ragen_jax import settings as settings_lib
from ragen_jax import starpo
from ragen_jax.diagnostics import (
    episode_log,
    health,
    monitor,
    mutual_information,
    report,
    thought_samples,
)
from ragen_jax.diagnostics.health import HealthState
from ragen_jax.diagnostics.mutual_information import Pairs
from ragen_jax.reporting import metrics
from ragen_jax.rollout.rollout import Rollout
from ragen_jax.settings import Settings
from ragen_jax.text import token_bytes
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights
from ragen_jax.training.run import Run
from ragen_jax.utils import workdir_files
from ragen_jax.utils.finite import finite

THOUGHTS = 64  # thoughts for which mutual information is measured
REPORTED = 200  # iterations of the run for which a report is written
_REPEATS = 3


def measure(
    settings: Settings, iterations: int, scratch: Path
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (title, figures) for each instrument.

    Args:
      settings: of the run.
      iterations: to time after one that compiles, at least 1.
      scratch: an empty folder.
    """
    run = run_lib.prepare(settings)
    weights.check_weights(run.model)
    traced = programs_lib.make_programs(run)
    programs, _ = programs_lib.compile_ahead(run, traced, {})
    health_monitor = monitor.make_monitor(
        run, run.model.tokenizer, programs_lib.update_plan(run)
    )
    state, remembered = weights.new_state(run), HealthState()
    spent: dict[str, list[tuple[float, float]]] = {}
    for index in range(iterations + 1):
        started = _now()
        state, values, rollout = starpo.iterate(run, programs, state)
        iterated = _now()
        values |= monitor.measure(health_monitor, run, rollout)
        remembered, _ = health.observe(remembered, index + 1, values, settings.health)
        observed = _now()
        if index:  # The first iteration compiled.
            spent.setdefault("off", []).append(_between(started, iterated))
            spent.setdefault("on", []).append(_between(started, observed))
    yield "an iteration", _paired(spent["off"], spent["on"])
    recorded = _record(health_monitor, run, programs, state, rollout, scratch)
    yield "recording episodes", recorded
    actor = programs.merge(state.actor, programs.frozen)
    yield from _information(run, actor, rollout)
    yield "report of a run", _report(settings, values, scratch)


def _now() -> tuple[float, float]:
    """Clock readings in seconds: (wall, work)."""
    return time.perf_counter(), time.process_time()


def _between(start, end) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


def _paired(off, on) -> dict[str, float]:
    """Medians over iterations, each timed without and with its instruments.

    `off` and `on` hold (wall, work) of each iteration, in seconds.
    """
    figures = {}
    for place, kind in enumerate(("wall", "work")):
        without = statistics.median(one[place] for one in off)
        extra = [b[place] - a[place] for a, b in zip(off, on, strict=True)]
        shares = [e / a[place] for e, a in zip(extra, off, strict=True)]
        figures |= {
            f"diagnostics off, s {kind}": without,
            f"diagnostics on, s {kind}": without + statistics.median(extra),
            f"difference, % {kind}": 100 * statistics.median(shares),
        }
    return figures


def _timed(compute: Callable[[], Any]) -> dict[str, float]:
    """Medians of a few calls after one that compiles."""
    spent = []
    for _ in range(_REPEATS + 1):
        start = _now()
        jax.block_until_ready(compute())
        spent.append(_between(start, _now()))
    walls, works = zip(*spent[1:], strict=True)
    return {"s wall": statistics.median(walls), "s work": statistics.median(works)}


def _record(made, run: Run, programs, state, rollout: Rollout, scratch: Path):
    every = run.settings.health.record_every or 1
    found = _timed(
        lambda: monitor.record(made, run, programs, state, rollout, scratch, every)
    )
    return found | {"iterations between": float(every)}


def _information(run: Run, actor, rollout: Rollout) -> Iterator:
    """Mutual information of first turns, and of turns along whole trajectories."""
    model = run.model
    rows, group = jax.device_get((rollout.rows, rollout.episodes.group))
    turns = thought_samples.find_turns(rows, token_bytes.token_bytes(model.tokenizer))
    temperature = run.settings.rollout.temperature
    score = jax.jit(
        lambda actor, pairs: mutual_information.score_pairs(
            actor, pairs, model.config, temperature, model.dtype
        )
    )
    chosen = dict(samples=THOUGHTS, seed=run.settings.seed)
    for pairs in (
        thought_samples.sample_first_turns(rows, turns, group, **chosen),
        thought_samples.sample_trajectories(rows, turns, **chosen),
    ):
        pairs = mutual_information.as_arrays(pairs)
        costs = mutual_information.cost(pairs)
        figures = _timed(lambda pairs=pairs: score(actor, pairs))
        counted = {name: float(count) for name, count in costs.items()}
        yield f"mutual information, {_shape(pairs)}", figures | counted


def _shape(pairs: Pairs) -> str:
    thoughts, prompts = len(pairs.thoughts), len(pairs.prompts)
    return f"{thoughts} thoughts x {prompts} prompts"


def _report(settings: Settings, values: dict[str, float], scratch: Path):
    """Times a report of REPORTED iterations like the last one and of a full log."""
    values = finite(values)
    lines = [json.dumps({"iteration": i + 1} | values) for i in range(REPORTED)]
    (scratch / metrics.FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    saved = json.dumps(settings_lib.to_dict(settings))
    (scratch / workdir_files.SETTINGS).write_text(saved, encoding="utf-8")
    found = episode_log.read(scratch)
    copies = -(-episode_log.MOST_EPISODES // len(found))
    episodes = (found * copies)[: episode_log.MOST_EPISODES]
    (scratch / episode_log.FILE).unlink()
    episode_log.append(scratch, episodes)
    path = scratch / report.FILE
    figures = _timed(lambda: report.write_report(scratch))
    return figures | {
        "iterations": float(REPORTED),
        "episodes": float(len(episodes)),
        "MB": path.stat().st_size / 1e6,
    }
