"""Supervised start: makes the embedded `tiny` model from nothing.

Trains a byte-level BPE tokenizer on the worlds' texts, then a small transformer on
demonstrated episodes, and writes both as a Hugging Face folder.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from ragen_jax.envs import base, demonstrations, frozen_lake
from ragen_jax.learning import supervised
from ragen_jax.models import hugging_face, parameters
from ragen_jax.models.presets import TINY
from ragen_jax.settings import UserError
from ragen_jax.text import chat, dialogue, tiny_tokenizer
from ragen_jax.text.phrases import tokenize_phrases

_CONFIG = common.define_config("configs/warm_start.py")
_OUT = flags.DEFINE_string("out", "runs/tiny", "Folder to write; must not exist.")

STAGES = ("boards", "dialogues", "surer", "last")

# Settings of the lake and of the reply, and how often a step draws them, in eighths.
_VARIANTS = (
    (4, {}, True),
    (1, {}, False),
    (1, {"success_probability": 1.0}, True),
    (1, {"observation": "coordinates"}, True),
    (1, {"observation": "both"}, True),
)
_STOP = tiny_tokenizer.END


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kind of demonstrated dialogue."""

    weight: int
    world: base.World
    thinking: bool


def main() -> None:
    config = _CONFIG.value
    out = Path(_OUT.value)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty; give a new folder")
    limits = dialogue.TurnLimits(**config.limits)
    aimless = config[STAGES[-1]].aimless
    variants = [_variant(config, *v, aimless=aimless) for v in _VARIANTS]
    tokenizer = tiny_tokenizer.train_tokenizer(_corpus(variants, limits))
    pieces = chat.cut_pieces(tokenizer, "tiny")
    print(f"tokenizer: {len(tokenizer)} tokens; model: ", end="")
    weights = parameters.initialize(
        jax.random.key(config.seed), parameters.declare(TINY)
    )
    print(f"{parameters.count(weights):,} parameters", flush=True)
    for name in STAGES:
        weights = train_stage(weights, name, config, limits, pieces, tokenizer)
    hugging_face.write_folder(out, TINY, jax.device_get(weights), tokenizer)
    print(f"wrote {out}; next: python launch/evaluate.py --model={out}")


def train_stage(weights, name: str, config, limits, pieces, tokenizer):
    """One of STAGES: an optimizer of its own, on demonstrations as the stage says."""
    stage = config[name]
    kinds = [_variant(config, *v, aimless=stage.aimless) for v in _VARIANTS]
    if stage.short:
        kinds = kinds[:1]
    batches = [
        _batches(
            limits,
            pieces,
            tokenizer,
            kind,
            stage.rows,
            stage.context,
            short=stage.short,
        )
        for kind in kinds
    ]
    return _train(weights, batches, [v.weight for v in kinds], stage, config, name)


def _variant(
    config, weight: int, changes: dict, thinking: bool, **player_changes: float
) -> Variant:
    settings = frozen_lake.FrozenLake(**{**config.env.to_dict(), **changes})
    told = {**config.demonstrator.to_dict(), **player_changes}
    player = demonstrations.Demonstrator(**told)
    world = demonstrations.with_demonstrations(
        frozen_lake.world(settings), settings, player, thinking=thinking
    )
    return Variant(weight, world, thinking)


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


def _batches(
    limits, pieces, tokenizer, variant: Variant, rows: int, context: int, *, short: bool
) -> tuple[Callable, jax.Array]:
    """A function from a key to demonstrated rows; int32[S], how all rows begin."""
    texts = dialogue.make_dialogue(
        variant.world, limits, pieces, thinking=variant.thinking
    )
    if short:  # No system prompt: only the pieces around the first observation.
        opening = (pieces.after_reply, *texts.phrases[1:])
        texts = dataclasses.replace(texts, phrases=opening)
    tokens = dialogue.tokenize_dialogue(
        texts, variant.world, pieces, tokenizer, TINY.vocabulary
    )
    reply_table = tokenize_phrases(tokenizer, variant.world.reply_phrases)
    stop = tokenizer.convert_tokens_to_ids(_STOP)

    def batch(key):
        return jax.vmap(
            lambda key: supervised.demonstrate_episode(
                key, variant.world, texts, tokens, reply_table, stop, context
            )
        )(jax.random.split(key, rows))

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
