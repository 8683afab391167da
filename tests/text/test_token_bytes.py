"""token_bytes against the tokenizer's own decoding."""

import copy
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen_jax.text.token_bytes import highest_id, token_bytes

CORPUS = [
    "<think>go left</think><answer>left || up</answer>",
    "ça va 你好 🙂🙃\n\t x",
] * 9


@pytest.fixture(scope="module", params=[True, False], ids=["words", "whole texts"])
def tokenizer(request):
    """A byte-level BPE of whole words, or of merges across words and tags."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=request.param
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    wrapped.add_tokens(["<tool call>", "世界"])
    return wrapped


def test_joined_bytes_are_what_the_tokenizer_decodes(tokenizer):
    table = token_bytes(tokenizer)
    random_ids = random.Random(0)
    sequences = [
        random_ids.choices(range(len(table)), k=random_ids.randint(0, 12))
        for _ in range(3000)
    ]
    decoded = tokenizer.batch_decode(
        sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # Joined first and decoded then: a character may be spread over several tokens.
    joined = [b"".join(table[i] for i in ids) for ids in sequences]
    assert decoded == [text.decode(errors="replace") for text in joined]


def test_bytes_of_an_encoded_text_are_its_utf8(tokenizer):
    table = token_bytes(tokenizer)
    for text in [*CORPUS[:2], "Ġ Ă\x00\x7f ñ\r\n", "a<tool call>b世界c"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(table[i] for i in ids) == text.encode()


def test_every_single_byte_has_a_token(tokenizer):
    assert {bytes([byte]) for byte in range(256)} <= set(token_bytes(tokenizer))


def test_special_tokens_and_ids_without_a_token_give_no_bytes(tokenizer):
    used = len(token_bytes(tokenizer))
    assert token_bytes(tokenizer, vocab_size=used) == token_bytes(tokenizer)
    table = token_bytes(tokenizer, vocab_size=used + 7)
    assert len(table) == used + 7
    assert table[tokenizer.convert_tokens_to_ids("<|im_end|>")] == b""
    assert table[tokenizer.convert_tokens_to_ids("<tool call>")] == b"<tool call>"
    assert table[used:] == (b"",) * 7
    named = copy.deepcopy(tokenizer)
    named.pad_token = "<tool call>"  # Special by its role.
    assert token_bytes(named)[named.convert_tokens_to_ids("<tool call>")] == b""


def test_rejects_a_vocabulary_smaller_than_the_tokenizers(tokenizer):
    with pytest.raises(ValueError, match="vocab_size=290"):
        token_bytes(tokenizer, vocab_size=290)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_rejects_a_tokenizer_that_is_not_byte_level(decoder):
    words = tokenizers.Tokenizer(models.WordLevel({"left": 0, "?": 1}, unk_token="?"))
    if decoder is not None:
        words.decoder = decoder
    with pytest.raises(ValueError, match="not with ByteLevel"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=words))


def test_the_highest_id_is_not_the_number_of_tokens():
    words = tokenizers.Tokenizer(models.WordLevel({"left": 0, "up": 7}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert (len(tokenizer), highest_id(tokenizer)) == (2, 7)
    tokenizer.add_tokens(["down"])
    assert highest_id(tokenizer) == max(tokenizer.get_vocab().values())
