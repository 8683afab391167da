"""SearchQA: against a plain-Python reader of the same rules, its score, its solver."""

import functools
import random
import re
from collections import Counter

import bm25s
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs import text_search as search
from ragen_jax.envs.search_qa import encyclopedia, env
from ragen_jax.envs.search_qa.env import SearchQA
from ragen_jax.errors import SettingsError

SETTINGS = SearchQA(people=60, seed=2, passages=4)


@pytest.fixture(scope="module")
def book():
    return env._encyclopedia(SETTINGS.people, SETTINGS.seed, 0)


@pytest.fixture(scope="module")
def environment():
    return env.make(SETTINGS)


@functools.cache
def _compiled(observe):
    return jax.jit(observe)


def _observe(environment, state):
    return _compiled(environment.observe)(state)


@pytest.fixture(scope="module")
def step(environment):
    return jax.jit(environment.step)


def _f1(answer: str, gold: str) -> float:
    """SQuAD's F1 of words in lower case without articles, parted by punctuation."""
    given, wanted = (
        re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^a-z0-9]", " ", text.lower())).split()
        for text in (answer, gold)
    )
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if given else 0.0


def _play(environment, step, state, text):
    action = environment.read_action_text(text.lower().encode(), state)
    return jax.device_get(step(jax.random.key(0), state, jnp.array(action, jnp.int32)))


def test_passages_are_the_best_of_bm25s(book, environment, step):
    """Its scores of what is shown are as high as of anything that is not."""
    texts = [
        encyclopedia.passage(book.names, *fact)
        for fact in zip(book.relation, book.subject, book.object, strict=True)
    ]
    reference = bm25s.BM25(method="lucene", k1=search.K1, b=search.B)
    reference.index([search.words_of(text) for text in texts], show_progress=False)
    chance = random.Random(0)
    for _ in range(40):
        query = chance.choices(book.index.words, k=3)
        state = jax.device_get(env.start(0, SETTINGS))
        state, _ = _play(environment, step, state, f"search[{' '.join(query)}]")
        theirs = reference.get_scores([search.stem(word) for word in query])
        shown = [p for p in state.passages.tolist() if p >= 0]
        best = np.sort(theirs)[::-1][: len(shown)]
        np.testing.assert_allclose(theirs[shown], best, atol=1e-3)
        assert len(shown) == min(4, (theirs > 0).sum())
        seen = base.text_of(environment.phrases, _observe(environment, state))
        assert all(texts[p] + "\n" in seen for p in shown)


def test_answers_earn_one_if_exact_else_f1_from_three_tenths(book, environment, step):
    chance, earned = random.Random(1), set()
    for _ in range(300):
        question = chance.randrange(len(book.kind))
        gold = book.names[book.answer[question]]
        answer = chance.choice(
            [gold, gold.upper(), f"The {gold}!", chance.choice(book.names), "", "?"]
            + [f"{gold} {'x ' * n}" for n in range(1, 7)]
            + [
                gold.split()[-1],
                " ".join(reversed(gold.split())),
                gold.replace("a", "o"),
            ]
        )
        state = jax.device_get(env.start(question, SETTINGS))
        state, outcome = _play(environment, step, state, f"finish[{answer}]")
        f1 = _f1(answer, gold)
        exact = encyclopedia.answer_words(answer) == encyclopedia.answer_words(gold)
        expected = 1.0 if exact else f1 if f1 >= 0.3 else 0.0
        np.testing.assert_allclose(outcome.reward, expected, rtol=1e-6)
        assert outcome.success == exact and outcome.done
        earned.add(round(expected, 3))
    assert {0.0, 1.0, 0.667, 0.5, 0.4} <= earned


