"""The iteration, and what has to be built before the first one.

`prepare` turns settings into a `Run`: everything static, checked, nothing compiled.
`iterate` is StarPO on one screen: sample episodes, learn from them.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from ragen_jax import envs, evaluation, room, weights
from ragen_jax import mesh as meshes
from ragen_jax.envs.base import TRAIN
from ragen_jax.learning import shaping
from ragen_jax.learning import state as states
from ragen_jax.learning.state import TrainState
from ragen_jax.learning.summary import summarize, summarize_worlds
from ragen_jax.learning.update import Learned, UpdatePlan, make_update
from ragen_jax.models import lora, sources
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.sources import Source
from ragen_jax.rollout import sample
from ragen_jax.rollout.sample import Call, Rollout, Setting
from ragen_jax.rollout.scenes import Scene, SceneTokens, common_opening
from ragen_jax.rollout.slots import Plan
from ragen_jax.settings import Settings, UserError, WorldSettings, check_devices
from ragen_jax.text import chat
from ragen_jax.text.byte_table import highest_id
from ragen_jax.text.chat import ChatPieces
from ragen_jax.text.dialogue import (
    DialogueTokens,
    TurnLimits,
    make_dialogue,
    tokenize_dialogue,
)

# Row lengths that the update is compiled for: so many, or fewer that lie so far apart.
_UPDATE_LENGTHS, _UPDATE_STEP = 3, 128


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything static about a run. Made by `prepare`."""

    settings: Settings
    mesh: Mesh
    config: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    pieces: ChatPieces
    setting: Setting  # with the scenes that training samples
    tokens: SceneTokens  # of those
    plan: Plan
    dtype: Any  # of the transformers' computation
    source: Source  # of the model
    adapters: lora.Adapters | None  # None: all weights are trained

    @property
    def scenes(self) -> tuple[Scene, ...]:
        """The worlds of a training batch."""
        return self.setting.scenes


def prepare(settings: Settings) -> Run:
    """Reads texts and shapes, and checks all that can be checked before compiling.

    Raises:
      UserError: if devices, model, tokenizer, worlds and settings do not fit together.
    """
    sizes = check_devices(settings, jax.device_count())
    mesh = meshes.make_mesh(**sizes)
    source = sources.locate(settings.model.path)
    config = source.read_config()
    tokenizer = source.read_tokenizer()
    # Not how many tokens there are: ids may have gaps.
    if (ids := highest_id(tokenizer) + 1) > config.vocabulary:
        raise UserError(
            f"{source.name}: the tokenizer's ids need a vocabulary of {ids} but the"
            f" model has vocab_size = {config.vocabulary}; take both from one model"
        )
    rollout = settings.rollout
    if settings.reward.hook:
        count = rollout.prompts * rollout.group_size
        shaping.check_hook(settings.reward.hook, count, rollout.turns)
    pieces = chat.cut_pieces(tokenizer, source.name)
    texts = functools.partial(_make_scene, settings, config, pieces, tokenizer)
    section = "env.mix" if settings.env.mix else ""
    made = [texts(world, section) for world in settings.worlds()]
    scenes, tokens = zip(*made, strict=True)
    if settings.env.evaluate:  # Refused now if wrong; made again when due.
        for world in settings.evaluated_worlds():
            texts(world, "env.evaluate")
    dtype = compute_dtype(settings.model.compute_dtype)
    plan = sample.make_plan(
        scenes,
        tokens,
        group_size=rollout.group_size,
        slots=rollout.slots,
        context=rollout.context,
        decode_chunk=rollout.decode_chunk,
        buckets=rollout.buckets,
        shards=meshes.row_shards(mesh),
        stop_at_answer=rollout.stop_at_answer,
        window=rollout.window_turns,
    )
    grounding = settings.reward.grounding > 0
    return Run(
        settings=settings,
        mesh=mesh,
        config=config,
        tokenizer=tokenizer,
        pieces=pieces,
        setting=Setting(config, dtype, scenes, mesh, rollout.layout, grounding),
        tokens=tokens,
        plan=plan,
        dtype=dtype,
        source=source,
        adapters=weights.read_adapters(settings),
    )


