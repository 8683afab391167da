"""Measures this machine: the world alone, an iteration's phases, the sampler's passes.

  python launch/benchmark.py --config=configs/frozenlake.py --iterations=5
  python launch/benchmark.py --env=all

Trains for a few iterations without saving anything, then samples conversations of fixed
lengths, and prints a table and, with --out, JSON. Gymnasium's FrozenLake is measured in
the same run if it is installed; with --peers so are transformers (with torch) and
google-tunix, on the same weights and tokens. --shape takes random weights in the shape
of a model that is not there:

  python launch/benchmark.py --config=configs/frozenlake.py:smollm2 --shape=smollm2 \
      --iterations=0 --peers
"""

import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import common
from absl import flags

from ragen_jax.models.presets import SHAPES

_CONFIG = common.define_config("configs/frozenlake.py")
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 5, "Iterations to time, after one that compiles.", lower_bound=0
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.")
_ENV = flags.DEFINE_string(
    "env", None, "Measure this world alone ('all': each), beside its peers."
)
_GAMES = 1024  # side by side, where worlds are measured
_SHAPE = flags.DEFINE_enum(
    "shape", None, list(SHAPES), "Random weights in this shape, with tiny's tokenizer."
)
_PEERS = flags.DEFINE_boolean("peers", False, "Run other programs beside ours.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timings of each talk.", lower_bound=1)


def _size(name: str, usual: int, told: str):
    return flags.DEFINE_integer(name, usual, told, lower_bound=1)


_BATCH = _size("batch", 8, "Conversations side by side.")
_PROMPT = _size("prompt_tokens", 128, "Of a prompt, to which one reply is sampled.")
_NEW = _size("new_tokens", 64, "Of that reply.")
_TURNS = _size("turns", 5, "Turns of a conversation of several.")
_OBSERVATION = _size("observation_tokens", 100, "Told in each of those turns.")
_REPLY = _size("reply_tokens", 48, "Of each reply in them.")


def main() -> None:
    if _ENV.value:
        return _measure_worlds(_ENV.value)
    settings = common.read_settings(_CONFIG.value)
    common.use_every_core(settings)
    common.start_jax(settings.deterministic)
    report = {}
    with tempfile.TemporaryDirectory(prefix="benchmark.") as scratch:
        for title, figures in _measure(settings, Path(scratch)):
            report[title] = figures
            _tell(title, figures)
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(report, indent=2) + "\n")


def _tell(title: str, figures: dict) -> None:
    print(title)
    for name, value in figures.items():
        told = value if isinstance(value, str) else f"{value:14,.3f}"
        print(f"  {name:44s} {told}", flush=True)


def _measure(settings, scratch: Path) -> Iterator[tuple[str, dict]]:
    """Titles, and by name numbers, or texts where there is none, as they are known."""
    import jax

    from ragen_jax import loop, speed, weights

    with common.user_mistakes():
        if _SHAPE.value:
            settings = _with_shape(settings, scratch / "shape")
        run = loop.prepare(settings)
        weights.check_weights(run)
    best = speed.ceilings()
    devices = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    yield "device", {"devices": devices, "jax": jax.__version__, **best.figures()}
    model = settings.model.path
    if _SHAPE.value:
        model = f"random weights in the shape of {_SHAPE.value}"
    yield "model", {"weights": model, "computation": str(run.dtype)}
    yield "world", _world_figures(run.scenes[0].world)
    if _ITERATIONS.value:
        yield "iteration", _iteration_figures(run, best)
    yield from _talks(run, best, scratch)


def _with_shape(settings, folder: Path):
    """The settings with a model of random weights, written to a new folder."""
    from ragen_jax import loop, speed

    dtype = loop.compute_dtype(settings.model.compute_dtype)
    speed.write_random_model(folder, SHAPES[_SHAPE.value], dtype)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=str(folder)),
        # Such a model wins nothing; the update is to have as many rows all the same.
        filter=dataclasses.replace(settings.filter, keep_zero=True),
    )


# An iteration ------------------------------------------------------------------------