def test_an_exact_answer_with_a_word_more_is_not_exact(book, environment):
    state = jax.device_get(env.start(jnp.int32(0), SETTINGS))
    name = book.names[book.answer[0]].lower()
    texts = [f"finish[{said}]".encode() for said in (name, f"{name} qqq", f"a {name}")]
    rows = np.zeros((len(texts), env.ANSWER_BYTES), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    read = jax.jit(jax.vmap(environment.read_action, in_axes=(0, 0, None)))
    actions = np.asarray(read(rows, np.array(list(map(len, texts)), np.int32), state))
    for action, text in zip(actions, texts, strict=True):
        assert tuple(action) == environment.read_action_text(text, state)
    assert actions[:, 1].tolist() == [1, 0, 1]


def test_the_score_is_shown_to_the_nearest_hundredth(environment):
    state = env.start(jnp.int32(0), SETTINGS)
    state = state.replace(score=jnp.float32(2 / 3), done=jnp.ones((), bool))
    text = base.text_of(environment.phrases, np.asarray(_observe(environment, state)))
    assert text.endswith("?\nThe answer is given. Score: 0.67\n")


def test_every_question_is_answered_by_following_the_passages(book):
    """The facts on a question's way lead from what it asks to its answer."""
    facts = {
        (relation, subject): goal
        for relation, subject, goal in zip(
            book.relation.tolist(),
            book.subject.tolist(),
            book.object.tolist(),
            strict=True,
        )
    }
    assert len(facts) == book.documents
    for kind, asked, answer in zip(book.kind, book.asked, book.answer, strict=True):
        at = int(asked)
        for relation in encyclopedia.QUESTIONS[kind][0]:
            at = facts[relation, at]
        assert at == answer


def test_the_solver_finds_its_answers_in_the_passages(book, environment, step):
    for question in range(0, len(book.kind), 17):
        state = jax.device_get(env.start(question, SETTINGS))
        seen = ""
        *searches, answer = environment.solve(state)
        for action in searches:
            text = environment.action_text(action, state)
            state, _ = _play(environment, step, state, text)
            seen += base.text_of(environment.phrases, _observe(environment, state))
        assert f" {book.names[book.answer[question]]}.\n" in seen
        text = environment.action_text(answer, state)
        state, outcome = _play(environment, step, state, text)
        assert outcome.success and outcome.reward == 1


def test_hops_and_splits(book):
    one, two = (encyclopedia.make_encyclopedia(60, 2, hops) for hops in (1, 2))
    assert len(one.kind) + len(two.kind) == len(book.kind)
    assert (one.path[:, 1] == -1).all() and (two.path[:, 1] >= 0).all()
    assert sum(map(len, book.of_split)) == len(book.kind)
    assert len(book.of_split[0]) > 4 * len(book.of_split[2])


def test_a_question_cannot_be_answered_from_its_words(book):
    """No answer stands in its question."""
    assert _told(book) == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_many_questions_hardly_one_tells_that_its_author_was_a_painter(seed):
    book = encyclopedia.make_encyclopedia(200, seed, 0)
    told = _told(book)
    assert len(told) <= len(book.kind) / 1000
    for question in told:
        assert book.names[book.answer[question]] == "a painter"
        assert "Painter of" in encyclopedia.question_text(book, question)


def _told(book):
    """The questions that hold their answer."""
    found = []
    for question in range(len(book.kind)):
        text = set(
            encyclopedia.answer_words(encyclopedia.question_text(book, question))
        )
        gold = encyclopedia.answer_words(book.names[book.answer[question]])
        if set(gold) <= text:
            found.append(question)
    return found


@pytest.mark.parametrize("hops", [1, 2])
def test_encyclopedias_of_few_people_are_made_or_refused_in_one_sentence(hops):
    """Whichever the seed: a split may be left without enough questions."""
    made = []
    for seed in range(1, 4):
        try:
            small = encyclopedia.make_encyclopedia(12, seed, hops)
        except ValueError as error:
            assert "choose more people" in str(error) and "\n" not in str(error)
            made.append(False)
        else:
            sizes = [len(own) for own in small.of_split]
            made.append(min(sizes) >= encyclopedia.LEAST_QUESTIONS)
            assert made[-1]
    assert True in made and False in made


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(people=3), "people = 3 is not possible"),
        (dict(people=3751), "from 12 to 3750"),
        (dict(passages=0), "passages = 0"),
        (dict(hops="three"), "choose one of one, two, both"),
    ],
)
def test_settings_without_an_encyclopedia_are_refused(options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        envs.make("search_qa", options.items())