def _make_scene(
    settings: Settings,
    config: ModelConfig,
    pieces: ChatPieces,
    tokenizer: PreTrainedTokenizerFast,
    chosen: WorldSettings,
    section: str,
) -> tuple[Scene, DialogueTokens]:
    """A world with its texts and their tokens, checked against the model.

    Args:
      chosen: the world, with its limits.
      section: "env.mix" or "env.evaluate", where its settings stand; "" for `env`.
    """
    world = envs.make(
        chosen.name,
        chosen.options,
        f"{section}.{chosen.label}." if section else "env.",
    )
    limits = TurnLimits(
        chosen.turns,
        chosen.actions_per_turn,
        chosen.actions,
        settings.rollout.reply_tokens,
    )
    dialogue = make_dialogue(world, limits, pieces, thinking=settings.env.thinking)
    tokens = tokenize_dialogue(
        dialogue,
        world,
        pieces,
        tokenizer,
        config.vocabulary,
        with_text=settings.reward.grounding > 0,
    )
    scene = Scene(chosen.label, world, dialogue, chosen.prompts)
    room.check_context(settings, config, scene, tokens)
    if world.read_action is None:
        room.check_reply(settings, tokens)
    return scene, tokens


def evaluated(run: Run) -> tuple[tuple[Scene, DialogueTokens], ...]:
    """The worlds that validation and test play, with their tokens."""
    if not run.settings.env.evaluate:
        return tuple(zip(run.scenes, run.tokens, strict=True))
    return tuple(
        _make_scene(
            run.settings, run.config, run.pieces, run.tokenizer, world, "env.evaluate"
        )
        for world in run.settings.evaluated_worlds()
    )


def compute_dtype(name: str):
    """The dtype that model.compute_dtype means here."""
    if name == "auto":  # On CPU bfloat16 is emulated, and ten times slower.
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


# The iteration -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of an iteration; each compiles at its first call."""

    rollout: Callable[..., Rollout]
    update: Callable[..., tuple[TrainState, Learned]]
    summarize: Callable[..., tuple[dict[str, jax.Array], dict[str, jax.Array]]]
    merge: Callable[[Any, Any], Parameters]  # (trainable, frozen) -> to sample from
    frozen: Parameters  # the base model under adapters; {} where all is trained
    reference: Parameters  # {} without a KL term


