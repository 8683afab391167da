"""Measures a machine: an environment, whole iterations by phase, and the sampler.

This is what launch/benchmark.py runs by default; the GPU suite uses its iterations.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax import starpo
from ragen_jax.benchmarks import device, environments, other_samplers, sampler
from ragen_jax.benchmarks.device import DeviceLimits
from ragen_jax.envs.base import Environment
from ragen_jax.models.presets import SHAPES
from ragen_jax.rollout.rollout import Rollout
from ragen_jax.settings import Settings
from ragen_jax.training import memory_plan, weights
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training.model import compute_dtype
from ragen_jax.training.run import Run


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure, and in which sizes.

    Two conversations of fixed lengths are timed: one of a single turn ("generating"),
    one of several turns.
    """

    iterations: int  # to time after one that compiles; 0: none
    shape: str | None  # use random weights of this shape, a key of SHAPES
    peers: bool  # measure other libraries too
    repeats: int  # timings of each conversation
    batch: int  # conversations in parallel
    prompt_tokens: int  # single turn: tokens of the prompt
    new_tokens: int  # single turn: tokens of the reply
    turns: int  # several turns: their number
    observation_tokens: int  # several turns: tokens given in each
    reply_tokens: int  # several turns: tokens of each reply


def measure(
    settings: Settings, request: Request, scratch: Path
) -> Iterator[tuple[str, dict]]:
    """Yields (title, figures by name) as they become known; a figure may be a text.

    Args:
      settings: of the model, the environment and the iterations.
      request: what to measure.
      scratch: an empty folder.

    Raises:
      UserError: if these settings cannot be run.
    """
    if request.shape:
        settings = with_shape(settings, request.shape, scratch / "shape")
    run = run_lib.prepare(settings)
    weights.check_weights(run.model)
    names = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    yield "device", {"devices": names, "jax": jax.__version__}
    model = settings.model.path
    if request.shape:
        model = f"random weights in the shape of {request.shape}"
    yield "model", {"weights": model, "computation": str(run.model.dtype)}
    yield "env", _env_figures(run.tasks[0].env)
    phases = {}
    if request.iterations:  # A dict keeps the last figures of each title.
        phases = dict(iteration_figures(run, request.iterations))
    # After the iterations, whose peak memory must not include that of this measurement.
    best = device.device_limits()
    yield "at best", best.figures()
    for title, figures in phases.items():
        yield title, with_shares(figures, best) if title == "iteration" else figures
    yield from _conversations(run, request, best, scratch)


def with_shape(settings: Settings, shape: str, folder: Path) -> Settings:
    """Writes a model of random weights and returns the settings with that model.

    Args:
      settings: all but the model.
      shape: a key of SHAPES.
      folder: to write; must not exist.
    """
    dtype = compute_dtype(settings.model.compute_dtype)
    sampler.write_random_model(folder, SHAPES[shape], dtype)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=str(folder)),
        # Random weights earn equal returns, whose groups the filter would drop: keep
        # them, so that the update has as many rows as in real training.
        filter=dataclasses.replace(settings.filter, keep_zero=True),
    )


# An iteration -----------------------------------------------------------------------


