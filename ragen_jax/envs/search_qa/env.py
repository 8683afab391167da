"""SearchQA: look up the answer with search[words], then give it with finish[answer].

Actions and reward are those of RAGEN's search environment (1 for an exact answer, else
the F1 if it is at least 0.3, else 0), over an encyclopedia generated from a seed. Every
function handles one episode: `vmap` to batch.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, phrase_tables, rendering, split_lists
from ragen_jax.envs import text_search as search
from ragen_jax.envs.search_qa import encyclopedia, texts
from ragen_jax.envs.search_qa.encyclopedia import (
    ARTICLES,
    MOST_ANSWER_WORDS,
    RELATIONS,
    Encyclopedia,
    answer_words,
)

ACTION_NAMES = ("search", "finish")
SEARCH, FINISH = range(2)
# An action is SEARCH and the ids of the query's words, or FINISH and three numbers that
# judge the answer: whether it is exact, its words in common with the right answer, and
# its words. The rest is padding.
ACTION_SIZE = 1 + search.QUERY_WORDS
ANSWER_BYTES = 96
LEAST_F1 = 0.3  # An answer with a lower F1 earns nothing.
MOST_PEOPLE = 3750  # 20,000 passages
HOPS = ("one", "two", "both")


@dataclasses.dataclass(frozen=True)
class SearchQA:
    """Settings of one encyclopedia."""

    people: int = 200  # people in the encyclopedia, with 5 1/3 passages for each
    seed: int = 0  # decides the encyclopedia
    hops: str = "both"  # passages that an answer takes: "one", "two" or "both"
    passages: int = 3  # k, passages shown for each search


@struct.dataclass
class State:
    """One reader with a question."""

    question: jax.Array  # int32[]
    has_searched: jax.Array  # bool[]
    passages: jax.Array  # int32[k], of the last search, padded with search.NOTHING
    score: jax.Array  # float32[], of the answer; 0 before it
    done: jax.Array  # bool[], True once an answer was given


def make(settings: SearchQA) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    book = book_of(settings)
    bound = {"book": book, "settings": settings}
    return base.Environment(
        name="search_qa",
        action_names=ACTION_NAMES,
        phrases=texts.phrases(book),
        observation_phrases=5 + 3 * settings.passages,
        instruction=texts.instruction(settings.passages),
        reset=functools.partial(reset, **bound),
        step=functools.partial(step, **bound),
        observe=functools.partial(observe, book=book),
        example_actions=("search[Ada Brunn born]", "finish[Malta]"),
        longest_observation=functools.partial(
            texts.longest_observation, book=book, passages=settings.passages
        ),
        answer_bytes=ANSWER_BYTES,
        most_actions=1,
        read_action=functools.partial(read_action, book=book),
        read_action_text=functools.partial(read_action_text, book=book),
        action_size=ACTION_SIZE,
        sample_action=functools.partial(sample_action, book=book),
        action_text=functools.partial(action_text, book=book),
        picture=rendering.text_view(
            texts.phrases(book), functools.partial(observe, book=book)
        ),
        solve=functools.partial(solve, book=book),
        rule=functools.partial(follow_rule, book=book),
    )


def book_of(settings: SearchQA) -> Encyclopedia:
    """The encyclopedia of these settings, made once per process."""
    hops = {"one": 1, "two": 2, "both": 0}[settings.hops]
    return _encyclopedia(settings.people, settings.seed, hops)


_encyclopedia = functools.cache(encyclopedia.make_encyclopedia)


def check(settings: SearchQA) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    limits = {
        "people": range(12, MOST_PEOPLE + 1),
        "seed": range(2**32),
        "passages": range(1, 11),
    }
    for key, possible in limits.items():
        value = getattr(settings, key)
        if value not in possible:
            raise ValueError(
                f"search_qa.{key} = {value} is not possible: choose a whole number from"
                f" {possible[0]} to {possible[-1]}"
            )
    if settings.hops not in HOPS:
        raise ValueError(
            f"search_qa.hops = {settings.hops!r} is unknown: choose one of"
            f" {', '.join(HOPS)}"
        )


def reset(
    key: jax.Array, split: jax.Array, book: Encyclopedia, settings: SearchQA
) -> State:
    """A reader with one of the split's questions, each equally likely."""
    return start(split_lists.draw(key, split, book.of_split), settings)


def start(question: jax.Array, settings: SearchQA) -> State:
    """The State at the beginning, for a given question."""
    return State(
        question=jnp.asarray(question, jnp.int32),
        has_searched=jnp.zeros((), bool),
        passages=jnp.full((settings.passages,), search.NOTHING, jnp.int32),
        score=jnp.zeros((), jnp.float32),
        done=jnp.zeros((), bool),
    )