def _iteration_figures(run, best) -> dict[str, float]:
    from ragen_jax import ahead, loop, speed, training, weights

    state = weights.new_state(run)
    started = time.perf_counter()
    with speed.counting() as compiled:
        programs = ahead.compile_ahead(run, loop.make_programs(run))
        state, _, _ = loop.iterate(run, programs, state)
    first = time.perf_counter() - started
    rows = []
    for index in range(_ITERATIONS.value):
        print(f"\riteration {index + 1}/{_ITERATIONS.value}", end="", flush=True)
        state, values, rollout = loop.iterate(run, programs, state)
        rows.append(values | _work(run, rollout, values))
    print("\r", end="")
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    seconds = [r["time/rollout_seconds"] + r["time/update_seconds"] for r in rows]
    return {
        "first iteration, s": first,
        "of it compiling, s": compiled.seconds,
        "programs compiled": compiled.programs - compiled.from_cache,
        "programs from the cache of compiled ones": compiled.from_cache,
        "iteration, s": statistics.median(seconds),
        "iteration, slowest, s": max(seconds),
        "rollout, s": middle["time/rollout_seconds"],
        "update, s": middle["time/update_seconds"],
        "reply tokens/s": middle["rollout/tokens_per_second"],
        "slot utilization": middle["rollout/utilization"],
        "mean episode, tokens": middle["rollout/episode_tokens"],
        "mean episode, turns": middle["rollout/turns"],
        "mean reply, tokens": middle["rollout/reply_tokens"],
        "update, row tokens/s": middle["update tokens/s"],
        "update, model FLOP utilization": middle["update flop/s"] / best.matmul,
        "rollout, GB/s in decoding": middle["decode bytes/s"] / 1e9,
        "rollout, share of reading": middle["decode bytes/s"] / best.read,
        "peak memory, GiB": training.peak_memory(),
    }


def _work(run, rollout, values: dict[str, float]) -> dict[str, float]:
    """Useful work a second of one iteration, counted from its record.

    Update: 6 operations a weight and token for gradients, 2 for the old values; the
    vocabulary's weights for reply tokens alone; attention's own products, recomputed
    activations and padding are not counted. Decoding: the weights once a pass of each
    shard, and every cache entry that a sampled token looks at.
    """
    import jax.numpy as jnp

    from ragen_jax import speed

    layers, vocabulary = speed.weight_counts(run.config)
    is_reply = rollout.rows.is_reply
    ends = jnp.where(is_reply, jnp.arange(1, is_reply.shape[1] + 1)[None], 0).max(1)
    kept = values["filter/kept_fraction"]
    tokens = float(ends.sum()) * kept
    replies = float(is_reply.sum())
    has_critic = run.settings.estimator == "ppo"
    epochs = run.settings.optimizer.epochs
    actor = 6 * epochs * (layers * tokens + vocabulary * replies * kept)
    critic = (6 * epochs + 2) * layers * tokens if has_critic else 0.0
    positions = jnp.where(is_reply, jnp.arange(is_reply.shape[1])[None], 0).sum()
    entries = float(positions) * speed.cache_entry(run.config)
    weights_read = float(rollout.passes.decode.sum()) * (layers + vocabulary)
    read = jnp.dtype(run.dtype).itemsize * (weights_read + entries)
    return {
        "update tokens/s": tokens / values["time/update_seconds"],
        "update flop/s": (actor + critic) / values["time/update_seconds"],
        "decode bytes/s": read / values["time/rollout_seconds"],
    }


# Conversations of fixed lengths ------------------------------------------------------


