"""The iteration, and what has to be built before the first one.

`prepare` turns settings into a `Run`: everything static, checked, nothing compiled.
`iterate` is StarPO on one screen: sample episodes, learn from them.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from ragen_jax import evaluation, weights
from ragen_jax import mesh as meshes
from ragen_jax.envs import SETTINGS, WORLDS
from ragen_jax.envs.base import TRAIN, World, check_world
from ragen_jax.learning import state as states
from ragen_jax.learning.state import TrainState
from ragen_jax.learning.summary import summarize
from ragen_jax.learning.update import Learned, UpdatePlan, make_update
from ragen_jax.models import lora, sources
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.sources import Source
from ragen_jax.rollout import sample
from ragen_jax.rollout.engine import Plan
from ragen_jax.rollout.sample import Call, Rollout, Setting
from ragen_jax.settings import Settings, UserError, check_devices, world_settings
from ragen_jax.text import chat, replies
from ragen_jax.text.byte_table import highest_id
from ragen_jax.text.dialogue import (
    Dialogue,
    DialogueTokens,
    TurnLimits,
    make_dialogue,
    opening_tokens,
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
    world: World
    dialogue: Dialogue
    tokens: DialogueTokens
    setting: Setting
    plan: Plan
    dtype: Any  # of the transformers' computation
    source: Source  # of the model
    adapters: lora.Adapters | None  # None: all weights are trained


def prepare(settings: Settings) -> Run:
    """Reads texts and shapes, and checks all that can be checked before compiling.

    Raises:
      UserError: if devices, model, tokenizer, world and settings do not fit together.
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
    world = make_world(settings)
    rollout = settings.rollout
    limits = TurnLimits(
        rollout.turns, rollout.actions_per_turn, rollout.actions, rollout.reply_tokens
    )
    pieces = chat.cut_pieces(tokenizer, source.name)
    dialogue = make_dialogue(world, limits, pieces, thinking=settings.env.thinking)
    tokens = tokenize_dialogue(dialogue, world, pieces, tokenizer, config.vocabulary)
    _check_context(settings, config, tokens, dialogue)
    _check_reply(settings, tokens)
    dtype = compute_dtype(settings.model.compute_dtype)
    plan = sample.make_plan(
        tokens,
        dialogue,
        prompts=rollout.prompts,
        group_size=rollout.group_size,
        slots=rollout.slots,
        context=rollout.context,
        decode_chunk=rollout.decode_chunk,
        buckets=rollout.buckets,
        shards=meshes.row_shards(mesh),
        stop_at_answer=rollout.stop_at_answer,
    )
    setting = Setting(config, dtype, world, dialogue, mesh, rollout.layout)
    return Run(
        settings=settings,
        mesh=mesh,
        config=config,
        tokenizer=tokenizer,
        world=world,
        dialogue=dialogue,
        tokens=tokens,
        setting=setting,
        plan=plan,
        dtype=dtype,
        source=source,
        adapters=weights.read_adapters(settings),
    )


def make_world(settings: Settings) -> World:
    """The world of `env`, with its own settings read and checked."""
    name = settings.env.name
    if name not in WORLDS:
        raise UserError(f"env.name = {name!r} is unknown; choose one of {list(WORLDS)}")
    chosen = world_settings(settings.env.options, SETTINGS[name])
    try:
        world = WORLDS[name](chosen)
        check_world(world)
    except ValueError as error:
        raise UserError(str(error).replace(f"{name}.", "env.", 1)) from None
    return world


def compute_dtype(name: str):
    """The dtype that model.compute_dtype means here."""
    if name == "auto":  # On CPU bfloat16 is emulated, and ten times slower.
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _check_context(settings: Settings, config: ModelConfig, tokens, dialogue) -> None:
    needed, context = sample.longest_row(tokens, dialogue), settings.rollout.context
    parts = (
        f"a first prompt of up to {tokens.first_capacity} tokens,"
        f" {settings.rollout.turns} replies of {settings.rollout.reply_tokens}"
        f" and later messages of up to {tokens.next_capacity}"
    )
    if 0 < context < needed:
        raise UserError(
            f"rollout.context = {context} is too short: {parts} can need {needed}"
            " tokens; set it to 0, which takes exactly that, or lower rollout.turns or"
            " rollout.reply_tokens"
        )
    if needed > config.longest_context:
        raise UserError(
            f"{parts} can need {needed} tokens, more than the {config.longest_context}"
            " positions that model.path was made for; lower rollout.turns or"
            " rollout.reply_tokens"
        )
    if context > config.longest_context:
        raise UserError(
            f"rollout.context = {context} is more than the {config.longest_context}"
            " positions that model.path was made for; set it to 0 or to fewer"
        )


def _check_reply(settings: Settings, tokens: DialogueTokens) -> None:
    room, fewest = settings.rollout.reply_tokens, replies.fewest_tokens(tokens.replies)
    if room < fewest:
        raise UserError(
            f"rollout.reply_tokens = {room} leaves no room for a valid reply, which"
            f" takes {fewest} tokens of model.path at least; set it to {fewest} or more"
        )


# The iteration -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of an iteration; each compiles at its first call."""

    rollout: Callable[..., Rollout]
    update: Callable[..., tuple[TrainState, Learned]]
    summarize: Callable[..., dict[str, jax.Array]]
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
    first = run.tokens.first_capacity
    step = max(_UPDATE_STEP, -(-(plan.context - first) // _UPDATE_LENGTHS))
    lengths = {*range(first + step, plan.context, step), plan.context}
    update = UpdatePlan(
        run.settings,
        run.config,
        run.mesh,
        run.dtype,
        tuple(sorted(lengths)),
        prefix=opening_tokens(run.tokens),
        assemble=weights.assembler(run),
    )
    frozen = weights.load_frozen(run) if loads else {}
    reference: Parameters = {}
    if loads and run.settings.loss.kl > 0:
        reference = frozen or weights.load_parameters(run, value_head=False)
    penalty = run.settings.reward.format_penalty
    return Programs(
        rollout=sample.make_rollout(run.setting, plan),
        update=make_update(update, weights.state_shardings(run)),
        summarize=jax.jit(lambda rows, episodes: summarize(rows, episodes, penalty)),
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
    seen = programs.summarize(rollout.rows, rollout.episodes)
    jax.block_until_ready(seen)
    sampled = time.perf_counter()

    state, learned = programs.update(
        state, programs.frozen, programs.reference, rollout.rows, rollout.episodes
    )
    jax.block_until_ready(state.updates)
    ended = time.perf_counter()
    metrics = _metrics(run, state, learned, seen, rollout)
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
    if run.settings.estimator != "ppo":
        for name in ("value_loss", "explained_variance", "critic_grad_norm"):
            del values[f"update/{name}"]
    return {name: float(value) for name, value in jax.device_get(values).items()}


def make_evaluator(run: Run, *, rollouts: int, prompts: int, greedy: bool):
    """An evaluator for this run's world. See `evaluation.make_evaluator`."""
    return evaluation.make_evaluator(
        run.setting,
        run.tokens,
        prompts=prompts,
        rollouts=rollouts,
        slots=run.settings.evaluation.slots,
        shards=meshes.row_shards(run.mesh),
        decode_chunk=run.settings.rollout.decode_chunk,
        buckets=run.settings.rollout.buckets,
        greedy=greedy,
    )
