"""How fast the device is at best, and how fast the sampler's passes are on it.

Conversations of fixed lengths go through the same engine as a rollout: what is fed is
given, what is said is greedy and never ends early. So prefill and decoding are timed
each by itself, and other programs can be given the same work (`peers`).
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax.loop import Run
from ragen_jax.models import hugging_face, parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.presets import TINY_FOLDER
from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import engine, keys
from ragen_jax.rollout.cache import Cache, Policy
from ragen_jax.rollout.slots import Answer, Inputs, Part, Plan, Prompts
from ragen_jax.trajectory import UNFINISHED


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What all devices together do at best."""

    matmul: float  # floating-point operations a second of a large matrix product
    copy: float  # bytes a second read and written by adding to a long vector in place
    read: float  # bytes a second read by a large matrix times a vector
    dtype: str  # of the product

    def figures(self) -> dict[str, float]:
        """For a table."""
        return {
            f"matmul {self.dtype}, TFLOP/s": self.matmul / 1e12,
            "copy, GB/s read and written": self.copy / 1e9,
            "read, GB/s": self.read / 1e9,
        }


def ceilings() -> Ceilings:
    """Measured on the first device; a CPU's devices share its cores."""
    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    wide = jnp.ones((2**14 if on_cpu else 2**17, 2**12), dtype)
    product, by_vector = jax.jit(lambda x: x @ x), jax.jit(lambda x: x @ x[0])
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    # In place: on a CPU the first touch of new memory takes longer than the copy.
    held = [jnp.zeros(2**26 if on_cpu else 2**30, jnp.float32)]

    def copy() -> jax.Array:
        held[0] = add(held[0])
        return held[0]

    devices = 1 if on_cpu else jax.device_count()
    return Ceilings(
        matmul=devices * 2 * size**3 / min(seconds(lambda: product(x))),
        copy=devices * 2 * held[0].nbytes / min(seconds(copy)),
        read=devices * wide.nbytes / min(seconds(lambda: by_vector(wide))),
        dtype=dtype.__name__,
    )


