"""Measures prefill and decoding of the sampler on conversations of fixed lengths.

They go through the same engine as a rollout, but with given observations, and with
greedy replies that never end early. So prefill and decoding can be timed separately,
and other libraries can be given the same work (other_samplers.py).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.benchmarks.device import DeviceLimits, seconds
from ragen_jax.models import parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import hugging_face
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.presets import EMBEDDED
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import cache_attention, engine, prng
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.kv_cache import Cache, ShardedModel
from ragen_jax.rollout.types import (
    EngineInputs,
    EnvFeedback,
    EnvShard,
    Prompts,
    RolloutPlan,
)
from ragen_jax.text.prompts import DialogueTokens
from ragen_jax.training.model import Model
from ragen_jax.trajectory import UNFINISHED


def write_random_model(folder: Path, config: ModelConfig, dtype) -> None:
    """Writes a model of random weights, with the tokenizer of the embedded model."""
    declared = parameters.declare(config)
    make = jax.jit(lambda key: parameters.initialize(key, declared))
    tokenizer = hugging_face.read_tokenizer(EMBEDDED["tiny"])
    weights = jax.device_get(make(jax.random.key(0)))
    hugging_face.write_folder(folder, config, weights, tokenizer, dtype)


# Conversations of fixed lengths ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Conversation:
    """B conversations of K turns; each turn is M given tokens, then a reply."""

    fed: np.ndarray  # int32[K, B, M], the given tokens: prompts, then observations
    reply: int  # tokens of each reply

    @property
    def replies(self) -> int:
        """The number of tokens that are sampled, in all conversations together."""
        turns, batch, _ = self.fed.shape
        return turns * batch * self.reply

    @property
    def row(self) -> int:
        """T, the tokens of a whole conversation."""
        turns, _, given = self.fed.shape
        return turns * (given + self.reply)


def random_conversation(
    vocabulary: int, batch: int, turns: int, given: int, reply: int
) -> Conversation:
    """B conversations of random tokens, the same at every call.

    Args:
      vocabulary: V.
      batch: B.
      turns: K.
      given: M, tokens that each turn is given.
      reply: tokens of each reply.
    """
    rng = np.random.default_rng(0)
    fed = rng.integers(0, vocabulary, (turns, batch, given), np.int32)
    return Conversation(fed, reply)


@dataclasses.dataclass(frozen=True)
class ConversationRunner:
    """The jitted parts of one conversation."""

    prefill: Callable[[], Cache]  # prefills the prompts
    play: Callable[[Cache], jax.Array]  # does all the rest; int32[B, T], the tokens
    shards: int  # over which the batch is split

    def converse(self) -> jax.Array:
        """int32[B, T], the tokens of the whole conversations."""
        return self.play(self.prefill())


def make_runner(
    model: Model,
    tokens: DialogueTokens,
    weights: Parameters,
    conversation: Conversation,
) -> ConversationRunner:
    """Sets the engine up for a conversation; compiles nothing yet.

    Args:
      model: with the mesh. The batch is split over it if that divides evenly; else one
        device does all.
      tokens: of any environment; the engine takes their tables, but needs none here.
      weights: from `decoding_weights`.
      conversation: the given tokens and the length of replies.
    """
    turns, batch, given = conversation.fed.shape
    mesh = model.mesh if batch % meshes.row_shards(model.mesh) == 0 else _one_device()
    shards = meshes.row_shards(mesh)
    plan = _plan(model, conversation, batch // shards)
    attention = backend_choices.decode_attention(
        model.settings.rollout.decode_attention, model.dtype, model.config.head_dim
    )
    sharded_model = ShardedModel(
        model.config,
        model.dtype,
        attention=cache_attention.by_name(attention, model.config),
        row_attention=model.settings.model.attention,
    )
    whole, rows = PartitionSpec(), meshes.ROWS

    def shared(function, in_specs):
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False
            )
        )

    prefill = shared(
        lambda weights, prompts: kv.prefill_prompts(weights, sharded_model, prompts),
        (whole, rows),
    )
    play = shared(
        lambda weights, tokens, cache, fed: _play(
            plan, sharded_model, weights, tokens, cache, fed
        ),
        (whole, whole, rows, PartitionSpec(None, *rows)),
    )
    placed = NamedSharding(mesh, whole)
    weights, tokens = jax.device_put((weights, tokens), placed)
    prompts = jax.device_put(conversation.fed[0], NamedSharding(mesh, rows))
    fed = jax.device_put(
        conversation.fed, NamedSharding(mesh, PartitionSpec(None, *rows))
    )
    return ConversationRunner(
        prefill=lambda: prefill(weights, prompts),
        play=lambda cache: play(weights, tokens, cache, fed),
        shards=shards,
    )


def decoding_weights(model: Model, actor: Parameters) -> Parameters:
    """The actor's weights in the layout for decoding, replicated on every device."""
    whole = NamedSharding(model.mesh, PartitionSpec())
    to_decode_layout = jax.jit(
        lambda tree: kv.to_decode_layout(tree, model.dtype), out_shardings=whole
    )
    return to_decode_layout(actor)


