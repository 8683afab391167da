"""The encyclopedia: people, places, works and events, one passage for each fact."""

import dataclasses

import numpy as np

from ragen_jax.envs import base, split_lists
from ragen_jax.envs import text_search as search

LEAST_QUESTIONS = 8  # of a split
MOST_ANSWER_WORDS = 4
ARTICLES = ("a", "an", "the")  # Not compared in answers.
_FIRST = (
    "Ada Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leo Mira Nils Olga"
    " Paul Rosa Stefan Tilda Viktor Wanda Xenia Yusuf Zora"
).split()
_ONSETS = "b d f g h k l m n p r s t v br dr gl kr pl st tr".split()
_VOWELS = "a e i o u".split()
_ENDINGS = "n r l s m nd rt lk".split()
_ADJECTIVES = (
    "Silent Golden Broken Distant Hidden Frozen Burning Crimson Hollow Gentle Lost"
    " Restless Silver Wooden Endless Narrow Bitter Sleeping Amber Stormy"
).split()
_NOUNS = (
    "River Garden Mirror Tower Harbour Winter Letter Orchard Bridge Lantern Shadow"
    " Voyage Island Window Crown Forest Clock Painter Stranger Meadow"
).split()
_CONTESTS = "Race Fair Contest Regatta Tournament Festival Games Marathon".split()
_OCCUPATIONS = (
    "an architect,a botanist,a chemist,a composer,a doctor,a geologist,a historian,"
    "a lawyer,a painter,a pilot,a sculptor,a surgeon,a teacher,a translator"
).split(",")

