"""Tokenizers from GGUF files against tokenizers built as their makers' files say."""

import json
import runpy
import types

import pytest
import tokenizers
from helpers import models
from helpers.gguf_files import refusal, write
from helpers.paths import GOLDEN
from tokenizers import decoders, normalizers, pre_tokenizers, trainers

from ragen_jax.models.io import gguf, gguf_tokenizer, sources

TEXTS = runpy.run_path(str(GOLDEN / "make_smollm2.py"))["TEXTS"]
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = models.small_config(40)
LLAMA = models.small_config(40, family="llama", qkv_bias=False)
# As the tokenizer.json of SmolLM2, Qwen2.5 and Llama 3 say.
_WORDS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|%s|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def _cut(digits: str) -> list:
    pattern = tokenizers.Regex(_WORDS % digits)
    return [
        pre_tokenizers.Split(pattern, behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


CUTS = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": _cut("\\p{N}"),
    "llama-bpe": _cut("\\p{N}{1,3}"),
}


def reference(pre: str) -> tokenizers.Tokenizer:
    """A BPE trained on the texts, with control and user-defined tokens."""
    is_llama = pre == "llama-bpe"
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=is_llama))
    made.pre_tokenizer = pre_tokenizers.Sequence(CUTS[pre])
    made.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS] * 3, trainer)
    made.add_special_tokens([*CONTROL])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return made


def metadata_of(made: tokenizers.Tokenizer, pre: str) -> dict:
    """The metadata of a tokenizer."""
    texts = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    types = {"<think>": 4} | dict.fromkeys(CONTROL, 3)
    merges = json.loads(made.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*texts, "[PAD1]"],
        "tokenizer.ggml.token_type": [*(types.get(text, 1) for text in texts), 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": texts.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": texts.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": texts.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.mark.parametrize("pre", CUTS)
def test_a_files_tokenizer_cuts_and_joins_text_as_the_original(tmp_path, pre):
    made = reference(pre)
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata_of(made, pre))
    found = gguf.read_tokenizer(path)
    for text in (*TEXTS, *map("".join, zip(TEXTS, TEXTS[1:], strict=False))):
        ids = made.encode(text).ids
        assert found.encode(text) == ids
        assert found.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert len(found) == made.get_vocab_size()  # Without what fills the embedding up.
    names = (found.bos_token, found.eos_token, found.pad_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    added = {x.content: x.special for x in found.added_tokens_decoder.values()}
    assert added == {name: True for name in names} | {"<think>": False}
    chat = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(chat, tokenize=False) == "hi"


def test_a_beginning_of_text_is_added_where_the_file_asks_for_it(tmp_path):
    metadata = metadata_of(reference("llama-bpe"), "llama-bpe")
    metadata["tokenizer.ggml.add_bos_token"] = None  # Llama 3 does.
    found = gguf.read_tokenizer(write(tmp_path / "m.gguf", LLAMA, {}, **metadata))
    bare = found.encode("a b", add_special_tokens=False)
    assert found.encode("a b") == [found.bos_token_id, *bare]


def test_a_piece_that_is_a_token_of_llama_3_needs_no_merges(tmp_path):
    metadata = metadata_of(reference("llama-bpe"), "llama-bpe")
    merges = metadata["tokenizer.ggml.merges"]
    words = [pair.replace(" ", "") for pair in merges]
    last = max(i for i, x in enumerate(words) if x.isascii() and x.isalpha())
    metadata["tokenizer.ggml.merges"] = merges[:last] + merges[last + 1 :]
    path = write(tmp_path / "m.gguf", LLAMA, {}, **metadata)
    assert gguf.read_tokenizer(path).tokenize(words[last]) == [words[last]]


def test_a_file_stops_where_the_models_folder_does(tmp_path):
    """Qwen2.5's generation_config.json has both ends, its GGUF file one of them."""
    metadata = metadata_of(reference("qwen2"), "qwen2")
    texts = metadata["tokenizer.ggml.tokens"]
    ends = [texts.index(text) for text in ("<|im_end|>", "<|endoftext|>")]
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata)
    # Not <|im_start|>, which is a control token too, nor <think>.
    assert sources.locate(str(path)).read_stop_tokens() == tuple(sorted(ends))


def test_a_text_that_is_no_control_token_does_not_end_a_reply(tmp_path):
    metadata = metadata_of(reference("qwen2"), "qwen2")
    texts = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"][texts.index("<|endoftext|>")] = 1
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata)
    assert gguf.read_stop_tokens(path) == (texts.index("<|im_end|>"),)


@pytest.mark.parametrize("name", ["eot", "eom"])
def test_an_end_that_a_file_names_ends_a_reply_if_it_is_a_token(name, tmp_path):
    metadata = metadata_of(reference("qwen2"), "qwen2")
    texts, key = metadata["tokenizer.ggml.tokens"], f"tokenizer.ggml.{name}_token_id"
    named = texts.index("<think>")
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata, **{key: named})
    assert named in gguf.read_stop_tokens(path)
    path = write(tmp_path / "n.gguf", QWEN2, {}, **metadata, **{key: len(texts)})
    message = refusal(gguf.read_stop_tokens, path)
    assert f"n.gguf: {key} = {len(texts)} is none of its {len(texts)} tokens" in message


def test_a_file_cannot_end_replies_at_a_piece_of_ordinary_text(tmp_path):
    metadata = metadata_of(reference("qwen2"), "qwen2")
    letter = metadata["tokenizer.ggml.tokens"].index("e")
    metadata["tokenizer.ggml.eot_token_id"] = letter
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata)
    message = refusal(gguf.read_stop_tokens, path)
    assert f"eot_token_id = {letter} is 'e', a piece of ordinary text; take" in message


BAD_TOKENIZERS = {
    "tokenizer.ggml.model": ("llama", "tokenizer.ggml.model = 'llama' is not support"),
    "tokenizer.ggml.pre": ("falcon", "tokenizer.ggml.pre = 'falcon' is not supported"),
    "tokenizer.ggml.merges": (["xyz"], "has no tokenizer that can be read"),
    "tokenizer.ggml.tokens": (["a"], "has no tokenizer that can be read"),
    "tokenizer.ggml.eos_token_id": (9999, "eos_token_id = 9999 is none of its"),
}


@pytest.mark.parametrize("key", BAD_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_built_is_one_sentence(tmp_path, key):
    value, message = BAD_TOKENIZERS[key]
    metadata = metadata_of(reference("smollm"), "smollm") | {key: value}
    path = write(tmp_path / "m.gguf", QWEN2, {}, **metadata)
    assert message in refusal(gguf.read_tokenizer, path)


@pytest.mark.parametrize("index", [-1, 2, True, 1.0, "b", ["a", "b"]])
def test_an_id_that_is_of_no_token_is_refused_by_name(index):
    key = "tokenizer.ggml.bos_token_id"
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], key: index}
    file = types.SimpleNamespace(path="m.gguf", metadata=metadata)
    said = refusal(gguf_tokenizer._token_id, file, "bos")
    assert said.startswith(f"m.gguf: {key} = {index!r} is none of its 2 tokens; take")
