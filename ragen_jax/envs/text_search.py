"""Text search on device: a query's bytes to word ids, BM25 over a static collection.

The shop and the encyclopedia use it. Scores are integers, as weights are rounded to a
fixed step on the host, so that a query ranks documents in the same order on every
machine. The functions on device handle one query: `vmap` to batch.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

QUERY_WORDS = 12  # W, the most known words of a query; later ones are ignored
LONGEST_WORD = 16  # bytes; no collection may have a longer word
MAX_DOCUMENTS = 20_000
NO_WORD = -1  # pads queries
NOTHING = -1  # pads results, where fewer documents have a word of the query
FIRST = (2**31 - 1, -1)  # (score, document) that comes before all others in a ranking
STOP_WORDS = frozenset(
    "a an and are as at by did do does for from in is it its of on or that the their"
    " this to was were what when where which who whose with".split()
)
# BM25's k1 (saturation of a word's count) and b (weight of the document's length), with
# the defaults of bm25s.
K1, B = 1.5, 0.75
_MOST_WEIGHT = 32_767  # of a word in a document: int16
# Documents that are ranked together: a score (below 2^19, as a sum of QUERY_WORDS
# weights) and an index below _PART fit into the 31 bits of one key.
_PART = 4096
_BLOCK = 32  # documents of which the best key is kept, for the search of the next best
_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789"


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """A collection that can be searched. Static: its arrays are programs' constants."""

    words: tuple[str, ...]  # V, the stems of the collection in alphabetical order
    weights: np.ndarray  # int16[V + 1, D], BM25 by word and document; row V is 0
    step: float  # BM25 of a weight of 1
    hashes: np.ndarray  # uint32[V], of the words, ascending
    word_of_hash: np.ndarray  # int32[V], the word that has the hash at the same index
    packed: np.ndarray  # uint32[V, 4], each word's bytes, padded with 0


# Words, on the host: the definition --------------------------------------------------


def stem(word: str) -> str:
    """The word without a plural ending: the S-stemmer of Harman (1991), table 1."""
    if len(word) < 4:
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    if word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word


def plain_words(text: str | bytes) -> list[str]:
    """The words of a text in order: longest runs of ASCII letters and digits.

    They are lower-cased. All other bytes, those of other scripts included, separate
    words.
    """
    data = text.encode() if isinstance(text, str) else text
    return bytes(b if b in _WORD_BYTES else 32 for b in data.lower()).decode().split()


def words_of(text: str | bytes) -> list[str]:
    """The stems of a text's words in order, stop words left out."""
    return [stem(word) for word in plain_words(text) if word not in STOP_WORDS]


def build_index(documents: Iterable[str]) -> Index:
    """The index of a collection.

    BM25 as Lucene computes it (Kamphuis et al., "Which BM25 do you mean?", 2020, table
    1): log(1 + (D - n + 0.5) / (n + 0.5)) * f / (f + K1 * (1 - B + B * length / mean)).

    Raises:
      ValueError: if there are no words, too many documents, or a word is too long.
    """
    texts = [words_of(document) for document in documents]
    if not 0 < len(texts) <= MAX_DOCUMENTS:
        raise ValueError(
            f"a collection of {len(texts)} documents cannot be searched: supply 1 to"
            f" {MAX_DOCUMENTS}"
        )
    words = sorted({word for text in texts for word in text})
    if not words or len(longest := max(words, key=len)) > LONGEST_WORD:
        what = f"holds the word {longest!r}" if words else "holds no words"
        raise ValueError(
            f"a collection that {what} cannot be searched: its words have 1 to"
            f" {LONGEST_WORD} ASCII letters and digits"
        )
    exact = _bm25(texts, words)
    step = float(exact.max()) / _MOST_WEIGHT
    weights = np.pad(np.rint(exact / step), ((0, 1), (0, 0)))
    return index_words(words, weights, step)