def step(
    key: jax.Array,
    state: State,
    action: jax.Array,
    book: Encyclopedia,
    settings: SearchQA,
) -> tuple[State, base.Outcome]:
    """Searches, or scores an answer, which ends the episode.

    Args:
      key: not used; nothing is random.
      state: one reader; once `done`, it does not change.
      action: int32[ACTION_SIZE].
      book: the encyclopedia.
      settings: how many passages are shown.
    """
    del key
    searches = (action[0] == SEARCH) & ~state.done
    answers = (action[0] == FINISH) & ~state.done
    words = jnp.clip(action[1:], search.NO_WORD, len(book.index.words) - 1)
    documents, _ = search.top(search.scores(book.index, words), settings.passages)
    is_exact, score = _score(state.question, action, book)
    success = answers & is_exact
    score = jnp.where(answers, score, 0.0)
    done = state.done | answers
    after = state.replace(
        has_searched=state.has_searched | searches,
        passages=jnp.where(searches, documents, state.passages),
        score=jnp.where(answers, score, state.score),
        done=done,
    )
    return after, base.Outcome(reward=score, success=success, done=done)


def _score(question, action: jax.Array, book: Encyclopedia):
    """bool[], whether an answer is exact, and float32[], RAGEN's score of it.

    F1 = 2 * common / (words of one + words of the other), as in SQuAD, which deletes
    punctuation, where here it separates words.
    """
    is_exact, common = action[1] == 1, action[2]
    answer_count = jnp.maximum(action[3], 0)
    gold_count = (_gold(question, book) >= 0).sum()
    common = jnp.clip(common, 0, jnp.minimum(answer_count, gold_count))
    f1 = 2 * common / jnp.maximum(answer_count + gold_count, 1)
    score = jnp.where(is_exact, 1.0, jnp.where(f1 >= LEAST_F1, f1, 0.0))
    return is_exact, score.astype(jnp.float32)


def _gold(question: jax.Array, book: Encyclopedia) -> jax.Array:
    """int32[MOST_ANSWER_WORDS], the words of the right answer, padded with -1."""
    return jnp.asarray(book.answer_words[book.answer])[question]


# Texts -------------------------------------------------------------------------------


def observe(state: State, book: Encyclopedia) -> jax.Array:
    """int32[5 + 3 k], the question, then the passages or the score, as phrase ids."""
    at = texts.first_ids(book)
    kind = jnp.asarray(book.kind)[state.question]
    entity = jnp.asarray(book.asked)[state.question]
    facts = jnp.maximum(state.passages, 0)
    rows = [
        at["subject"] + jnp.asarray(book.subject)[facts],
        at["relation"] + jnp.asarray(book.relation)[facts],
        at["object"] + jnp.asarray(book.object)[facts],
    ]
    is_shown = (state.passages >= 0) & ~state.done
    rows = jnp.where(is_shown[:, None], jnp.stack(rows, axis=1), base.NO_PHRASE)
    has_any = state.passages[0] >= 0
    line = jnp.where(has_any, texts.FOUND, texts.NOTHING)
    line = jnp.where(state.has_searched, line, texts.FIRST)
    line = jnp.where(state.done, texts.GIVEN, line)
    hundredths = jnp.round(state.score * 100).astype(jnp.int32)
    score = jnp.where(state.done, at["score"] + hundredths, base.NO_PHRASE)
    head = [at["before"] + kind, at["asked"] + entity, at["after"] + kind, line, score]
    ids = jnp.concatenate([jnp.stack(head), rows.reshape(-1)])
    return phrase_tables.close_gaps(ids)


# Actions as texts --------------------------------------------------------------------


def read_action(
    text: jax.Array, length: jax.Array, state: State, book: Encyclopedia
) -> jax.Array:
    """int32[ACTION_SIZE], what `read_action_text` returns.

    Args:
      text: uint8[ANSWER_BYTES], padded with 0.
      length: int32[], its bytes.
      state: of the question that an answer is judged by.
      book: the encyclopedia.
    """
    searches, query, count = search.enclosed(text, length, b"search[")
    words = search.read_query(book.index, query, count)
    search_action = jnp.concatenate([jnp.array([SEARCH], jnp.int32), words])
    answers, answer, count = search.enclosed(text, length, b"finish[")
    answer_action = jnp.stack([jnp.int32(FINISH), *_judge(answer, count, state, book)])
    answer_action = jnp.pad(
        answer_action, (0, ACTION_SIZE - 4), constant_values=base.NO_ACTION
    )
    none = jnp.full((ACTION_SIZE,), base.NO_ACTION, jnp.int32)
    action = jnp.where(searches, search_action, jnp.where(answers, answer_action, none))
    return jnp.where(state.done, none, action)


