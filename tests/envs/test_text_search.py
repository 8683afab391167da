"""Text search: words, BM25 against bm25s, and the device against the host."""

import functools
import random

import bm25s
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import text_search as search

WORDS = "blue cotton shirt shirts boxes box berries berry glass 4k usb2 a the".split()
WIDTH = 64


def _collection(documents: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    rare = [f"w{n}" for n in range(60)]
    return [
        " ".join(chance.choices(WORDS + rare, k=chance.randint(3, 14)))
        for _ in range(documents)
    ]


@functools.cache
def _index(documents: int = 300) -> search.Index:
    return search.build_index(_collection(documents))


def _padded(texts):
    rows = np.zeros((len(texts), WIDTH), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows, np.array([len(text) for text in texts], np.int32)


def test_words_are_runs_of_letters_and_digits_without_plurals_and_stop_words():
    text = "The Blue-ish SHIRTS, of 2 berries; glasses' bus cafés are 4K!"
    assert search.words_of(text) == (
        ["blue", "ish", "shirt", "2", "berry", "glasse", "bus", "caf", "s", "4k"]
    )


STEMS = {
    **{"berries": "berry", "boxes": "boxe", "shoes": "shoe", "s": "s"},
    **{"gas": "gas", "glass": "glass", "bus": "bus", "ies": "ies"},
    **{"aies": "aie", "trees": "tree", "cat": "cat", "eyeies": "eyeie"},
}


@pytest.mark.parametrize(("word", "stem"), STEMS.items())
def test_stems_follow_harmans_rules(word, stem):
    assert search.stem(word) == stem


def test_the_device_takes_the_same_endings_off():
    # Also what too short or other endings would leave.
    known = sorted(
        {*STEMS, *STEMS.values(), "y", "ie", "ga", "glas", "bu", "ay", "tre"}
    )
    index = search.index_words(known, np.zeros((len(known) + 1, 1)), 1.0)
    texts, lengths = _padded([word.encode() for word in STEMS])
    read = jax.jit(jax.vmap(functools.partial(search.read_query, index)))
    first = np.asarray(read(texts, lengths))[:, 0]
    assert [known[word] for word in first] == list(STEMS.values())


def test_hand_worked_scores_of_two_documents():
    index = search.build_index(["red red shirt", "blue shirt hat"])
    # D = 2, both of mean length: f = 2 gives 2 / (2 + 1.5), f = 1 gives 1 / (1 + 1.5).
    red = np.log(1 + 1.5 / 1.5) * 2 / 3.5
    shirt = np.log(1 + 0.5 / 2.5) / 2.5
    words = search.read_query_text(index, b"a red shirt")
    scores = np.asarray(search.scores(index, jnp.array(words))) * index.step
    np.testing.assert_allclose(scores, [red + shirt, shirt], atol=index.step)


def test_scores_equal_those_of_bm25s_on_the_same_tokens():
    texts = _collection(300)
    reference = bm25s.BM25(method="lucene", k1=search.K1, b=search.B)
    reference.index([search.words_of(text) for text in texts], show_progress=False)
    index = _index()
    chance = random.Random(1)
    score = jax.jit(functools.partial(search.scores, index))
    for _ in range(50):
        query = chance.choices(index.words, k=chance.randint(1, search.QUERY_WORDS))
        words = search.read_query_text(index, " ".join(query).encode())
        ours = np.asarray(score(jnp.array(words, jnp.int32))) * index.step
        theirs = reference.get_scores(query)
        np.testing.assert_allclose(ours, theirs, atol=0.6 * len(query) * index.step)


@pytest.mark.parametrize(
    "documents", [7, 300, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 1000))]
)
def test_the_best_come_first_with_ties_by_index_page_after_page(documents):
    index = _index(documents)
    chance = random.Random(2)
    queries = [chance.choices(WORDS + ["w1", "w2"], k=3) for _ in range(40)]
    words = [search.read_query_text(index, " ".join(q).encode()) for q in queries]
    words = np.array(words, np.int32)

    def pages(words):
        scores, mark, found = search.scores(index, words), search.FIRST, []
        for _ in range(3):
            page, values = search.top(scores, 10, mark)
            mark = values[-1], page[-1]
            found.append(page)
        return jnp.concatenate(found)

    found = np.asarray(jax.jit(jax.vmap(pages))(words))
    for row, query in zip(found, words, strict=True):
        expected = search.rank_text(index, query)[:30]
        assert row.tolist() == expected + [search.NOTHING] * (30 - len(expected))


