"""Imperfect demonstrations for SearchQA, for the supervised start of small models.

A careful reader searches for the fact that it lacks, repeats the passage that states it
and answers with the name at its end. A careless one guesses without searching, searches
for anything, or answers with the name at the end of any passage shown. A reader is
drawn anew for each reply, so that RL has to find out what pays.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import NO_PHRASE, Environment
from ragen_jax.envs.search_qa import env as search_qa
from ragen_jax.envs.search_qa.encyclopedia import RELATIONS, Encyclopedia

_FIXED = ("</think><answer>search[", "</think><answer>finish[", "]</answer>", ".")
_FIXED += (" I look it up.", " I guess.", " I look around.", " I take one.")
_SEARCH, _FINISH, _END, _STOP, _LOOK, _GUESS, _AROUND, _ANY = range(len(_FIXED))
# By relation: the word to search for together with the subject of a fact.
_WORDS = (" born", " worked", " written", " appeared", " town", " place", " won")
# The ids of the first phrase of each kind, in the order of `reply_phrases`.
_WORD = len(_FIXED)
_BETWEEN = _WORD + len(_WORDS)
_NAME = _BETWEEN + len(RELATIONS)


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How imperfect the demonstrations are."""

    random_plan: float = 0.5  # share of careless replies, where there is a choice


def with_demonstrations(
    env: Environment,
    settings: search_qa.SearchQA,
    player: Demonstrator,
    *,
    thinking: bool,
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in.

    Args:
      env: made from `settings`.
      settings: of the encyclopedia.
      player: how it chooses.
      thinking: whether replies begin within `<think>`, else within `<answer>`.
    """
    book = search_qa.book_of(settings)
    return dataclasses.replace(
        env,
        reply_phrases=(
            *(_FIXED if thinking else _without_thought(_FIXED)),
            *_WORDS,
            *(between for _, _, between in RELATIONS),
            *(f" {name}" for name in book.names),
        ),
        demonstrate=functools.partial(
            _demonstrate, player=player, book=book, thinking=thinking
        ),
    )


def _without_thought(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.removeprefix("</think><answer>") for text in texts)


def _demonstrate(
    key: jax.Array,
    state: search_qa.State,
    player: Demonstrator,
    book: Encyclopedia,
    thinking: bool,
) -> jax.Array:
    """int32[9], one reply as phrase ids, without the end-of-turn token."""
    keys = jax.random.split(key, 3)
    relation, subject = jnp.asarray(book.relation), jnp.asarray(book.subject)
    goal = jnp.asarray(book.object)
    path = jnp.asarray(book.path)[state.question]
    last = jnp.where(path[1] >= 0, path[1], path[0])
    is_seen = (path[:, None] == state.passages[None]).any(axis=1) & (path >= 0)
    knows = (last == state.passages).any() & (last >= 0)
    sought = jnp.where(is_seen[0], last, path[0])
    random_plan = jax.random.bernoulli(keys[0], player.random_plan)
    random_numbers = jax.random.randint(
        keys[1], (2,), 0, jnp.array([book.documents, 1 << 20])
    )

    # For careless replies: any passage shown, and any entity of the answer's kind.
    passages_shown = (state.passages >= 0).sum()
    shown_fact = state.passages[random_numbers[1] % jnp.maximum(passages_shown, 1)]
    kind = jnp.asarray(book.entity_kind)
    is_kind = kind == kind[goal[last]]
    chances = jax.random.uniform(keys[2], is_kind.shape)
    guess = jnp.argmax(jnp.where(is_kind, chances, -1.0))

    guesses = random_plan & ~state.has_searched & (random_numbers[1] % 4 != 0)
    takes_any = random_plan & state.has_searched & (passages_shown > 0)
    roams = random_plan & ~guesses & ~takes_any
    answers = guesses | takes_any | knows & ~random_plan
    fact = jnp.where(roams, random_numbers[0], jnp.where(knows, last, sought))
    thought = jnp.where(roams, _AROUND, _LOOK)
    thought = jnp.where(guesses, _GUESS, jnp.where(takes_any, _ANY, thought))
    repeats = answers & ~guesses & ~takes_any
    passage = jnp.stack(
        [_NAME + subject[fact], _BETWEEN + relation[fact], _NAME + goal[fact], _STOP]
    )
    thought_phrases = jnp.where(repeats, passage, NO_PHRASE)
    thought_phrases = thought_phrases.at[0].set(jnp.where(repeats, passage[0], thought))
    if not thinking:
        thought_phrases = jnp.full_like(thought_phrases, NO_PHRASE)
    answer = jnp.where(guesses, guess, goal[jnp.where(takes_any, shown_fact, fact)])
    ids = jnp.stack(
        [
            jnp.where(answers, _FINISH, _SEARCH),
            _NAME + jnp.where(answers, answer, subject[fact]),
            jnp.where(answers, NO_PHRASE, _WORD + relation[fact]),
            jnp.int32(_END),
        ]
    )
    return jnp.concatenate([thought_phrases, ids]).astype(jnp.int32)
