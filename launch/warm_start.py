"""Supervised start: makes the embedded `tiny` model from nothing.

Trains a byte-level BPE tokenizer on the worlds' texts, then a small transformer on
demonstrated episodes of FrozenLake, Sokoban and Bandit, and writes both as a Hugging
Face folder.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny

Any stage can be the first, on a model that is there:

  python launch/warm_start.py --start=my_tiny --first_stage=rooms --out=my_other
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from ragen_jax import envs
from ragen_jax.envs import (
    bandit,
    bandit_demonstrations,
    base,
    demonstrations,
    sokoban_demonstrations,
)
from ragen_jax.learning import supervised
from ragen_jax.models import hugging_face, parameters, slices, sources
from ragen_jax.models.presets import TINY
from ragen_jax.settings import UserError
from ragen_jax.text import chat, dialogue, tiny_tokenizer
from ragen_jax.text.phrases import tokenize_phrases

_CONFIG = common.define_config("configs/warm_start.py")
_OUT = flags.DEFINE_string("out", "runs/tiny", "Folder to write; must not exist.")

_START = flags.DEFINE_string(
    "start", None, "Folder of a model to go on from; default: a new one."
)
STAGES = (
    *("boards", "dialogues", "surer", "last"),
    *("rooms", "worlds", "worlds_surer", "worlds_last"),
    *("arms", "arms_last"),
)
_FIRST = flags.DEFINE_enum("first_stage", STAGES[0], STAGES, "Where to begin.")
_LAST = flags.DEFINE_enum("last_stage", STAGES[-1], STAGES, "Where to end.")

_STOP = tiny_tokenizer.END
_DEMONSTRATIONS = {
    "frozen_lake": demonstrations,
    "sokoban": sokoban_demonstrations,
    "bandit": bandit_demonstrations,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of dialogue, and how often a step draws it beside others."""

    weight: int
    world: str
    changes: dict[str, Any]  # of the world's settings in the config
    thinking: bool = True