def index_words(words: Sequence[str], weights: np.ndarray, step: float) -> Index:
    """The index of words in alphabetical order. Raises ValueError if hashes collide."""
    packed = np.stack([_pack(word.encode()) for word in words])
    hashes = _hash(packed)
    # A collision has a probability of about 1 in 1,000 for 3,000 words.
    if len(set(hashes.tolist())) < len(words):
        raise ValueError(
            "two words of the collection have the same hash: change one, or the seed"
        )
    order = np.argsort(hashes)
    return Index(
        words=tuple(words),
        weights=weights.astype(np.int16),
        step=step,
        hashes=hashes[order],
        word_of_hash=order.astype(np.int32),
        packed=packed,
    )


def _bm25(texts: Sequence[Sequence[str]], words: Sequence[str]) -> np.ndarray:
    """float32[V, D], the BM25 of each word in each document."""
    number = {word: index for index, word in enumerate(words)}
    counts = np.zeros((len(words), len(texts)), np.float32)
    for document, text in enumerate(texts):
        for word, count in Counter(text).items():
            counts[number[word], document] = count
    lengths = np.array([len(text) for text in texts], np.float32)
    held_by = (counts > 0).sum(axis=1, keepdims=True)
    rarity = np.log1p((len(texts) - held_by + 0.5) / (held_by + 0.5))
    norm = K1 * (1 - B + B * lengths / lengths.mean())
    return (rarity * counts / (counts + norm)).astype(np.float32)


def read_query_text(index: Index, text: bytes) -> tuple[int, ...]:
    """int[W], the ids of a query's first known words, padded with NO_WORD."""
    number = {word: i for i, word in enumerate(index.words)}
    ids = [number[word] for word in words_of(text) if word in number][:QUERY_WORDS]
    return (*ids, *[NO_WORD] * (QUERY_WORDS - len(ids)))


def rank_text(index: Index, words: Sequence[int]) -> list[int]:
    """All documents that have a word of the query, best first, ties by index."""
    ids = [word for word in words if word != NO_WORD]
    scores = index.weights[ids].astype(np.int64).sum(axis=0)
    order = np.argsort(-scores, kind="stable")
    return [int(document) for document in order if scores[document] > 0]


def words_text(index: Index, words: Sequence[int]) -> str:
    """A query that consists of these words."""
    return " ".join(index.words[int(word)] for word in words if word != NO_WORD)


def _pack(word: bytes) -> np.ndarray:
    """uint32[4], the bytes of a word, four to a number, padded with 0."""
    padded = np.frombuffer(word.ljust(LONGEST_WORD, b"\0"), np.uint8)
    return (padded.reshape(4, 4).astype(np.uint32) << np.arange(0, 32, 8)).sum(
        axis=1, dtype=np.uint32
    )


def _hash(packed):
    """uint32[...] of uint32[..., 4]: FNV-1a over the four numbers, then bit mixing."""
    numpy = jnp if isinstance(packed, jax.Array) else np
    value = numpy.full(packed.shape[:-1], 2166136261, np.uint32)
    with np.errstate(over="ignore"):
        for part in range(4):
            value = (value ^ packed[..., part]) * np.uint32(16777619)
        value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        return value ^ (value >> np.uint32(13))


# On device -------------------------------------------------------------------------


def read_query(index: Index, text: jax.Array, length: jax.Array) -> jax.Array:
    """int32[W], what `read_query_text` returns.

    Args:
      index: static.
      text: uint8[N], static N.
      length: int32[], bytes that count; those behind are not read.
    """
    letters, count = split_words(text, length)
    most = letters.shape[0]
    is_stop = (find_words(_stop_words(), letters, count) >= 0) & (count <= LONGEST_WORD)
    letters, count = _stem(letters, count)
    word = jnp.where(is_stop, -1, find_words(index, letters, count))
    first = jnp.argsort(word < 0, stable=True)[:QUERY_WORDS]
    query = jnp.pad(word[first], (0, max(0, QUERY_WORDS - most)), constant_values=-1)
    return jnp.where(query >= 0, query, NO_WORD).astype(jnp.int32)