def _judge(answer, length, state: State, book: Encyclopedia) -> tuple[jax.Array, ...]:
    """int32[] each: whether the answer is exact, its words in common, its words."""
    letters, count = search.split_words(answer, length)
    is_word = count > 0
    for article in ARTICLES:
        spelled = np.zeros(letters.shape[1], np.uint8)
        spelled[: len(article)] = np.frombuffer(article.encode(), np.uint8)
        is_word &= ~(letters == jnp.asarray(spelled)[None]).all(axis=1)
    words = jnp.where(is_word, search.find_words(book.answers, letters, count), -1)
    gold = _gold(state.question, book)
    is_common = (gold[:, None] == words[None]) & (gold >= 0)[:, None]
    first = jnp.argsort(~is_word, stable=True)[:MOST_ANSWER_WORDS]
    word_count = is_word.sum()
    is_same = (words[first] == gold).all() & (word_count == (gold >= 0).sum())
    common = is_common.any(axis=1).sum()
    parts = (is_same, common, word_count)
    return tuple(part.astype(jnp.int32) for part in parts)


def read_action_text(text: bytes, state: State, book: Encyclopedia) -> tuple[int, ...]:
    """The action of `search[words]` or `finish[answer]`; NO_ACTION for other texts.

    Args:
      text: stripped and lower-cased.
      state: NumPy arrays.
      book: the encyclopedia.
    """
    none = (base.NO_ACTION,) * ACTION_SIZE
    match = re.fullmatch(rb"(search|finish)\[(.*)\]", text, re.DOTALL)
    if match is None or bool(state.done):
        return none
    if match[1] == b"search":
        return (SEARCH, *search.read_query_text(book.index, match[2]))
    words = answer_words(match[2])
    gold = answer_words(book.names[book.answer[int(state.question)]])
    common = len(set(words) & set(gold))
    return (FINISH, int(words == gold), common, len(words), *none[4:])


def action_text(action: Any, state: State, book: Encyclopedia) -> str:
    """The text of an action; "finish[...]" for an answer that is not exact."""
    kind, *rest = (int(part) for part in np.asarray(action))
    if kind == SEARCH:
        return f"search[{search.words_text(book.index, rest)}]"
    if rest[0] != 1:
        return "finish[...]"
    return f"finish[{book.names[book.answer[int(state.question)]]}]"


def sample_action(key: jax.Array, book: Encyclopedia) -> jax.Array:
    """int32[ACTION_SIZE]: a search for three random words; one time in 8 an answer.

    The answer is wrong, as random ones would be.
    """
    kind_key, word_key = jax.random.split(key)
    words = search.random_query(word_key, book.index)
    answers = jax.random.bernoulli(kind_key, 1 / 8)
    answer_action = jnp.array([FINISH, 0, 0, 1], jnp.int32)
    answer_action = jnp.pad(
        answer_action, (0, ACTION_SIZE - 4), constant_values=base.NO_ACTION
    )
    search_action = jnp.concatenate(
        [jnp.array([SEARCH], jnp.int32), words.astype(jnp.int32)]
    )
    return jnp.where(answers, answer_action, search_action)


@functools.cache
def _question_words(book: Encyclopedia) -> np.ndarray:
    """int32[Q, W], each question as a query."""
    questions = (encyclopedia.question_text(book, q) for q in range(len(book.kind)))
    rows = [search.read_query_text(book.index, text.encode()) for text in questions]
    return np.array(rows, np.int32)


def follow_rule(state: State, book: Encyclopedia) -> jax.Array:
    """int32[ACTION_SIZE]: searches for the question, then answers from the first
    passage, with the name at its end."""
    words = jnp.asarray(_question_words(book))[state.question]
    search_action = jnp.concatenate([jnp.array([SEARCH], jnp.int32), words])
    spelled = jnp.asarray(book.answer_words)
    name = spelled[jnp.asarray(book.object)[jnp.maximum(state.passages[0], 0)]]
    gold = _gold(state.question, book)
    common = ((gold[:, None] == name[None]) & (gold >= 0)[:, None]).any(axis=1).sum()
    parts = [FINISH, (name == gold).all(), common, (name >= 0).sum()]
    answer = jnp.stack([jnp.asarray(part, jnp.int32) for part in parts])
    padding = jnp.full((ACTION_SIZE - 4,), base.NO_ACTION, jnp.int32)
    answer = jnp.concatenate([answer, padding])
    return jnp.where(state.passages[0] >= 0, answer, search_action)


def solve(state: State, book: Encyclopedia) -> tuple[tuple[int, ...], ...]:
    """A search for each fact on the way to the answer, then the answer."""
    if bool(state.done):
        return ()
    question = int(state.question)
    steps = []
    for fact in book.path[question]:
        if fact >= 0:
            relation = RELATIONS[book.relation[fact]][2]
            text = f"{book.names[book.subject[fact]]} {relation}"
            query = search.read_query_text(book.index, text.encode())
            steps.append((SEARCH, *query))
    count = len(answer_words(book.names[book.answer[question]]))
    padding = [base.NO_ACTION] * (ACTION_SIZE - 4)
    return (*steps, (FINISH, 1, count, count, *padding))