@pytest.mark.parametrize("documents", [31, 4097, 9000])
def test_the_best_of_any_scores_are_those_of_a_stable_sort(documents):
    """Ties, the highest possible scores, and marks anywhere; several parts."""
    chance = np.random.default_rng(documents)
    highest = search.QUERY_WORDS * 32_767
    scores = np.stack(
        [
            chance.integers(0, 3, documents),
            chance.integers(highest - 3, highest + 1, documents),
            chance.integers(0, highest + 1, documents) * (chance.random() < 0.1),
            np.full(documents, highest),
            np.zeros(documents, int),
        ]
    ).astype(np.int32)
    best = jax.jit(jax.vmap(lambda row, *mark: search.top(row, 10, mark)))
    orders = np.argsort(-scores, axis=1, kind="stable")
    for skipped in (0, 1, documents // 2, documents - 1):
        before = orders[:, max(skipped - 1, 0)]
        mark = np.take_along_axis(scores, before[:, None], 1)[:, 0], before
        if not skipped:
            mark = tuple(np.full(len(scores), part) for part in search.FIRST)
        found, values = (np.asarray(part) for part in best(scores, *mark))
        for row, order, ids, shown in zip(scores, orders, found, values, strict=True):
            expected = [at for at in order[skipped : skipped + 10] if row[at] > 0]
            empty = 10 - len(expected)
            assert ids.tolist() == expected + [search.NOTHING] * empty
            assert shown.tolist() == row[expected].tolist() + [0] * empty


def test_the_device_reads_any_bytes_as_the_host_does():
    index, chance = _index(), random.Random(3)
    seeds = [*index.words, *search.STOP_WORDS, "x" * 16, "x" * 17 + "s", "cherries"]
    texts = [b" ", b"s", b"ies", b"shirts", b"a" * WIDTH, b"shirt" * 12]
    while len(texts) < 3000:
        text = b""
        for _ in range(chance.randint(1, 20)):
            word = chance.choice(seeds).encode()
            word += chance.choice([b"", b"s", b"es", b"ies", b"x"])
            word = chance.choice([bytes.upper, bytes.lower])(word)
            text += word + chance.choice([b" ", b", ", b"", b"-", chance.randbytes(1)])
        text = text if chance.random() < 0.9 else chance.randbytes(WIDTH)
        texts.append(text[: chance.randint(1, WIDTH)])
    read = jax.jit(jax.vmap(functools.partial(search.read_query, index)))
    found = np.asarray(read(*_padded(texts)))
    known = 0
    for row, text in zip(found, texts, strict=True):
        expected = search.read_query_text(index, text)
        assert tuple(row.tolist()) == expected, text
        known += expected[0] >= 0
    assert known > 1000  # of 3000: the texts are not all strange


def test_what_stands_behind_a_query_is_not_read():
    index = _index()
    rows, lengths = _padded([b"shirt box", b"shirt"])
    rows[1] = rows[0]
    read = jax.jit(jax.vmap(functools.partial(search.read_query, index)))
    both, one = np.asarray(read(rows, lengths))
    assert (both >= 0).sum() == 2 and (one >= 0).sum() == 1


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([], "0 documents"),
        (["the of"], "holds no words"),
        (["ok " + "y" * 17], "holds the word 'yyyyyyyyyyyyyyyyy'"),
        (["a word"] * 20_001, "20001 documents"),
    ],
)
def test_collections_that_cannot_be_searched_are_refused(documents, sentence):
    with pytest.raises(ValueError, match=sentence):
        search.build_index(documents)
