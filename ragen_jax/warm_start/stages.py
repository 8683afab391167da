"""Training on demonstrations, stage after stage. Called by launch/warm_start.py.

The config has a section for each stage: configs/warm_start.py explains the keys (at
`_stage`), docs/tiny_model.md the stages.
"""

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ragen_jax.errors import UserError
from ragen_jax.learning import supervised
from ragen_jax.models import parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import partial_reads, sources
from ragen_jax.models.presets import EMBEDDED, SHAPES
from ragen_jax.text import tiny_tokenizer
from ragen_jax.text.token_bytes import highest_id
from ragen_jax.warm_start import batches, drawings, growth, reading, relabel, walls
from ragen_jax.warm_start.recipe import (
    KINDS,
    LAKES,
    LAST_LAYERS,
    MARKS,
    SYMBOLS,
    UNMET,
    WORDS,
    corpus,
    make_variant,
    words_corpus,
)

_STOP = tiny_tokenizer.END


def check_environments(config, names: Sequence[str]) -> None:
    """Makes the environments of stages, which check their settings when made."""
    for stage_kinds in sorted({config[name].kinds for name in names}):
        for kind in KINDS[stage_kinds]:
            make_variant(config, kind)


def begin(config, start: str | None):
    """(tokenizer, weights) to train: new ones, or those of --start, grown if needed.

    Raises:
      UserError: if there is no such folder, the model is of another shape, its
        tokenizer is of another kind, or its weights are not finite.
    """
    shape = SHAPES[config.model]
    if start:
        if start not in EMBEDDED and not Path(start).expanduser().is_dir():
            raise UserError(
                f"--start={start}: there is no such folder; give one that this script"
                f" wrote, or {' or '.join(map(repr, EMBEDDED))}"
            )
        source = sources.locate(start)
        start_shape = source.read_config()
        if not growth.can_grow(start_shape, shape, LAST_LAYERS[config.model]):
            raise UserError(
                f"--start={start} is a model of another shape: choose one that"
                " this script wrote"
            )
        tokenizer = source.read_tokenizer()
        has_end = _STOP in tokenizer.get_vocab()
        tiny_tokenizer.add_words(tokenizer, WORDS[config.model])
        if not has_end or highest_id(tokenizer) >= shape.vocabulary:
            raise UserError(
                f"--start={start} has a tokenizer of another kind: choose one that this"
                " script wrote"
            )
        if symbols := SYMBOLS[config.model]:
            longer = tiny_tokenizer.with_cells(tokenizer, symbols)
            if (tokens := highest_id(longer) + 1) > shape.vocabulary:
                raise UserError(
                    f"--start={start} has too many tokens: with the symbols of"
                    f" {config.model} they are {tokens}, and its embedding has room for"
                    f" {shape.vocabulary}: choose one made with the limits of"
                    " configs/warm_start.py"
                )
        declared = parameters.declare(start_shape)
        reader = source.open_parameters(start_shape, declared)
        reader = partial_reads.finite_reader(reader, source.name)
        weights = partial_reads.read_tree(reader, declared)
        return _grown(tokenizer, weights, start_shape, config)
    tokenizer = tiny_tokenizer.train_tokenizer(
        _texts(config), WORDS[config.model], MARKS[config.model], shape.vocabulary
    )
    weights = parameters.initialize(
        jax.random.key(config.seed), parameters.declare(shape)
    )
    if config.model == "tiny_words":
        weights = _take_over("tiny", weights, tokenizer)
    return tokenizer, weights


def _grown(tokenizer, weights, start_shape: ModelConfig, config):
    """A trained model with the layers and symbols added that it still lacks."""
    shape, last = SHAPES[config.model], LAST_LAYERS[config.model]
    if start_shape.layers < shape.layers:
        weights = growth.deepen(weights, start_shape, shape, last)
    if symbols := SYMBOLS[config.model]:
        old, tokenizer = tokenizer, tiny_tokenizer.with_cells(tokenizer, symbols)
        weights = growth.add_tokens(
            weights, old.get_vocab(), tokenizer.get_vocab(), jax.random.key(config.seed)
        )
    # A model that has the new first layers already met these tokens when it got them.
    if UNMET[config.model] and start_shape.layers < shape.layers - last:
        ids = [tokenizer(text)["input_ids"][0] for text in UNMET[config.model]]
        weights = growth.draw_embeddings(
            weights, jnp.array(ids), jax.random.key(config.seed)
        )
    return tokenizer, jax.device_put(weights)


