"""Measures this machine: the world alone, the phases of an iteration, memory.

  python launch/benchmark.py --config=configs/frozenlake.py --iterations=5
  python launch/benchmark.py --env=all

Trains for a few iterations without saving anything, and prints a table and, with
--out, JSON. Gymnasium's FrozenLake is measured in the same run if it is installed.
--env measures worlds alone instead, beside the public environments that are installed.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import common
from absl import flags

_CONFIG = common.define_config("configs/frozenlake.py")
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 5, "Iterations to time, after one that compiles.", lower_bound=1
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.")
_ENV = flags.DEFINE_string(
    "env", None, "Measure this world alone ('all': each), beside its peers."
)

_BATCH = 1024  # games side by side


def main() -> None:
    if _ENV.value:
        return _measure_worlds(_ENV.value)
    settings = common.read_settings(_CONFIG.value)
    common.use_every_core(settings)
    common.start_jax(settings.deterministic)
    import jax

    from ragen_jax import ahead, loop, training, weights, worldspeed

    with common.user_mistakes():
        run = loop.prepare(settings)
        weights.check_weights(run)
    figures = _ceilings()
    matmul, copy = figures.values()
    figures["world steps/s"] = worldspeed.steps_per_second(
        run.scenes[0].world, batch=1024, steps=1000
    )
    figures["world resets/s"] = worldspeed.resets_per_second(
        run.scenes[0].world, batch=1024
    )
    if (peer := _gymnasium_steps()) is not None:
        figures["Gymnasium steps/s"] = peer
    state = weights.new_state(run)
    started = time.perf_counter()
    programs = ahead.compile_ahead(run, loop.make_programs(run))
    state, _, _ = loop.iterate(run, programs, state)
    figures["first iteration, s"] = time.perf_counter() - started
    rows = []
    for index in range(_ITERATIONS.value):
        print(f"\riteration {index + 1}/{_ITERATIONS.value}", end="", flush=True)
        state, values, rollout = loop.iterate(run, programs, state)
        rows.append(values | _work(run, rollout, values))
    print("\r", end="")
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    seconds = [r["time/rollout_seconds"] + r["time/update_seconds"] for r in rows]
    figures |= {
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
        "update, share of matmul": middle["update flop/s"] / matmul / 1e12,
        "decoding, GB/s": middle["decode bytes/s"] / 1e9,
        "decoding, share of copy": middle["decode bytes/s"] / copy / 1e9,
        "peak memory, GiB": training.peak_memory(),
    }
    device = jax.devices()[0].device_kind
    print(f"{device} x {jax.device_count()}, jax {jax.__version__}")
    for name, value in figures.items():
        print(f"  {name:24s} {value:14,.3f}")
    if _OUT.value:
        record = {"device": device, "jax": jax.__version__, **figures}
        Path(_OUT.value).write_text(json.dumps(record, indent=2) + "\n")


def _work(run, rollout, values: dict[str, float]) -> dict[str, float]:
    """Useful work a second of one iteration, counted from its record.

    Update: 6 operations a weight and token for gradients, 2 for the old values; the
    vocabulary's weights for reply tokens alone; attention's own products, recomputed
    activations and padding are not counted. Decoding: the weights once a pass of each
    shard, and every cache entry that a sampled token looks at.
    """
    import jax.numpy as jnp

    from ragen_jax.models import parameters

    config = run.config
    declared = parameters.declare(config)
    layers = parameters.count(declared["layers"])
    vocabulary = config.vocabulary * config.width
    is_reply = rollout.rows.is_reply
    ends = jnp.where(is_reply, jnp.arange(1, is_reply.shape[1] + 1)[None], 0).max(1)
    kept = values["filter/kept_fraction"]
    tokens = float(ends.sum()) * kept
    replies = float(is_reply.sum())
    has_critic = run.settings.estimator == "ppo"
    epochs = run.settings.optimizer.epochs
    actor = 6 * epochs * (layers * tokens + vocabulary * replies * kept)
    critic = (6 * epochs + 2) * layers * tokens if has_critic else 0.0
    size = jnp.dtype(run.dtype).itemsize
    positions = jnp.where(is_reply, jnp.arange(is_reply.shape[1])[None], 0).sum()
    entry = 2 * config.layers * config.kv_heads * config.head_dim
    weights_read = float(rollout.passes.decode.sum()) * (layers + vocabulary)
    read = size * (weights_read + float(positions) * entry)
    return {
        "update tokens/s": tokens / values["time/update_seconds"],
        "update flop/s": (actor + critic) / values["time/update_seconds"],
        "decode bytes/s": read / values["time/rollout_seconds"],
    }


def _ceilings() -> dict[str, float]:
    """What the device can do at best: a large matrix product, and a copy."""
    import jax
    import jax.numpy as jnp

    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    long = jnp.zeros(2**26 if on_cpu else 2**30, jnp.float32)
    product = _seconds(jax.jit(lambda x: x @ x), x)
    copy = _seconds(jax.jit(lambda x: x + 1), long)
    return {
        f"matmul {dtype.__name__}, TFLOP/s": 2 * size**3 / product / 1e12,
        "copy, GB/s read and written": 2 * long.nbytes / copy / 1e9,
    }


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
        ours = worldspeed.measure(world, _BATCH, label)
        rows.append((ours, list(worldpeers.peers(kind, options, _BATCH))))
    device = jax.devices()[0].device_kind
    console.line(f"{device}, jax {jax.__version__}, batches of {_BATCH}")
    console.line(worldspeed.table(rows))
    if _OUT.value:
        speeds = [speed for ours, peers in rows for speed in (ours, *peers)]
        record = {"device": device, "jax": jax.__version__, "batch": _BATCH}
        record["worlds"] = [dataclasses.asdict(speed) for speed in speeds]
        Path(_OUT.value).write_text(json.dumps(record, indent=2) + "\n")


def _seconds(run, x) -> float:
    import jax

    jax.block_until_ready(run(x))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


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


if __name__ == "__main__":
    common.run(main)
