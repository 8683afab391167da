"""Rows of demonstrations, drawn anew in each step."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import TRAIN, Environment
from ragen_jax.envs.sokoban import frames
from ragen_jax.rollout import demonstrate
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text import tiny_tokenizer
from ragen_jax.text.phrases import tokenize_phrases
from ragen_jax.warm_start import symbol_sets
from ragen_jax.warm_start.recipe import Variant

NO_CHOICE = -1  # In `Batch.regret`.


class Batch(NamedTuple):
    """Demonstrated rows."""

    tokens: jax.Array  # int32[R, T]
    is_reply: jax.Array  # bool[R, T], to be imitated
    success: jax.Array  # bool[R], of the demonstrator
    opening: jax.Array | None  # int32[S], how all rows begin, if they do
    # int32[R, T], the rows in the environment's own symbols, and int32[], where the
    # first message begins; where a stage reads symbols.
    meant: jax.Array | None = None
    opening_length: jax.Array | None = None
    # bool[R, T], where places are named that belong to no reply; see walls.py.
    is_named: jax.Array | None = None
    # int32[R, T], of replies what is imitated in place of `tokens`; -1: nothing.
    imitated: jax.Array | None = None
    # float32[R, T, 24], where one of `drawings.Words.choices` is chosen, how many
    # actions each one loses beside the best; NO_CHOICE where it is none of them.
    regret: jax.Array | None = None


def make(pieces, tokenizer, variant: Variant, stage, vocabulary: int) -> Callable:
    """A function from a key to a Batch, for `jit`."""
    # Rows without an instruction name no shape: all are drawn alike.
    is_one = len(variant.symbol_sets) < 2 or (variant.shapes and stage.short)
    texts = ((variant.env, ""),) if is_one else variant.symbol_sets
    dialogues = [
        _dialogue(env, legend, variant, pieces, stage.short) for env, legend in texts
    ]
    tokens = prompts_lib.tokenize_dialogue(
        dialogues[0], variant.env, pieces, tokenizer, vocabulary
    )
    reply_table = tokenize_phrases(tokenizer, variant.env.reply_phrases)
    stop = tokenizer.convert_tokens_to_ids(tiny_tokenizer.END)
    held = variant.short_context if stage.short else variant.context
    context, rows = min(stage.context, held), stage.rows * variant.rows

    def play(key, tokens):
        return demonstrate.demonstrate_episode(
            key,
            variant.env,
            dialogues[0],
            tokens,
            reply_table,
            stop,
            context,
            stage.turns,
        )

    if is_one:
        opening = jnp.array(prompts_lib.opening_tokens(tokens))

        def as_it_is(key):
            keys = jax.random.split(key, rows)
            return Batch(*jax.vmap(play, (0, None))(keys, tokens), opening)

        return as_it_is
    drawn, offset = symbol_sets.tokenize(dialogues, tokenizer), dialogues[0].env_offset
    # Rows that begin alike share their opening; where they need not, each has its own.
    is_shared = not (stage.short or stage.read_layers or variant.shapes)

    def in_symbol_sets(key):
        set_key, key = jax.random.split(key)
        keys = jax.random.split(key, rows)
        which = _choose_sets(set_key, keys, variant, is_shared)

        def play_in(key, index):
            changed = symbol_sets.with_symbols(tokens, drawn, index, offset)
            return play(key, changed)

        played = jax.vmap(play_in)(keys, jnp.broadcast_to(which, (rows,)))
        batch = Batch(*played, drawn.openings[which] if is_shared else None)
        if not stage.read_layers:
            return batch
        meant, _, _ = jax.vmap(play, (0, None))(keys, tokens)
        length = prompts_lib.opening_length(tokens)
        return batch._replace(meant=meant, opening_length=length)

    return in_symbol_sets


def token_weights(
    tokens: jax.Array, is_reply: jax.Array, colon: int, places: float
) -> jax.Array:
    """float32[R, T], how much each token of replies counts: `places` up to the colon.

    Before it, a walk's reply says where the player and the landmarks are, which has to
    be read off the board; what follows is much longer, and partly left to chance.

    Args:
      tokens: int32[R, T], demonstrated rows.
      is_reply: bool[R, T].
      colon: id of the token that ends the places.
      places: what those tokens count, beside 1 for the others.
    """
    position = jnp.arange(tokens.shape[1])[None]
    is_first = is_reply & ~jnp.pad(is_reply, ((0, 0), (1, 0)))[:, :-1]
    latest = lambda marks: jax.lax.cummax(jnp.where(marks, position, -1), axis=1)
    is_place = latest(is_first) >= latest(is_reply & (tokens == colon))
    return jnp.where(is_reply & is_place, places, 1.0).astype(jnp.float32)


def _choose_sets(
    key: jax.Array, keys: jax.Array, variant: Variant, is_shared: bool
) -> jax.Array:
    """int32[], or int32[R] for rows that differ: which of `variant.symbol_sets`.

    Args:
      key: of the choice, where it is free.
      keys: of the rows. The shape of a drawing follows from its level, which is drawn
        here once more: cheap beside one step of training.
      variant: with two sets or more.
      is_shared: whether all rows are in one set.
    """
    if not variant.shapes:
        shape = () if is_shared else keys.shape
        return jax.random.randint(key, shape, 0, len(variant.symbol_sets))

    def level_shape(key):
        start = variant.env.reset(demonstrate.level_key(key), jnp.int32(TRAIN))
        return frames.shape_index(start, variant.shapes)

    return jax.vmap(level_shape)(keys)


def _dialogue(env: Environment, legend: str, variant: Variant, pieces, short: bool):
    """The texts of a row: whole, or with a legend alone in place of the prompt."""
    texts = prompts_lib.make_dialogue(
        env, variant.limits, pieces, thinking=variant.thinking
    )
    if not short:
        return texts
    opening = pieces.after_reply
    if legend:
        opening = f"system\n {legend}{opening}"
    return dataclasses.replace(texts, phrases=(opening, *texts.phrases[1:]))