def _one_device() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), meshes.AXES)


def _plan(model: Model, conversation: Conversation, batch: int) -> RolloutPlan:
    """A rollout in which each of `batch` slots plays one episode: a conversation."""
    turns, _, given = conversation.fed.shape
    chosen = backend_choices.choices()
    buckets = model.settings.rollout.buckets or chosen.buckets
    chunk = model.settings.rollout.decode_chunk or chosen.decode_chunk
    lengths = {-(-conversation.row * (i + 1) // buckets) for i in range(buckets)}
    part = EnvShard(
        first_episode=0,
        episodes=batch,
        first_group=0,
        groups=batch,
        first_slot=0,
        slots=batch,
        first_feedback=0,
        extend_width=batch,
        prompts=batch,
    )
    return RolloutPlan(
        env_shards=(part,),
        episodes=batch,
        group_size=1,
        slots=batch,
        extend_width=batch,
        context=conversation.row,
        turns=turns,
        actions_per_turn=1,
        reply_tokens=conversation.reply,
        decode_chunk=math.gcd(chunk, conversation.reply),
        buckets=tuple(sorted({max(length, given) for length in lengths})),
        greedy=True,
    )


def _play(
    plan: RolloutPlan, model: ShardedModel, weights, tokens, cache: Cache, fed
) -> jax.Array:
    """int32[B, T], the tokens of one shard's conversations; `fed` is int32[K, B, M].

    Of the engine's inputs only weights, prompts and cache matter: no token stops a
    reply, sampling is greedy, and the feedback of environments is empty.
    """
    zero = jnp.zeros((), jnp.int32)
    batch, given = fed.shape[1:]
    lengths = jnp.full(batch, given, jnp.int32)
    inputs = EngineInputs(
        weights=weights,
        prompts=Prompts(
            fed[0],
            lengths,
            group=jnp.arange(batch),
            group_in_batch=jnp.arange(batch),
            episode_in_batch=jnp.arange(batch),
            first_index=zero,
        ),
        prompt_cache=cache,
        tables=(tokens.replies,),
        stops=jnp.zeros_like(tokens.stops),
        key=prng.iteration_key(zero, zero, zero),
        temperature=jnp.ones(()),
    )

    def give(state, message: jax.Array):
        """Feeds int32[B, M] to all slots, as if their environments had stepped."""
        nothing = jnp.zeros(batch, jnp.int32)
        answer = EnvFeedback(
            slot=jnp.arange(batch),
            is_used=nothing == 0,
            tokens=message,
            length=lengths,
            reward=nothing.astype(jnp.float32),
            is_valid=nothing > 0,
            grounded=nothing.astype(jnp.float32),
            actions=nothing,
            success=nothing > 0,
            end=nothing + UNFINISHED,
        )
        return engine.give_feedback(plan, model, inputs, state, answer)[0]

    def one_turn(turn, state):
        # The prompt of the first turn is in the cache already.
        state = jax.lax.cond(turn > 0, lambda s: give(s, fed[turn]), lambda s: s, state)
        return engine.advance(plan, model, inputs, state)

    state = engine.start(plan, model, inputs)
    if plan.turns == 1:
        state = engine.advance(plan, model, inputs, state)
    else:
        state = jax.lax.fori_loop(0, plan.turns, one_turn, state)
    return state.rows.tokens


def conversation_figures(
    model: Model,
    runner: ConversationRunner,
    conversation: Conversation,
    best: DeviceLimits,
    repeats: int,
) -> dict[str, float]:
    """The speed of prefill and of decoding in a conversation of one turn.

    Prefill counts 2 FLOP per weight of the layers and token. Decoding counts the bytes
    of all weights, once per token of a reply and shard, and of every cache entry that a
    token attends to.

    Args:
      model: for its shape and dtype.
      runner: of the conversation.
      conversation: of one turn.
      best: the device's peak rates, of which shares are given.
      repeats: timings, whose median counts.
    """
    (_, batch, given), config = conversation.fed.shape, model.config
    cache = runner.prefill()
    prefill = statistics.median(seconds(runner.prefill, repeats))
    decode = statistics.median(seconds(lambda: runner.play(cache), repeats))
    layers, vocabulary = weight_counts(config)
    size = jnp.dtype(model.dtype).itemsize
    attended = batch * sum(given + i for i in range(conversation.reply))
    weights = conversation.reply * runner.shards * (layers + vocabulary)
    moved = size * (weights + attended * cache_entry(config))
    operations = 2 * layers * batch * given
    return {
        "prefill, tokens/s": batch * given / prefill,
        "prefill, model FLOP utilization": operations / prefill / best.matmul,
        "decode, tokens/s": conversation.replies / decode,
        "decode, ms a token of all": 1000 * decode / conversation.reply,
        "decode, GB/s": moved / decode / 1e9,
        "decode, share of reading": moved / decode / best.read,
    }


def compare(
    title: str,
    conversation: Conversation,
    runs: dict[str, Callable[[], Any]],
    repeats: int,
) -> dict[str, float]:
    """Reply tokens/s of several samplers with one conversation, timed alternately.

    Args:
      title: of the conversation.
      conversation: the same for all.
      runs: by name, ours first, a function that runs it all and returns its tokens,
        int[B, T].
      repeats: timings of each, whose median counts.
    """
    rows = {name: np.asarray(run()) for name, run in runs.items()}  # These compile.
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - started)
    ours, *others = runs
    figures: dict[str, float] = {}
    for name in runs:
        median = statistics.median(taken[name])
        figures[f"{title}, {name}, reply tokens/s"] = conversation.replies / median
    turns, _, given = conversation.fed.shape
    position_in_turn = np.arange(conversation.row) % (conversation.row // turns)
    is_reply = position_in_turn >= given  # bool[T]
    for name in others:
        factor = statistics.median(taken[name]) / statistics.median(taken[ours])
        same = (rows[name] == rows[ours])[:, is_reply].mean()
        figures[f"{title}, times faster than {name}"] = factor
        figures[f"{title}, same reply tokens as {name}"] = float(same)
    return figures


def weight_counts(config: ModelConfig) -> tuple[int, int]:
    """The numbers of weights of the layers and of the head (or tied embedding)."""
    layers = parameters.count(parameters.declare(config)["layers"])
    return layers, config.vocabulary * config.width


def decoding_bytes(config: ModelConfig, dtype, kind: str = "same") -> int:
    """Bytes of the weights that a decode pass reads: layers and head.

    Args:
      config: the model's shape.
      dtype: of the computation.
      kind: as `rollout.decode_weights`.
    """
    declared = parameters.declare(config)

    def lay_out(key):
        weights = kv.to_decode_layout(parameters.initialize(key, declared), dtype)
        if kind != "same":
            weights = kv.in_eight_bits(weights, kind)
        return weights["layers"], weights.get("head", weights["embedding"])

    arrays = jax.tree.leaves(jax.eval_shape(lay_out, jax.random.key(0)))
    return sum(array.size * array.dtype.itemsize for array in arrays)


def cache_entry(config: ModelConfig) -> int:
    """Elements of the KV cache for one token: keys and values of all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim
