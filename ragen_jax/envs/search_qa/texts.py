"""The texts of SearchQA: its phrases, their ids, and the rules of the task."""

import functools

from ragen_jax.envs import phrase_tables
from ragen_jax.envs.search_qa.encyclopedia import QUESTIONS, RELATIONS, Encyclopedia

LINES = (
    "Search first.\n",
    "No passages found.\n",
    "Passages:\n",
    "The answer is given. Score:",
)
FIRST, NOTHING, FOUND, GIVEN = range(len(LINES))  # indices in LINES


def tables(book: Encyclopedia) -> dict[str, tuple[str, ...]]:
    """The kinds of phrases in order."""
    return {
        "line": LINES,
        "before": tuple(f"Question: {before}" for _, before, _ in QUESTIONS),
        "after": tuple(after for _, _, after in QUESTIONS),
        "relation": tuple(between for _, _, between in RELATIONS),
        "score": tuple(f" {s / 100:.2f}\n" for s in range(101)),
        "subject": book.names,
        "asked": tuple(f" {name}" for name in book.names),
        "object": tuple(f" {name}.\n" for name in book.names),
    }


@functools.cache
def first_ids(book: Encyclopedia) -> dict[str, int]:
    """The first id of each kind of phrase."""
    return phrase_tables.first_ids(tables(book))


def phrases(book: Encyclopedia) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    return phrase_tables.texts(tables(book))


def longest_observation(lengths, book: Encyclopedia, passages: int) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    most = phrase_tables.most_tokens(tables(book), lengths)
    question = most["before"] + most["asked"] + most["after"]
    row = most["subject"] + most["relation"] + most["object"]
    return question + most["line"] + max(most["score"], passages * row)


def instruction(passages: int) -> str:
    """The rules for the system prompt."""
    return (
        "Answer the question. You cannot know the answer: look it up. search[words]"
        f" shows the {passages} best passages of an encyclopedia, each of one"
        " fact; some answers take two searches. finish[answer] ends the task: only the"
        " answer itself, a name, a place, an occupation or a year. An exact answer"
        " scores 1."
    )