def _take_over(model: str, weights, tokenizer):
    """`weights` with an embedded model's layers and embeddings of shared words.

    That model can copy earlier tokens, which takes a new one long to learn. The
    embeddings of new words are scaled to the mean norm of the others.
    """
    source = sources.locate(model)
    shape = source.read_config()
    declared = parameters.declare(shape)
    their_weights = partial_reads.read_tree(
        source.open_parameters(shape, declared), declared
    )
    ours, theirs = tokenizer.get_vocab(), source.read_tokenizer().get_vocab()
    shared = [word for word in theirs if word in ours]
    table, their_table = weights["embedding"], jnp.asarray(their_weights["embedding"])
    their_norm = jnp.linalg.norm(their_table, axis=1).mean()
    scale = their_norm / jnp.linalg.norm(table, axis=1).mean()
    table = (table * scale).at[jnp.array([ours[word] for word in shared])]
    table = table.set(their_table[jnp.array([theirs[word] for word in shared])])
    return jax.device_put({**their_weights, "embedding": table})


def _texts(config) -> list[str]:
    """The texts that the tokenizer is trained on."""
    if config.model == "tiny_words":
        kinds = KINDS["search_and_shop"]
        return words_corpus([make_variant(config, kind) for kind in kinds])
    # Lakes alone: the words of the other environments are in tiny_tokenizer.py.
    random_plan = config["lake_mixed"].random_plan
    variants = [make_variant(config, kind, random_plan=random_plan) for kind in LAKES]
    return corpus(variants, variants[0].limits)


def train_stage(weights, name: str, config, pieces, tokenizer):
    """Trains one of STAGES, with a new optimizer, and returns the weights.

    Raises:
      UserError: if the loss or the weights are no longer finite.
    """
    stage, shape = config[name], SHAPES[config.model]
    if stage.new_words:
        added = tokenizer.added_tokens_decoder.items()
        words = jnp.array([k for k, token in added if not token.special])
        weights = growth.draw_embeddings(weights, words, jax.random.key(config.seed))
    kinds = KINDS[stage.kinds]
    of_demonstrators = ("random_plan", "midway", "misread")
    changes = {key: stage[key] for key in of_demonstrators}
    if stage.noise is not None:
        changes["noise"] = stage.noise
    variants = [make_variant(config, kind, **changes) for kind in kinds]
    draws = [
        jax.jit(batches.make(pieces, tokenizer, variant, stage, shape.vocabulary))
        for variant in variants
    ]
    shares = [kind.weight for kind in kinds]
    if stage.read_layers:
        first, others = reading.split(weights, stage.read_layers)
        loss = functools.partial(reading.loss, others=others, config=shape)
        first = _train(first, draws, shares, loss, stage, config, name)
        return reading.join(first, others)

    weigh = _token_weights(stage, tokenizer)
    if stage.walls_weight or stage.relabel:
        words = drawings.find_words(tokenizer, shape.vocabulary)
        draws, shares = _changed_draws(draws, shares, words, stage)

        def read_and_imitate(learned, batch):
            auxiliary_weights = stage.walls_weight, stage.regret_weight
            loss, share_right = walls.loss(
                learned, batch, shape, words, weigh(batch), *auxiliary_weights
            )
            return loss, share_right if stage.walls_weight else batch.success.mean()

        learned = weights, walls.begin_heads(shape)
        learned = _train(learned, draws, shares, read_and_imitate, stage, config, name)
        return learned[0]

    def imitate(weights, batch):
        loss = supervised.imitation_loss(
            weights,
            batch.tokens,
            batch.is_reply,
            shape,
            batch.opening,
            weight=weigh(batch),
        )
        return loss, batch.success.mean()

    return _train(weights, draws, shares, imitate, stage, config, name)


def _token_weights(stage, tokenizer):
    """A function from a batch to its tokens' weights in imitation; None: all equal."""
    if stage.places_weight == 1:
        return lambda batch: None
    (colon,) = tokenizer(":")["input_ids"]
    return lambda batch: batches.token_weights(
        batch.tokens, batch.is_reply, colon, stage.places_weight
    )


