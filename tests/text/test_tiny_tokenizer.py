"""The tokenizers of the embedded models, trained on a few words."""

from ragen_jax.text import tiny_tokenizer


def test_words_and_marks_are_one_token_each_and_the_size_counts_them():
    texts = ["the Librarian reads a book about the sea and the land of the free"] * 3
    tokenizer = tiny_tokenizer.train_tokenizer(
        texts, words=("Librarian",), marks=("##",), size=290
    )
    assert len(tokenizer) == 290
    # A word stands alone; a mark may be within another.
    pieces = tokenizer.tokenize("a Librarian Librarians a##b")
    assert pieces[:3] == ["a", "Ġ", "Librarian"]
    assert pieces[-3:] == ["Ġa", "##", "b"]
    assert pieces.count("Librarian") == 1 and "".join(pieces[3:-3]) == "ĠLibrarians"