def seconds(run: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Of each of some calls, after one that may compile."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return taken


@dataclasses.dataclass
class Compilations:
    """What was compiled while `counting`."""

    seconds: float = 0.0
    programs: int = 0
    from_cache: int = 0  # of those programs


@contextlib.contextmanager
def counting() -> Iterator[Compilations]:
    """Counts what XLA compiles, or takes from its cache on the disk, in the block."""
    seen = Compilations()

    def timed(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.seconds += duration
            seen.programs += 1

    def happened(event: str, **_) -> None:
        seen.from_cache += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(timed)
    jax.monitoring.register_event_listener(happened)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(timed)
        jax.monitoring.unregister_event_listener(happened)


def write_random_model(folder: Path, config: ModelConfig, dtype) -> None:
    """A new model folder of a shape, with the embedded model's tokenizer."""
    declared = parameters.declare(config)
    make = jax.jit(lambda key: parameters.initialize(key, declared))
    tokenizer = hugging_face.read_tokenizer(TINY_FOLDER)
    weights = jax.device_get(make(jax.random.key(0)))
    hugging_face.write_folder(folder, config, weights, tokenizer, dtype)


# Conversations of fixed lengths ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Talk:
    """B conversations of K turns, each M given tokens and then a reply."""

    fed: np.ndarray  # int32[K, B, M], prompts, then what each later turn is told
    reply: int  # tokens of each reply

    @property
    def replies(self) -> int:
        """Tokens that are sampled in all."""
        turns, batch, _ = self.fed.shape
        return turns * batch * self.reply

    @property
    def row(self) -> int:
        """Tokens of a whole conversation."""
        turns, _, told = self.fed.shape
        return turns * (told + self.reply)


def random_talk(vocabulary: int, batch: int, turns: int, told: int, reply: int) -> Talk:
    """B conversations of random tokens, the same at every call."""
    chance = np.random.default_rng(0)
    fed = chance.integers(0, vocabulary, (turns, batch, told), np.int32)
    return Talk(fed, reply)


@dataclasses.dataclass(frozen=True)
class Talker:
    """The compiled passes of one Talk."""

    prefill: Callable[[], Cache]  # of the prompts
    play: Callable[[Cache], jax.Array]  # all the rest -> int32[B, T], the rows
    shards: int  # that the batch is shared over

    def speak(self) -> jax.Array:
        """int32[B, T], the rows, from the beginning."""
        return self.play(self.prefill())


def make_talker(run: Run, weights: Parameters, talk: Talk) -> Talker:
    """The engine, given a Talk; compiles nothing yet.

    Args:
      run: for the model and the mesh, over which the batch is shared if it can be.
      weights: from `decoding_weights`.
      talk: what is said.
    """
    turns, batch, told = talk.fed.shape
    mesh = run.mesh if batch % meshes.row_shards(run.mesh) == 0 else _one_device()
    shards = meshes.row_shards(mesh)
    plan = _plan(run, talk, batch // shards)
    policy = Policy(run.config, run.dtype)
    whole, rows = PartitionSpec(), meshes.ROWS

    def shared(function, in_specs):
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False
            )
        )

    prefill = shared(
        lambda weights, prompts: kv.prefill_prompts(weights, policy, prompts),
        (whole, rows),
    )
    play = shared(
        lambda weights, tokens, cache, fed: _play(
            plan, policy, weights, tokens, cache, fed
        ),
        (whole, whole, rows, PartitionSpec(None, *rows)),
    )
    placed = NamedSharding(mesh, whole)
    weights, tokens = jax.device_put((weights, run.tokens[0]), placed)
    prompts = jax.device_put(talk.fed[0], NamedSharding(mesh, rows))
    fed = jax.device_put(talk.fed, NamedSharding(mesh, PartitionSpec(None, *rows)))
    return Talker(
        prefill=lambda: prefill(weights, prompts),
        play=lambda cache: play(weights, tokens, cache, fed),
        shards=shards,
    )


def decoding_weights(run: Run, actor: Parameters) -> Parameters:
    """The actor as the sampler wants it, whole on every device."""
    whole = NamedSharding(run.mesh, PartitionSpec())
    lay_out = jax.jit(lambda tree: kv.lay_out(tree, run.dtype), out_shardings=whole)
    return lay_out(actor)


def _one_device() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), meshes.AXES)