def enclosed(
    text: jax.Array, length: jax.Array, opening: bytes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The text between the brackets of an answer such as `search[...]`.

    Args:
      text: uint8[N], static N.
      length: int32[], its bytes.
      opening: such as b"search["; static.

    Returns:
      bool[], whether the answer has that form; uint8[N - len(opening)], the text from
      behind the opening on; int32[], its bytes before the last bracket.
    """
    head = jnp.asarray(np.frombuffer(opening, np.uint8))
    is_form = (text[: len(opening)] == head).all() & (length > len(opening))
    is_form &= text[length - 1] == ord("]")
    return is_form, text[len(opening) :], length - len(opening) - 1


def random_query(key: jax.Array, index: Index) -> jax.Array:
    """int[W], three words of the collection, each equally likely."""
    words = jax.random.randint(key, (QUERY_WORDS,), 0, len(index.words))
    return jnp.where(jnp.arange(QUERY_WORDS) < 3, words, NO_WORD)


def split_words(text: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of a text in order, not yet stemmed, stop words included.

    Args:
      text: uint8[N], static N.
      length: int32[], bytes that count; those behind are not read.

    Returns:
      uint8[n, LONGEST_WORD + 4], the words in lower case, n = (N + 1) // 2, longer ones
      cut off, padded with 0; int32[n], their lengths after that, 0 behind the last.
    """
    place = jnp.arange(text.shape[0])
    lower = jnp.where((text >= ord("A")) & (text <= ord("Z")), text + 32, text)
    is_letter = (lower >= ord("a")) & (lower <= ord("z"))
    is_digit = (lower >= ord("0")) & (lower <= ord("9"))
    is_word = (is_letter | is_digit) & (place < length)
    is_start = is_word & ~jnp.pad(is_word[:-1], (1, 0))
    most = (text.shape[0] + 1) // 2
    (starts,) = jnp.nonzero(is_start, size=most, fill_value=text.shape[0])
    # Four bytes more than a stem may have, as plurals are longer than their stems.
    within = jnp.arange(LONGEST_WORD + 4)[None]
    source = starts[:, None] + within
    source_in_text = jnp.minimum(source, text.shape[0] - 1)
    is_in_word = jnp.cumprod(is_word[source_in_text] & (source < text.shape[0]), axis=1)
    letters = jnp.where(is_in_word > 0, lower[source_in_text], 0).astype(jnp.uint8)
    count = is_in_word.sum(axis=1)
    return letters, count


def _stem(letters: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`stem` of words, uint8[n, L] padded with 0, and int32[n] their lengths."""

    def from_end(offset: int) -> jax.Array:
        at = jnp.clip(count - offset, 0)[:, None]
        byte = jnp.take_along_axis(letters, at, axis=1)[:, 0]
        return jnp.where(count >= offset, byte, 0)

    last, second, third, fourth = (from_end(offset) for offset in (1, 2, 3, 4))
    ends_s = last == ord("s")
    ends_es = ends_s & (second == ord("e"))
    ends_ies = ends_es & (third == ord("i"))
    is_ies = ends_ies & (fourth != ord("e")) & (fourth != ord("a"))
    is_es = ends_es & ~jnp.isin(third, jnp.array([*b"aeo"], jnp.uint8))
    is_s = ends_s & (second != ord("u")) & (second != ord("s"))
    is_ies &= count >= 4
    loses = jnp.where(is_ies, 3, jnp.where((is_es | is_s) & (count >= 4), 1, 0))
    place = jnp.arange(letters.shape[1])[None]
    count = count - loses
    letters = jnp.where(place < count[:, None], letters, 0)
    ends_y = is_ies[:, None] & (place == count[:, None])
    return jnp.where(ends_y, ord("y"), letters).astype(jnp.uint8), count + is_ies


def find_words(index: Index, letters: jax.Array, count: jax.Array) -> jax.Array:
    """int32[n], the id of the word in each row of uint8[n, L]; -1 if it is unknown."""
    fours = letters[:, :LONGEST_WORD].reshape(-1, 4, 4).astype(jnp.uint32)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)[None, None]
    packed = (fours << shifts).sum(axis=2, dtype=jnp.uint32)
    hashes = jnp.asarray(index.hashes)
    place = jnp.searchsorted(hashes, _hash(packed), method="compare_all")
    word = jnp.asarray(index.word_of_hash)[jnp.minimum(place, len(index.words) - 1)]
    is_same = (jnp.asarray(index.packed)[word] == packed).all(axis=1)
    return jnp.where(is_same & (count > 0) & (count <= LONGEST_WORD), word, -1)


@functools.cache
def _stop_words() -> Index:
    """An index of the stop words themselves, for `find_words`; it ranks nothing."""
    return index_words(sorted(STOP_WORDS), np.zeros((len(STOP_WORDS) + 1, 1)), 1.0)


def scores(index: Index, words: jax.Array) -> jax.Array:
    """int32[D], the score of every document in units of `index.step`.

    Args:
      index: static.
      words: int32[W], padded with NO_WORD; a word that occurs twice counts twice.
    """
    rows = jnp.where(words >= 0, words, len(index.words))
    return jnp.asarray(index.weights)[rows].astype(jnp.int32).sum(axis=0)


def top(
    scores: jax.Array, count: int, after: tuple[jax.Array, jax.Array] = FIRST
) -> tuple[jax.Array, jax.Array]:
    """The k best documents with a score above 0, best first, ties by index.

    Args:
      scores: int32[D], 0 to QUERY_WORDS * 32,767.
      count: k, static.
      after: int32[] score and int32[] index of a document: only documents that come
        after it in the ranking are returned. With FIRST, the default, that is all.

    Returns:
      int32[k], the documents, padded with NOTHING; int32[k], their scores, padded
      with 0.
    """
    starts = range(0, scores.shape[0], _PART)
    parts = [_top_of_part(scores[at : at + _PART], count, after, at) for at in starts]
    documents, values = (
        jnp.concatenate(several) for several in zip(*parts, strict=True)
    )
    if len(parts) > 1:  # Equal scores keep their order: lower indices first.
        # XLA has a fast top_k for floats only; they hold scores below 2^24 exactly.
        best, at = jax.lax.top_k(values.astype(jnp.float32), count)
        documents, values = documents[at], best.astype(jnp.int32)
    return documents, values


def _top_of_part(
    scores: jax.Array, count: int, after: tuple[jax.Array, jax.Array], start: int
) -> tuple[jax.Array, jax.Array]:
    """`top` of at most _PART documents, the first of which has the index `start`.

    A document's key is score * _PART + (_PART - 1 - index within the part). So keys
    differ, the largest belongs to the best document, and the index can be read from it.
    Each of the k steps takes the largest of the blocks' maxima and then replaces that
    block's maximum with its next smaller key: nothing is sorted.
    """
    blocks = -(-scores.shape[0] // _BLOCK)
    from_end = _PART - 1 - jnp.arange(scores.shape[0], dtype=jnp.int32)
    keys = jnp.where(scores > 0, scores * _PART + from_end, 0)
    score, document = after
    # The key of `after`, with its score bounded so that it fits int32.
    limit = jnp.minimum(score, 2**31 // _PART - 2) * _PART
    limit += _PART - 1 - jnp.clip(document - start, -1, _PART - 1)
    keys = jnp.pad(keys, (0, blocks * _BLOCK - keys.shape[0])).reshape(blocks, _BLOCK)
    best_of_block, best_keys = jnp.where(keys < limit, keys, 0).max(axis=1), []
    for _ in range(count):
        best = best_of_block.max()
        best_keys.append(best)
        # Once none is left, best is 0 and this is the last block: nothing changes.
        block = jnp.minimum((_PART - 1 - best % _PART) // _BLOCK, blocks - 1)
        remaining = keys[block]
        remaining = jnp.where(remaining < best, remaining, 0).max()
        is_here = jnp.arange(blocks) == block
        best_of_block = jnp.where(is_here, remaining, best_of_block)
    key = jnp.stack(best_keys)
    documents = jnp.where(key > 0, start + _PART - 1 - key % _PART, NOTHING)
    return documents.astype(jnp.int32), key // _PART