PERSON, PLACE, COUNTRY, WORK, EVENT, JOB, YEAR = range(7)  # The kinds of entity.
# By relation: kinds of the subject and object, and the text between them in a passage.
RELATIONS = (
    (PERSON, PLACE, " was born in"),
    (PERSON, JOB, " worked as"),
    (WORK, PERSON, " was written by"),
    (WORK, YEAR, " first appeared in"),
    (PLACE, COUNTRY, " is a town in"),
    (EVENT, PLACE, " took place in"),
    (EVENT, PERSON, " was won by"),
)
BORN, WORKED, WRITTEN, APPEARED, LIES, HELD, WON = range(7)
# By kind of question: the relations that lead from the entity asked about to the answer
# (one or two hops), and the text before and after that entity.
QUESTIONS = (
    ((BORN,), "In which town was", " born?\n"),
    ((WORKED,), "What was the occupation of", "?\n"),
    ((WRITTEN,), "Who wrote", "?\n"),
    ((APPEARED,), "In which year did", " first appear?\n"),
    ((HELD,), "In which town was", " held?\n"),
    ((WON,), "Who won", "?\n"),
    ((BORN, LIES), "In which country was", " born?\n"),
    ((WRITTEN, BORN), "In which town was the author of", " born?\n"),
    ((WRITTEN, WORKED), "What was the occupation of the author of", "?\n"),
    ((HELD, LIES), "In which country was", " held?\n"),
    ((WON, BORN), "In which town was the winner of", " born?\n"),
    ((WON, WORKED), "What was the occupation of the winner of", "?\n"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Encyclopedia:
    """E entities, D facts with a passage each, and Q questions, as NumPy arrays."""

    names: tuple[str, ...]  # E
    entity_kind: np.ndarray  # int32[E], PERSON, PLACE, ...
    relation: np.ndarray  # int32[D], index in RELATIONS
    subject: np.ndarray  # int32[D], entity
    object: np.ndarray  # int32[D], entity
    kind: np.ndarray  # int32[Q], index in QUESTIONS
    asked: np.ndarray  # int32[Q], the entity that a question names
    answer: np.ndarray  # int32[Q], entity
    # int32[E, MOST_ANSWER_WORDS], the words of each name as ids of `answers`; -1 pads
    answer_words: np.ndarray
    path: np.ndarray  # int32[Q, 2], the facts that lead to the answer; -1 pads
    of_split: tuple[np.ndarray, ...]  # int32[q] questions of train, validation and test
    index: search.Index  # of the passages
    answers: search.Index  # the words of names, not stemmed; for reading answers alone

    @property
    def documents(self) -> int:
        """D."""
        return len(self.relation)


def answer_words(text: str | bytes) -> list[str]:
    """The words of an answer that are compared: all but articles."""
    return [word for word in search.plain_words(text) if word not in ARTICLES]


def make_encyclopedia(people: int, seed: int, hops: int) -> Encyclopedia:
    """Generates an encyclopedia: as many works as people, and half as many events.

    Args:
      people: their number.
      seed: decides all of it.
      hops: facts that lead to an answer: 1, 2, or 0 for questions of both kinds.

    Raises:
      ValueError: if a split would have too few questions.
    """
    generator = np.random.default_rng(seed)
    names, kinds = _entities(generator, people)
    facts = [
        (relation, int(subject), int(generator.choice(np.flatnonzero(kinds == goal))))
        for relation, (kind, goal, _) in enumerate(RELATIONS)
        for subject in np.flatnonzero(kinds == kind)
    ]
    number = {(relation, subject): d for d, (relation, subject, _) in enumerate(facts)}
    rows = []
    for kind, (relations, _, _) in enumerate(QUESTIONS):
        if hops not in (0, len(relations)):
            continue
        for subject in np.flatnonzero(kinds == RELATIONS[relations[0]][0]):
            at, path = int(subject), []
            for relation in relations:
                path.append(number[relation, at])
                at = facts[path[-1]][2]
            rows.append((kind, int(subject), at, *path, *[-1] * (2 - len(path))))
    questions = np.array(rows, np.int32)
    relation, subject, goal = np.array(facts, np.int32).T
    texts = [passage(names, *fact) for fact in facts]
    vocabulary = sorted({word for name in names for word in answer_words(name)})
    answers = search.index_words(vocabulary, np.zeros((len(vocabulary) + 1, 1)), 1.0)
    word_number = {word: i for i, word in enumerate(vocabulary)}
    spelled = np.full((len(names), MOST_ANSWER_WORDS), -1, np.int32)
    for row, name in zip(spelled, names, strict=True):
        ids = [word_number[word] for word in answer_words(name)]
        row[: len(ids)] = ids
    return Encyclopedia(
        names=names,
        entity_kind=kinds.astype(np.int32),
        relation=relation,
        subject=subject,
        object=goal,
        kind=questions[:, 0],
        asked=questions[:, 1],
        answer=questions[:, 2],
        answer_words=spelled,
        path=questions[:, 3:],
        of_split=_splits(questions[:, :3], people),
        index=search.build_index(texts),
        answers=answers,
    )


def _splits(content: np.ndarray, people: int) -> tuple[np.ndarray, ...]:
    """The questions of each split, by a hash of kind, entity asked about and answer."""
    of_split = split_lists.by_content(content)
    for name, indices in zip(base.SPLITS, of_split, strict=True):
        if len(indices) < LEAST_QUESTIONS:
            raise ValueError(
                f"search_qa.people = {people} gives {len(indices)} questions of the"
                f" split {name}, fewer than {LEAST_QUESTIONS}: choose more people"
            )
    return of_split


def passage(names, relation: int, subject: int, goal: int) -> str:
    """The text of a fact."""
    return f"{names[subject]}{RELATIONS[relation][2]} {names[goal]}."


def question_text(book: Encyclopedia, question: int) -> str:
    """The text of a question."""
    _, before, after = QUESTIONS[book.kind[question]]
    return f"{before} {book.names[book.asked[question]]}{after}"


def _entities(generator, people: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Names, all different, and int[E] their kinds."""
    known_names: set[str] = set()

    def unique(make, count: int) -> list[str]:
        new_names = []
        while len(new_names) < count:
            name = make()
            if name not in known_names:
                known_names.add(name)
                new_names.append(name)
        return new_names

    def syllables(count: int) -> str:
        parts = (
            generator.choice(_ONSETS) + generator.choice(_VOWELS) for _ in range(count)
        )
        return "".join(parts) + generator.choice(_ENDINGS)

    families = unique(lambda: syllables(2).capitalize(), max(40, people // 12))
    towns = unique(lambda: syllables(2).capitalize() + "a", max(8, people // 3))
    # Used in titles only, so that no title contains the name of a town.
    regions = unique(lambda: syllables(2).capitalize() + "o", max(8, people // 3))
    countries = unique(lambda: syllables(1).capitalize() + "land", 12)
    groups = {
        PERSON: unique(
            lambda: f"{generator.choice(_FIRST)} {generator.choice(families)}", people
        ),
        PLACE: towns,
        COUNTRY: countries,
        WORK: unique(
            lambda: (
                f"The {generator.choice(_ADJECTIVES)} {generator.choice(_NOUNS)}"
                f" of {generator.choice(regions)}"
            ),
            people,
        ),
        EVENT: unique(
            lambda: (
                f"the {generator.choice(_ADJECTIVES)} {generator.choice(_CONTESTS)} of"
                f" {generator.integers(1800, 2000)}"
            ),
            people // 2,
        ),
        JOB: list(_OCCUPATIONS),
        YEAR: [str(year) for year in range(1800, 2000)],
    }
    names = tuple(name for group in groups.values() for name in group)
    kinds = np.repeat(list(groups), [len(group) for group in groups.values()])
    return names, kinds