def iteration_figures(
    run: Run, iterations: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Runs iterations and yields (title, figures) as soon as they are known.

    First the seconds of compiling ahead, then those of the first iteration, then after
    each further one the medians so far, each of the three under its own title. So a
    caller that is killed early has some figures, and a second attempt does not replace
    the medians of the first before it has some itself.

    Args:
      run: with a model whose weights can be loaded.
      iterations: to time after the first, at least 1.
    """
    state = weights.new_state(run)
    started = time.perf_counter()
    with device.counting() as compiled:
        traced = programs_lib.make_programs(run)
        programs, _ = programs_lib.compile_ahead(run, traced, {})
        ahead = time.perf_counter() - started
        yield "compiling", {"compiled before the first iteration, s": ahead}
        state, _, _ = starpo.iterate(run, programs, state)
    first = time.perf_counter() - started
    yield "first iteration", _of_first(first, compiled)
    rows = []
    for index in range(iterations):
        line = f"iteration {index + 1}/{iterations}"
        print(f"\r{line}", end="", flush=True)
        state, values, rollout = starpo.iterate(run, programs, state)
        rows.append(values | _work(run, rollout, values))
        print(f"\r{' ' * len(line)}\r", end="")  # Erases the line before the table.
        yield "iteration", _medians(rows)


def _of_first(first: float, compiled: device.Compilations) -> dict[str, float]:
    """The figures of the iteration that compiles."""
    return {
        "first iteration, s": first,
        "of it compiling, s": compiled.seconds,
        "programs compiled": compiled.programs - compiled.from_cache,
        "programs from the cache of compiled ones": compiled.from_cache,
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The figures of the iterations timed so far, each a row of metrics."""
    # An iteration without an update has a gap of NaN.
    measured = {
        name: [row[name] for row in rows if not math.isnan(row[name])]
        for name in rows[0]
    }
    middle = {
        name: statistics.median(values) if values else math.nan
        for name, values in measured.items()
    }
    seconds = [r["time/rollout_seconds"] + r["time/update_seconds"] for r in rows]
    return {
        "iterations timed": len(rows),
        "iteration, s": statistics.median(seconds),
        "iteration, slowest, s": max(seconds),
        "rollout, s": middle["time/rollout_seconds"],
        "update, s": middle["time/update_seconds"],
        "reply tokens/s": middle["rollout/tokens_per_second"],
        "slot utilization": middle["rollout/utilization"],
        "decode passes": middle["decode passes"],
        "message passes": middle["message passes"],
        "rollout by decode passes, ms": middle["ms a decode pass"],
        "log-probability gap, nats": middle["update/logprob_gap"],
        "mean episode, tokens": middle["rollout/episode_tokens"],
        "mean episode, turns": middle["rollout/turns"],
        "mean reply, tokens": middle["rollout/reply_tokens"],
        "update, row tokens/s": middle["update tokens/s"],
        "update, model TFLOP/s": middle["update flop/s"] / 1e12,
        "rollout, GB/s in decoding": middle["decode bytes/s"] / 1e9,
        "peak memory, GiB": memory_plan.peak_memory(),
    }


def with_shares(figures: dict[str, float], best: DeviceLimits) -> dict[str, float]:
    """Adds to the medians of iterations what share of the device's limits they reach.

    Measure the limits after the iterations: it takes 5 GiB of a GPU, and peak memory
    counts from the start of the process.
    """
    update = figures["update, model TFLOP/s"] * 1e12
    decoding = figures["rollout, GB/s in decoding"] * 1e9
    return figures | {
        "update, model FLOP utilization": update / best.matmul,
        "rollout, share of reading": decoding / best.read,
    }


def _work(run: Run, rollout: Rollout, values: dict[str, float]) -> dict[str, float]:
    """The useful work a second of one iteration, counted from its record.

    Update: 6 FLOP per weight and token for gradients (2 forward, 4 backward), or 4 with
    adapters: frozen weights need no gradient of their own. The critic's old values take
    2 more, and so do the reference's scores and those of `loss.sampler_correction`. The
    head counts for reply tokens only. Not counted: attention scores, adapters,
    recomputed activations, padding.

    Decoding: the bytes of the sampler's weights, once for each pass of each shard, and
    of every cache entry that a sampled token attends to.

    Args:
      run: with the settings and the model.
      rollout: the record.
      values: the iteration's metrics.
    """
    config, dtype = run.model.config, run.model.dtype
    layers, vocabulary = sampler.weight_counts(config)
    is_reply = rollout.rows.is_reply
    position = jnp.arange(is_reply.shape[1])[None]  # int32[1, T]
    lengths = jnp.where(is_reply, position + 1, 0).max(1)  # int32[R], to the last reply
    kept = values["filter/kept_fraction"]
    tokens = float(lengths.sum()) * kept
    replies = float(is_reply.sum())
    settings, optimizer = run.settings, run.settings.optimizer
    learning = optimizer.epochs * (6 if run.model.adapters is None else 4)
    scoring = 2 * (settings.has_reference + (settings.loss.sampler_correction > 0))
    flop = (learning + scoring) * (layers * tokens + vocabulary * replies * kept)
    if settings.has_critic:
        flop += (learning + 2) * layers * tokens
    # Cache entries read; all rows' would overflow int32.
    by_row = jnp.where(is_reply, position, 0).sum(1)
    attended = float(np.asarray(by_row, np.float64).sum())
    entries = attended * sampler.cache_entry(config)
    weight_bytes = sampler.decoding_bytes(
        config, dtype, settings.rollout.decode_weights
    )
    read = float(rollout.passes.decode_passes.sum()) * weight_bytes
    read += entries * jnp.dtype(dtype).itemsize
    passes = {
        "decode passes": float(rollout.passes.decode_passes.max()),
        "message passes": float(rollout.passes.extend_passes.max()),
    }
    milliseconds = 1000 * values["time/rollout_seconds"]
    return passes | {
        "ms a decode pass": milliseconds / passes["decode passes"],
        "update tokens/s": tokens / values["time/update_seconds"],
        "update flop/s": optimizer.reuse * flop / values["time/update_seconds"],
        "decode bytes/s": read / values["time/rollout_seconds"],
    }


# Conversations of fixed lengths ------------------------------------------------------


def _conversations(
    run: Run, request: Request, best: DeviceLimits, scratch: Path
) -> Iterator[tuple[str, dict]]:
    """Times the two conversations of `Request`, with our sampler and with peers."""
    batch, vocabulary = request.batch, run.model.config.vocabulary
    sizes = {  # (turns, tokens given in each, tokens of each reply)
        "generating": (1, request.prompt_tokens, request.new_tokens),
        "several turns": (
            request.turns,
            request.observation_tokens,
            request.reply_tokens,
        ),
    }
    conversations = {
        name: sampler.random_conversation(vocabulary, batch, *of)
        for name, of in sizes.items()
    }
    actor = weights.load_parameters(run.model)
    laid_out = sampler.decoding_weights(run.model, actor)
    runners = {
        name: sampler.make_runner(run.model, run.tokens[0], laid_out, conversation)
        for name, conversation in conversations.items()
    }
    with device.counting() as compiled:
        jax.block_until_ready([runner.converse() for runner in runners.values()])
    alone = sampler.conversation_figures(
        run.model,
        runners["generating"],
        conversations["generating"],
        best,
        request.repeats,
    )
    figures = {"compiling both, s": compiled.seconds, **alone}
    tokens = {name: f"({given} + {reply})" for name, (_, given, reply) in sizes.items()}
    yield (
        "lengths",
        {
            "generating": f"{batch} x {tokens['generating']} tokens",
            "several turns": (
                f"{batch} x {request.turns} x {tokens['several turns']} tokens"
            ),
        },
    )
    yield "sampler, generating", figures
    yield from _comparisons(run, request, conversations, runners, actor, scratch)


def _comparisons(
    run: Run, request: Request, conversations, runners, actor, scratch: Path
) -> Iterator[tuple[str, dict]]:
    """Compares our sampler with each peer, or says why that peer is missing."""

    def compare(rivals) -> dict[str, float]:
        figures = {}
        for name, conversation in conversations.items():
            runs = {"ours": runners[name].converse}
            for rival, runner in rivals.items():
                runs[rival] = functools.partial(runner, conversation)
            figures |= sampler.compare(name, conversation, runs, request.repeats)
        return figures

    missing = other_samplers.missing(run.model.config) if request.peers else {}
    present = (
        [x for x in other_samplers.OPEN if x not in missing] if request.peers else []
    )
    for name, why in missing.items():
        yield f"beside {name}", {"state": why}
    if not present:
        yield "whole conversations", compare({})
        return
    folder = other_samplers.model_folder(run.model, actor, scratch / "model")
    for name in present:
        runner, state = other_samplers.OPEN[name](folder, run.model)
        yield f"beside {name}", {"state": state} | compare({name: runner})


# The environment ---------------------------------------------------------------------


def _env_figures(env: Environment) -> dict[str, float]:
    speed = environments.measure(env)
    figures = {"steps/s": speed.steps, "resets/s": speed.resets}
    if (other := _gymnasium_steps()) is not None:
        figures["Gymnasium steps/s"] = other
    return figures


_GYMNASIUM_STEPS = 50_000  # in one timed loop


def _gymnasium_steps() -> float | None:
    """Steps/s of random play in Gymnasium's FrozenLake; None if it is not installed."""
    try:
        import gymnasium
    except ImportError:
        return None
    env = gymnasium.make("FrozenLake-v1", is_slippery=True).unwrapped
    env.reset(seed=0)
    started = time.perf_counter()
    for index in range(_GYMNASIUM_STEPS):
        if env.step(index * 7919 % 4)[2]:
            env.reset()
    return _GYMNASIUM_STEPS / (time.perf_counter() - started)