def _changed_draws(draws: list, shares: list, words, stage) -> tuple[list, list]:
    """(draws, shares) with what a stage changes in its rows.

    Batches are relabelled if `relabel` is set. With `random_places` = p, a share p of
    them names places at random instead.
    """

    def each(change):
        # Compiled once for all kinds of rows.
        compiled = jax.jit(lambda key, batch: change(key, batch, words))
        return [functools.partial(_draw_changed, draw, compiled) for draw in draws]

    def best(key, batch, words):
        replies = stage.turns or drawings.REPLIES
        return relabel.with_best_actions(key, batch, words, replies)

    walked = each(best) if stage.relabel else draws
    if not (share := stage.random_places):
        return walked, shares
    of_walked = [(1 - share) * weight for weight in shares]
    of_named = [share * weight for weight in shares]
    return walked + each(walls.with_random_places), of_walked + of_named


def _draw_changed(draw, change, key):
    draw_key, key = jax.random.split(key)
    return change(key, draw(draw_key))


def _train(weights, draws: list, shares: list, loss_of, stage, config, name: str):
    """Minimizes a loss by AdamW; each step draws its batch from one of `draws`.

    Args:
      weights: what is trained.
      draws: functions from a key to a batch.
      shares: relative frequencies of `draws`.
      loss_of: (weights, batch) -> float32[] loss, and float32[] in 0 .. 1 to print with
        it: the demonstrator's success, or the share of cells that is read correctly.
      stage, config, name: the stage's section, the whole config, and the stage's name.
    """
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
    def update(weights, state, batch):
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, rate), gradient = gradient_of(weights, batch)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, loss, rate

    state, start_time = optimizer.init(weights), time.time()
    choice = np.random.default_rng(config.seed)
    root = jax.random.key(_draw_seed(config.seed, stage.draws))
    share = np.array(shares) / sum(shares)
    is_reading = stage.read_layers or stage.walls_weight
    rate_name = "cells read correctly" if is_reading else "demonstrator's success"
    losses, rates = [], []
    drawn = set()
    for step in range(1, stage.steps + 1):
        index = choice.choice(len(draws), p=share)
        batch = draws[index](jax.random.fold_in(root, step))
        if index not in drawn:
            drawn.add(index)
            if not stage.read_layers:  # Those learn from drawings, without replies.
                _check_rows(name, batch)
        weights, state, loss, rate = update(weights, state, batch)
        losses.append(loss)
        rates.append(rate)
        if step % config.log_every == 0 or step == stage.steps:
            seconds_left = (time.time() - start_time) / step * (stage.steps - step)
            mean = float(jnp.stack(losses).mean())
            _check_loss(name, step, mean)
            print(
                f"{name} {step:5d}/{stage.steps}  loss {mean:.4f}"
                f"  {rate_name} {jnp.stack(rates).mean():.3f}"
                f"  {seconds_left:5.0f} s left",
                flush=True,
            )
            losses, rates = [], []
    _check_weights(name, weights)
    return weights


def _draw_seed(seed: int, draws: int) -> int:
    """The seed of a stage's levels, 0 .. 2**32 - 1; `draws` itself for seed 0.

    With their sum, a stage would meet the levels of another seed's next stage.
    """
    return (seed * 1_000_003 + draws) % 2**32


def _check_rows(name: str, batch: batches.Batch) -> None:
    """Raises UserError if a kind's first rows are cut off before their replies."""
    context = batch.tokens.shape[1]
    fits = batch.opening is None or batch.opening.shape[0] < context
    if not (fits and bool(batch.is_reply.any())):
        raise UserError(
            f"{name}.context = {context} tokens, or the env.short_context or"
            " env.context that shortens it, ends before the first reply: raise it"
        )


def _check_loss(name: str, step: int, loss: float) -> None:
    """Raises UserError if the mean loss of some steps, up to `step`, is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"{name}: the loss is {loss} at step {step}: lower {name}.lr")


def _check_weights(name: str, weights) -> None:
    """Raises UserError if the last step, after which no loss is taken, broke them."""
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(weights)):
        raise UserError(
            f"{name}: the weights are not finite after the last step: lower {name}.lr"
        )