def make_programs(run: Run, *, loads: bool = True) -> Programs:
    """Compiles nothing yet.

    Args:
      run: what is static.
      loads: whether to read the frozen weights that the programs are given.
    """
    plan = run.plan
    first = min(tokens.first_capacity for tokens in run.tokens)
    step = max(_UPDATE_STEP, -(-(plan.context - first) // _UPDATE_LENGTHS))
    lengths = {*range(first + step, plan.context, step), plan.context}
    update = UpdatePlan(
        run.settings,
        run.config,
        run.mesh,
        run.dtype,
        tuple(sorted(lengths)),
        prefix=common_opening(run.tokens),
        assemble=weights.assembler(run),
    )
    frozen = weights.load_frozen(run) if loads else {}
    reference: Parameters = {}
    if loads and run.settings.loss.kl > 0:
        reference = frozen or weights.load_parameters(run, value_head=False)
    penalty, worlds = run.settings.reward.format_penalty, len(run.scenes)

    def summaries(rows, episodes):
        by_world = summarize_worlds(episodes, worlds) if worlds > 1 else {}
        return summarize(rows, episodes, penalty), by_world

    return Programs(
        rollout=sample.make_rollout(run.setting, plan),
        update=make_update(update, weights.state_shardings(run)),
        summarize=jax.jit(summaries),
        merge=weights.make_merge(run),
        frozen=frozen,
        reference=reference,
    )


def iterate(
    run: Run, programs: Programs, state: TrainState
) -> tuple[TrainState, dict[str, float], Rollout]:
    """One iteration of StarPO: episodes from the current policy, then learning.

    Args:
      run, programs: what is static.
      state: given up; its memory is reused.

    Returns:
      The next state, the iteration's metrics by the names in metrics.py, and the
      episodes that it learned from.
    """
    started = time.perf_counter()
    call = Call(
        seed=np.uint32(run.settings.seed),
        split=np.int32(TRAIN),
        iteration=state.iteration,
        first_prompt=np.int32(0),
        temperature=np.float32(run.settings.rollout.temperature),
        policy_version=state.updates,
    )
    actor = programs.merge(state.actor, programs.frozen)
    rollout = programs.rollout(actor, run.tokens, call)
    seen, by_world = programs.summarize(rollout.rows, rollout.episodes)
    jax.block_until_ready(seen)
    sampled = time.perf_counter()

    state, learned = programs.update(
        state,
        programs.frozen,
        programs.reference,
        rollout.rows,
        rollout.episodes,
        call.seed,
    )
    jax.block_until_ready(state.updates)
    ended = time.perf_counter()
    metrics = _metrics(run, state, learned, seen, rollout)
    for name, values in jax.device_get(by_world).items():
        for scene, value in zip(run.scenes, values.tolist(), strict=True):
            metrics[f"train/{scene.label}/{name}"] = value
    tokens = float(seen["sampled_tokens"])
    metrics["time/rollout_seconds"] = sampled - started
    metrics["time/update_seconds"] = ended - sampled
    metrics["rollout/tokens_per_second"] = tokens / (sampled - started)
    return state, metrics, rollout


def _metrics(run: Run, state: TrainState, learned: Learned, seen, rollout):
    """Everything but the times, as Python floats."""
    sums = learned.sums
    rate = states.schedule(run.settings, run.settings.optimizer.actor_lr)
    passes = rollout.passes
    slot_passes = run.plan.slots * (passes.decode + passes.feed).sum()
    values = {
        "train/success": seen["success"],
        "train/return": seen["return"],
        "train/return_with_penalty": seen["return_with_penalty"],
        "rollout/entropy": seen["entropy"],
        "rollout/reply_tokens": seen["reply_tokens"],
        "rollout/thought_tokens": seen["thought_tokens"],
        "rollout/valid_reply_rate": seen["valid_reply_rate"],
        "rollout/turns": seen["turns"],
        "rollout/actions": seen["actions"],
        "rollout/episode_tokens": seen["episode_tokens"],
        "rollout/utilization": seen["sampled_tokens"] / slot_passes,
        "filter/reward_std": learned.reward_std,
        "filter/kept_fraction": learned.kept_fraction,
        "update/policy_loss": sums.policy_loss.value(),
        "update/value_loss": sums.value_loss.value(),
        "update/kl": sums.kl.value(),
        "update/entropy": sums.entropy.value(),
        "update/clip_fraction": sums.clip_fraction.value(),
        "update/approx_kl": sums.approx_kl.value(),
        "update/explained_variance": learned.explained_variance,
        "update/logprob_gap": sums.logprob_gap.value(),
        "update/logprob_gap_max": sums.logprob_gap_max,
        "update/actor_grad_norm": learned.actor_grad_norm,
        "update/critic_grad_norm": learned.critic_grad_norm,
        "update/actor_lr": rate(jnp.maximum(state.updates - 1, 0)),
        "update/count": state.updates,
        "update/skipped_nonfinite": state.skipped_bad,
        "update/skipped_empty": state.skipped_empty,
    }
    if run.setting.with_grounding:
        values["rollout/grounded"] = seen["grounded"]
    if run.settings.estimator != "ppo":
        for name in ("value_loss", "explained_variance", "critic_grad_norm"):
            del values[f"update/{name}"]
    return {name: float(value) for name, value in jax.device_get(values).items()}


def make_evaluators(
    run: Run, *, rollouts: int, prompts: int, greedy: bool
) -> dict[str, evaluation.Evaluator]:
    """An evaluator by label of each world that is evaluated, `prompts` levels of each.

    See `evaluation.make_evaluator`.
    """
    make = functools.partial(
        make_evaluator, run, rollouts=rollouts, prompts=prompts, greedy=greedy
    )
    return {scene.label: make(scene, tokens) for scene, tokens in evaluated(run)}


def make_evaluator(
    run: Run,
    scene: Scene,
    tokens: DialogueTokens,
    *,
    rollouts: int,
    prompts: int,
    greedy: bool,
) -> evaluation.Evaluator:
    """An evaluator of one world. See `evaluation.make_evaluator`."""
    rollout = run.settings.rollout
    return evaluation.make_evaluator(
        run.setting,
        scene,
        tokens,
        prompts=prompts,
        rollouts=rollouts,
        slots=run.settings.evaluation.slots,
        shards=meshes.row_shards(run.mesh),
        context=rollout.context if rollout.window_turns else 0,
        decode_chunk=rollout.decode_chunk,
        buckets=rollout.buckets,
        window=rollout.window_turns,
        greedy=greedy,
    )