def _talks(run, best, scratch: Path) -> Iterator[tuple[str, dict]]:
    """What `generate` and a conversation of several turns take, by us and by peers."""
    import jax

    from ragen_jax import speed, weights

    batch, vocabulary = _BATCH.value, run.config.vocabulary
    sizes = {
        "generating": (1, _PROMPT.value, _NEW.value),
        "several turns": (_TURNS.value, _OBSERVATION.value, _REPLY.value),
    }
    talks = {
        name: speed.random_talk(vocabulary, batch, *of) for name, of in sizes.items()
    }
    actor = weights.load_parameters(run, value_head=False)
    laid_out = speed.decoding_weights(run, actor)
    talkers = {
        name: speed.make_talker(run, laid_out, talk) for name, talk in talks.items()
    }
    with speed.counting() as compiled:
        jax.block_until_ready([talker.speak() for talker in talkers.values()])
    alone = speed.talk_figures(
        run, talkers["generating"], talks["generating"], best, _REPEATS.value
    )
    figures = {"compiling both, s": compiled.seconds, **alone}
    (_, told, reply), (turns, each, answer) = sizes.values()
    lengths = {
        "generating": f"{batch} x ({told} + {reply}) tokens",
        "several turns": f"{batch} x {turns} x ({each} + {answer}) tokens",
    }
    yield "lengths", lengths
    yield "sampler, generating", figures
    yield from _races(run, talks, talkers, actor, scratch)


def _races(run, talks, talkers, actor, scratch: Path) -> Iterator[tuple[str, dict]]:
    """Ours beside each peer; a sentence for a peer that is not there."""
    from ragen_jax import peers, speed

    def race(rivals) -> dict[str, float]:
        figures = {}
        for name, talk in talks.items():
            runs = {"ours": talkers[name].speak}
            for rival, speaker in rivals.items():
                runs[rival] = functools.partial(speaker, talk)
            figures |= speed.race(name, talk, runs, _REPEATS.value)
        return figures

    missing = peers.missing(run.config) if _PEERS.value else {}
    present = [x for x in peers.OPEN if x not in missing] if _PEERS.value else []
    for name, why in missing.items():
        yield f"beside {name}", {"state": why}
    if not present:
        yield "whole conversations", race({})
        return
    folder = peers.model_folder(run, actor, scratch / "model")
    for name in present:
        speaker, told = peers.OPEN[name](folder, run)
        yield f"beside {name}", {"state": told} | race({name: speaker})


# The world ---------------------------------------------------------------------------


def _world_figures(world) -> dict[str, float]:
    from ragen_jax import worldspeed

    figures = {
        "steps/s": worldspeed.steps_per_second(world, batch=1024, steps=1000),
        "resets/s": worldspeed.resets_per_second(world, batch=1024),
    }
    if (peer := _gymnasium_steps()) is not None:
        figures["Gymnasium steps/s"] = peer
    return figures


def _gymnasium_steps(steps: int = 50_000) -> float | None:
    """Gymnasium's FrozenLake, bare steps of random play, or None without it."""
    try:
        import gymnasium
    except ImportError:
        return None
    world = gymnasium.make("FrozenLake-v1", is_slippery=True).unwrapped
    world.reset(seed=0)
    started = time.perf_counter()
    for index in range(steps):
        if world.step(index * 7919 % 4)[2]:
            world.reset()
    return steps / (time.perf_counter() - started)


def _measure_worlds(name: str) -> None:
    """Prints steps and resets a second of worlds and of their peers."""
    import jax

    from ragen_jax import envs, worldpeers, worldspeed
    from ragen_jax.progress import Console

    console, rows = Console(sys.stdout), []
    for kind, options in worldspeed.kinds(name):
        world = envs.make(kind, options.items())
        label = " ".join([kind, *(f"{key}={value}" for key, value in options.items())])
        console.status(f"measuring {label} ...")
        ours = worldspeed.measure(world, _GAMES, label)
        rows.append((ours, list(worldpeers.peers(kind, options, _GAMES))))
    device = jax.devices()[0].device_kind
    console.line(f"{device}, jax {jax.__version__}, batches of {_GAMES}")
    console.line(worldspeed.table(rows))
    if _OUT.value:
        speeds = [speed for ours, peers in rows for speed in (ours, *peers)]
        record = {"device": device, "jax": jax.__version__, "batch": _GAMES}
        record["worlds"] = [dataclasses.asdict(speed) for speed in speeds]
        Path(_OUT.value).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    common.run(main)