_LAKES = (
    Kind(4, "frozen_lake", {}),
    Kind(1, "frozen_lake", {}, thinking=False),
    Kind(1, "frozen_lake", {"success_probability": 1.0}),
    Kind(1, "frozen_lake", {"observation": "coordinates"}),
    Kind(1, "frozen_lake", {"observation": "both"}),
)
_BARE_ROOMS = Kind(1, "sokoban", {}, thinking=False)
_ARMS = (Kind(6, "bandit", {}), Kind(1, "bandit", {}, thinking=False))
# What a stage's `kinds` means. The last stages keep the lakes, so as not to forget.
KINDS = {
    "lake": _LAKES[:1],
    "lakes": _LAKES,
    "rooms": (Kind(3, "sokoban", {}), Kind(1, "frozen_lake", {})),
    "lakes_and_rooms": (*_LAKES, Kind(7, "sokoban", {}), _BARE_ROOMS),
    "mostly_rooms": (*_LAKES, Kind(17, "sokoban", {}), _BARE_ROOMS),
    "arms": (*_ARMS, Kind(1, "sokoban", {}), Kind(1, "frozen_lake", {})),
    "all": (*_LAKES, Kind(8, "sokoban", {}), _BARE_ROOMS, *_ARMS),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kind of demonstrated dialogue."""

    weight: int
    world: base.World
    limits: dialogue.TurnLimits
    thinking: bool
    context: int  # tokens that hold it
    short_context: int  # the same without the system prompt
    rows: int  # in place of one row of a stage


def main() -> None:
    config = _CONFIG.value
    out = Path(_OUT.value)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty; give a new folder")
    first, last = STAGES.index(_FIRST.value), STAGES.index(_LAST.value)
    if (first > 0) != bool(_START.value):
        raise UserError(
            f"--first_stage={_FIRST.value} and --start={_START.value} do not go"
            f" together: {STAGES[0]} begins a new model, later stages need --start"
        )
    if first > last:
        raise UserError(
            f"--first_stage={_FIRST.value} comes after --last_stage={_LAST.value}: the"
            f" order is {', '.join(STAGES)}"
        )
    tokenizer, weights = _begin(config)
    pieces = chat.cut_pieces(tokenizer, "tiny")
    count = parameters.count(weights)
    print(f"tokenizer: {len(tokenizer)} tokens; model: {count:,} parameters")
    for name in STAGES[first : last + 1]:
        weights = train_stage(weights, name, config, pieces, tokenizer)
    hugging_face.write_folder(out, TINY, jax.device_get(weights), tokenizer)
    print(f"wrote {out}; next: python launch/evaluate.py --model={out}")


def _begin(config):
    """A tokenizer and weights: new ones, or those of --start."""
    if _START.value:
        source = sources.locate(_START.value)
        if source.read_config() != TINY:
            raise UserError(
                f"--start={_START.value} is a model of another shape: choose one that"
                " this script wrote"
            )
        declared = parameters.declare(TINY)
        weights = slices.read_tree(source.open_parameters(TINY, declared), declared)
        tokenizer = source.read_tokenizer()
        tiny_tokenizer.add_words(tokenizer, bandit.NAMES)
        return tokenizer, jax.device_put(weights)
    # Of the lakes alone: the words of the other worlds are in tiny_tokenizer.py.
    aimless = config["last"].aimless
    variants = [_variant(config, kind, aimless=aimless) for kind in _LAKES]
    texts = _corpus(variants, variants[0].limits)
    tokenizer = tiny_tokenizer.train_tokenizer(texts, bandit.NAMES)
    return tokenizer, parameters.initialize(
        jax.random.key(config.seed), parameters.declare(TINY)
    )


def train_stage(weights, name: str, config, pieces, tokenizer):
    """One of STAGES: an optimizer of its own, on demonstrations as the stage says."""
    stage = config[name]
    if stage.new_words:
        weights = _redraw_words(weights, tokenizer, config.seed)
    kinds = KINDS[stage.kinds]
    variants = [_variant(config, kind, aimless=stage.aimless) for kind in kinds]
    batches = [_batches(pieces, tokenizer, variant, stage) for variant in variants]
    return _train(weights, batches, [k.weight for k in kinds], stage, config, name)


def _redraw_words(weights, tokenizer, seed: int):
    """New embeddings, as long as the others, for the words that are one token each.

    A token that no stage has met is pushed away from every reply, like all the others
    of its kind, until they point the same way: at the cosine of 0.99 that was measured,
    two names are one to the model, and it cannot learn to copy them.
    """
    words = [k for k, t in tokenizer.added_tokens_decoder.items() if not t.special]
    table = weights["embedding"]
    length = jnp.linalg.norm(table, axis=1).mean()
    drawn = jax.random.normal(jax.random.key(seed), (len(words), table.shape[1]))
    drawn *= length / jnp.linalg.norm(drawn, axis=1, keepdims=True)
    return {**weights, "embedding": table.at[jnp.array(words)].set(drawn)}


def _variant(config, kind: Kind, **player_changes: float) -> Variant:
    module, section = _DEMONSTRATIONS[kind.world], config[kind.world]
    settings_type, make = envs.lookup(kind.world)
    settings = settings_type(**{**section.env.to_dict(), **kind.changes})
    told = section.demonstrator.to_dict()
    told |= {k: v for k, v in player_changes.items() if k in told}
    world = module.with_demonstrations(
        make(settings), settings, module.Demonstrator(**told), thinking=kind.thinking
    )
    limits = dialogue.TurnLimits(**section.limits)
    context = section.context, section.short_context
    rows = section.get("rows_for_one", 1)
    return Variant(kind.weight, world, limits, kind.thinking, *context, rows)


def _corpus(variants: list[Variant], limits: dialogue.TurnLimits) -> list[str]:
    """Texts for the tokenizer, in the proportions in which they will be read."""
    texts = []
    for variant in variants:
        world, thinking = variant.world, variant.thinking
        keys = jax.random.split(jax.random.key(1), 200)
        states = jax.vmap(lambda k, world=world: world.reset(k, base.TRAIN))(keys)
        seen = np.asarray(jax.vmap(world.observe)(states))
        said = np.asarray(jax.vmap(world.demonstrate)(keys, states))
        for see, say in zip(seen, said, strict=True):
            texts.append(base.text_of(world.phrases, see))
            texts.append(base.text_of(world.reply_phrases, say))
        texts += [dialogue.system_prompt(world, limits, thinking)] * 40
    for turn in range(1, limits.turns + 1):
        for left in range(limits.actions + 1):
            texts.append(f"Turn {turn} of {limits.turns}. Actions left: {left}.")
    texts += [f"Reward: {tenth / 10:.1f}\n" for tenth in range(-30, 130)]
    texts += [
        "Reward: 0.0\n",
        "Reward: 1.0\n",
        "system\n",
        "user\n",
        "assistant\n",
    ] * 50
    texts += ["Your last reply had no valid answer or an unknown action.\n"] * 20
    return texts


def _batches(pieces, tokenizer, variant: Variant, stage) -> tuple[Callable, jax.Array]:
    """A function from a key to demonstrated rows; int32[S], how all rows begin."""
    texts = dialogue.make_dialogue(
        variant.world, variant.limits, pieces, thinking=variant.thinking
    )
    if stage.short:  # No system prompt: only the pieces around the first observation.
        opening = (pieces.after_reply, *texts.phrases[1:])
        texts = dataclasses.replace(texts, phrases=opening)
    tokens = dialogue.tokenize_dialogue(
        texts, variant.world, pieces, tokenizer, TINY.vocabulary
    )
    reply_table = tokenize_phrases(tokenizer, variant.world.reply_phrases)
    stop = tokenizer.convert_tokens_to_ids(_STOP)
    held = variant.short_context if stage.short else variant.context
    context = min(stage.context, held)

    def batch(key):
        return jax.vmap(
            lambda key: supervised.demonstrate_episode(
                key, variant.world, texts, tokens, reply_table, stop, context
            )
        )(jax.random.split(key, stage.rows * variant.rows))

    return batch, jnp.array(dialogue.opening_tokens(tokens))


def _train(weights, batches: list, shares: list, stage, config, name: str):
    """Adam on the imitation loss; each step draws one of `batches` by its share."""
    settings = config.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        stage.lr,
        min(settings.warmup, stage.steps // 2),
        stage.steps,
        stage.lr / 20,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(schedule, b2=settings.beta2, weight_decay=settings.weight_decay),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, state, tokens, is_reply, prefix):
        loss, gradient = jax.value_and_grad(supervised.imitation_loss)(
            weights, tokens, is_reply, TINY, prefix
        )
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, loss

    draw = [jax.jit(batch) for batch, _ in batches]
    state, started = optimizer.init(weights), time.time()
    choice = np.random.default_rng(config.seed)
    share = np.array(shares) / sum(shares)
    losses, successes = [], []
    for step in range(1, stage.steps + 1):
        which = choice.choice(len(draw), p=share)
        key = jax.random.fold_in(jax.random.key(config.seed + stage.draws), step)
        tokens, is_reply, success = draw[which](key)
        weights, state, loss = update(
            weights, state, tokens, is_reply, batches[which][1]
        )
        losses.append(loss)
        successes.append(success)
        if step % config.log_every == 0 or step == stage.steps:
            left = (time.time() - started) / step * (stage.steps - step)
            print(
                f"{name} {step:5d}/{stage.steps}  loss {jnp.stack(losses).mean():.4f}"
                f"  demonstrator's success {jnp.concatenate(successes).mean():.3f}"
                f"  {left:5.0f} s left",
                flush=True,
            )
            losses, successes = [], []
    return weights


if __name__ == "__main__":
    common.run(main)