def _plan(run: Run, talk: Talk, batch: int) -> Plan:
    turns, _, told = talk.fed.shape
    buckets = run.settings.rollout.buckets
    lengths = {-(-talk.row * (i + 1) // buckets) for i in range(buckets)}
    part = Part(
        first_episode=0,
        episodes=batch,
        groups=batch,
        first_slot=0,
        slots=batch,
        first_answer=0,
        feed_width=batch,
        prompts=batch,
    )
    return Plan(
        parts=(part,),
        episodes=batch,
        group_size=1,
        groups=batch,
        slots=batch,
        feed_width=batch,
        context=talk.row,
        turns=turns,
        actions_per_turn=1,
        reply_tokens=talk.reply,
        decode_chunk=math.gcd(run.settings.rollout.decode_chunk, talk.reply),
        buckets=tuple(sorted({max(length, told) for length in lengths})),
        greedy=True,
    )


def _play(plan: Plan, policy: Policy, weights, tokens, cache: Cache, fed) -> jax.Array:
    """int32[B, T], the rows of one shard; `fed` is int32[K, B, M]."""
    zero = jnp.zeros((), jnp.int32)
    batch, told = fed.shape[1:]
    lengths = jnp.full(batch, told, jnp.int32)
    inputs = Inputs(
        weights=weights,
        prompts=Prompts(
            fed[0],
            lengths,
            group=jnp.arange(batch),
            group_name=jnp.arange(batch),
            number=jnp.arange(batch),
            first_place=zero,
        ),
        prompt_cache=cache,
        tables=(tokens.replies,),
        is_stop=jnp.zeros_like(tokens.is_stop),
        key=keys.iteration_key(zero, zero, zero),
        temperature=jnp.ones(()),
    )

    def tell(state, message: jax.Array):
        nothing = jnp.zeros(batch, jnp.int32)
        answer = Answer(
            slot=jnp.arange(batch),
            is_used=nothing == 0,
            tokens=message,
            length=lengths,
            reward=nothing.astype(jnp.float32),
            is_valid=nothing > 0,
            grounded=nothing.astype(jnp.float32),
            taken=nothing,
            success=nothing > 0,
            end=nothing + UNFINISHED,
        )
        return engine.feed(plan, policy, inputs, state, answer)[0]

    def one_turn(turn, state):
        # Told before it replies; in the first turn the prompt is there already.
        state = jax.lax.cond(turn > 0, lambda s: tell(s, fed[turn]), lambda s: s, state)
        return engine.advance(plan, policy, inputs, state)

    state = engine.start(plan, policy, inputs)
    if plan.turns == 1:
        state = engine.advance(plan, policy, inputs, state)
    else:
        state = jax.lax.fori_loop(0, plan.turns, one_turn, state)
    return state.rows.tokens


def talk_figures(
    run: Run, talker: Talker, talk: Talk, best: Ceilings, repeats: int
) -> dict[str, float]:
    """Prefill and decoding of a Talk of one turn, by themselves and together.

    Prefill: 2 operations a layer's weight and token. Decoding: the weights once a
    token of each shard, and every cache entry that a token looks at.
    """
    (_, batch, told), config = talk.fed.shape, run.config
    cache = talker.prefill()
    prefill = statistics.median(seconds(talker.prefill, repeats))
    decode = statistics.median(seconds(lambda: talker.play(cache), repeats))
    layers, vocabulary = weight_counts(config)
    size = jnp.dtype(run.dtype).itemsize
    seen = batch * sum(told + i for i in range(talk.reply))
    read = talk.reply * talker.shards * (layers + vocabulary)
    moved = size * (read + seen * cache_entry(config))
    operations = 2 * layers * batch * told
    return {
        "prefill, tokens/s": batch * told / prefill,
        "prefill, model FLOP utilization": operations / prefill / best.matmul,
        "decode, tokens/s": talk.replies / decode,
        "decode, ms a token of all": 1000 * decode / talk.reply,
        "decode, GB/s": moved / decode / 1e9,
        "decode, share of reading": moved / decode / best.read,
    }


def race(
    title: str, talk: Talk, runs: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, float]:
    """Reply tokens a second of those who speak one Talk, in turns, the first ours.

    Args:
      title: of the talk. talk: what all speak.
      runs: name -> a whole talk, which returns int[B, T], the rows.
      repeats: timings of each; their median counts.
    """
    rows = {name: np.asarray(run()) for name, run in runs.items()}  # These compile.
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - started)
    (ours, *others), figures = runs, {}
    for name in runs:
        median = statistics.median(taken[name])
        figures[f"{title}, {name}, reply tokens/s"] = talk.replies / median
    is_reply = np.arange(talk.row) % (talk.row // len(talk.fed)) >= talk.fed.shape[2]
    for name in others:
        factor = statistics.median(taken[name]) / statistics.median(taken[ours])
        same = (rows[name] == rows[ours])[:, is_reply].mean()
        figures[f"{title}, times faster than {name}"] = factor
        figures[f"{title}, same reply tokens as {name}"] = float(same)
    return figures


def weight_counts(config: ModelConfig) -> tuple[int, int]:
    """How many weights the layers have, and the vocabulary."""
    layers = parameters.count(parameters.declare(config)["layers"])
    return layers, config.vocabulary * config.width


def cache_entry(config: ModelConfig) -> int:
    """Numbers of keys and values that one token leaves in the cache."""
    return 2 * config.layers * config.kv_heads * config.head_dim
