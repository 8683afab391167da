"""Batches of demonstrated rows, new ones in each step of a stage."""

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
from ragen_jax.text.prompts import DialogueTokens
from ragen_jax.warm_start import symbol_sets
from ragen_jax.warm_start.recipe import Variant

NO_CHOICE = -1  # In `Batch.regret`.


class Batch(NamedTuple):
    """Demonstrated rows; the fields that may be None serve some stages alone."""

    tokens: jax.Array  # int32[R, T]
    is_reply: jax.Array  # bool[R, T], to be imitated
    success: jax.Array  # bool[R], whether the demonstrator succeeded
    opening: jax.Array | None  # int32[S], the common beginning of all rows, if any
    # With `read_layers`: int32[R, T], the same rows in the environment's own symbols,
    # and int32[], the index at which the first message begins.
    meant: jax.Array | None = None
    opening_length: jax.Array | None = None
    # bool[R, T], where random places are named; see `walls.with_random_places`.
    is_named: jax.Array | None = None
    # With `relabel`: int32[R, T], what replies imitate, not `tokens`; -1: nothing.
    imitated: jax.Array | None = None
    # And float32[R, T, 24], how many actions each of `drawings.Words.choices` loses
    # beside the best; NO_CHOICE where it cannot be chosen.
    regret: jax.Array | None = None


def make(pieces, tokenizer, variant: Variant, stage, vocabulary: int) -> Callable:
    """Makes the function from a key to a Batch, for `jit`.

    Args:
      pieces: of the chat template.
      tokenizer: of the model.
      variant: the kind of dialogue.
      stage: its section of the config.
      vocabulary: V.
    """
    # Short rows have no instruction, so no text of theirs names a shape.
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
    longest = variant.short_context if stage.short else variant.context
    context, rows = min(stage.context, longest), stage.rows * variant.rows

    def play(key, tokens):
        """One demonstrated row: tokens, is_reply and success."""
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
        return _in_one_text(play, tokens, rows)
    sets = symbol_sets.tokenize(dialogues, tokenizer)
    return _in_symbol_sets(play, tokens, rows, sets, dialogues[0], variant, stage)


def _in_one_text(play: Callable, tokens: DialogueTokens, rows: int) -> Callable:
    """`make` for rows of one dialogue, which all begin alike.

    Args:
      play: (key, tokens of a dialogue) -> a row.
      tokens: of the dialogue.
      rows: R.
    """
    opening = jnp.array(prompts_lib.opening_tokens(tokens))

    def draw(key):
        keys = jax.random.split(key, rows)
        return Batch(*jax.vmap(play, (0, None))(keys, tokens), opening)

    return draw


def _in_symbol_sets(
    play: Callable,
    tokens: DialogueTokens,
    rows: int,
    sets: symbol_sets.SymbolSetTokens,
    dialogue: prompts_lib.Dialogue,
    variant: Variant,
    stage,
) -> Callable:
    """`make` for rows whose dialogues differ in the symbols, or shapes, of drawings.

    Args:
      play: (key, tokens of a dialogue) -> a row.
      tokens: of the dialogue in the first set.
      rows: R.
      sets: the tokens in each set.
      dialogue: the one in the first set.
      variant: the kind of dialogue.
      stage: its section of the config.
    """
    # Whole dialogues of a batch share one set, and so their opening. Otherwise each row
    # has its own set.
    is_shared = not (stage.short or stage.read_layers or variant.shapes)

    def draw(key):
        set_key, key = jax.random.split(key)
        keys = jax.random.split(key, rows)
        set_index = _choose_sets(set_key, keys, variant, is_shared)

        def play_in(key, index):
            changed = symbol_sets.with_symbols(tokens, sets, index, dialogue.env_offset)
            return play(key, changed)

        played = jax.vmap(play_in)(keys, jnp.broadcast_to(set_index, (rows,)))
        batch = Batch(*played, sets.openings[set_index] if is_shared else None)
        if not stage.read_layers:
            return batch
        meant, _, _ = jax.vmap(play, (0, None))(keys, tokens)
        length = prompts_lib.opening_length(tokens)
        return batch._replace(meant=meant, opening_length=length)

    return draw


def token_weights(
    tokens: jax.Array, is_reply: jax.Array, colon: int, places: float
) -> jax.Array:
    """float32[R, T], weights: `places` for tokens of replies up to the colon, else 1.

    Up to it a walk's reply names the places of player and landmarks, which have to be
    read off the board. What follows is much longer, and partly random. Of the reply

       At (1, 1), box (1, 2), target (1, 3): Right (1, 2).</think><answer>Right</answer>

    the tokens before the colon have the weight `places`, the colon and all others 1.

    Args:
      tokens: int32[R, T], demonstrated rows.
      is_reply: bool[R, T].
      colon: id of the token that ends the places.
      places: the weight of those tokens.
    """
    position = jnp.arange(tokens.shape[1])[None]
    is_first = is_reply & ~jnp.pad(is_reply, ((0, 0), (1, 0)))[:, :-1]
    latest = lambda marks: jax.lax.cummax(jnp.where(marks, position, -1), axis=1)
    is_place = latest(is_first) >= latest(is_reply & (tokens == colon))
    return jnp.where(is_reply & is_place, places, 1.0).astype(jnp.float32)


def _choose_sets(
    key: jax.Array, keys: jax.Array, variant: Variant, is_shared: bool
) -> jax.Array:
    """int32[] for all rows, or int32[R]: which of `variant.symbol_sets`.

    Args:
      key: of a random choice.
      keys: of the rows. With shapes there is no choice: a row's set is that of its
        level's shape. The level is generated twice, which costs little beside a step.
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
    """A row's texts, whole, or `short`: a legend (or nothing) replaces the prompt."""
    texts = prompts_lib.make_dialogue(
        env, variant.limits, pieces, thinking=variant.thinking
    )
    if not short:
        return texts
    opening = pieces.after_reply
    if legend:
        opening = f"system\n {legend}{opening}"
    return dataclasses.replace(texts, phrases=(opening, *texts.phrases[1:]))
