"""Tokenizers from the metadata of GGUF files, built without torch."""

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.models.io.gguf_file import GgufFile
from ragen_jax.text import agent_template, pinned_date

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens
# Texts of control tokens at which llama.cpp ends a generation: those of its list
# (special_eog_ids in src/llama-vocab.cpp) that end a turn or a text, not tool calls.
_ENDS = frozenset(
    [
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        *("<|end|>", "<|return|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"),
    ]
)
_END_NAMES = ("eot", "eom")  # beside "eos", parts of keys
_REMEDY = "take another GGUF file of the model, or its Hugging Face folder"
# Cuts words, numbers of up to N digits, signs and white space from each other, as the
# tokenizer.json of Qwen2 (N = 1) and Llama 3 (N = 3) do.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that Hugging Face's own files of the model describe.

    Raises:
      UserError: if the file describes none, or one of a kind that is not supported.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind != "gpt2":
        raise UserError(
            f"{file.path}: tokenizer.ggml.model = {kind!r} is not supported; choose a"
            " model with a byte-level BPE tokenizer ('gpt2'), such as Qwen, Llama 3 or"
            " SmolLM2"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; choose a"
            f" model whose text is cut as by {', '.join(_PRE_TOKENIZERS)}"
        )
    try:
        return _wrap(_byte_level(file, pre), file)
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:  # Damaged metadata may raise anything, a panic too.
        raise UserError(
            f"{file.path} has no tokenizer that can be read"
            f" ({type(error).__name__}: {error}".splitlines()[0]
            + f"); {_REMEDY}"
        ) from None


def stop_tokens(file: GgufFile) -> tuple[int, ...]:
    """Ids at which llama.cpp ends a reply, beside the end of text.

    The file has no list of them, as generation_config.json is: it names up to two, and
    the others are known by their texts.

    Raises:
      UserError: if it names what is no token of it, or a piece of ordinary text.
    """
    metadata = file.metadata
    texts = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    ends = {
        index
        for index, (text, kind) in enumerate(zip(texts, types, strict=False))
        if kind == _CONTROL and text in _ENDS
    }
    end_of_text = _token_id(file, "eos")
    for name in _END_NAMES:
        index = _token_id(file, name)
        if index is None:
            continue
        kind = types[index] if index < len(types) else None
        if kind not in (_CONTROL, _USER_DEFINED) and index != end_of_text:
            raise UserError(
                f"{file.path}: tokenizer.ggml.{name}_token_id = {index} is"
                f" {texts[index]!r:.40}, a piece of ordinary text; {_REMEDY}"
            )
        ends.add(index)
    return tuple(sorted(ends))


def _token_id(file: GgufFile, name: str) -> int | None:
    """The id of the token that has this part: "bos", "eos", ... None: no token has.

    Raises:
      UserError: if it is the id of no token.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    index = file.metadata.get(key)
    if index is None or (type(index) is int and 0 <= index < count):
        return index
    raise UserError(
        f"{file.path}: {key} = {index!r:.40} is none of its {count} tokens; {_REMEDY}"
    )


def _byte_level(file: GgufFile, pre: str) -> tokenizers.Tokenizer:
    metadata = file.metadata
    texts = metadata["tokenizer.ggml.tokens"]
    types = list(metadata.get("tokenizer.ggml.token_type", [1] * len(texts)))
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    vocabulary = {
        text: index
        for index, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind != _UNUSED  # Fills up the embedding and stands for no text.
    }
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(text, special=is_special, normalized=False)
            for text, type_ in zip(texts, types, strict=True)
            if type_ == kind
        ]
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add(added)
    bos = _token_id(file, "bos")
    if bos is not None and metadata.get(
        "tokenizer.ggml.add_bos_token", pre == "llama-bpe"
    ):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{texts[bos]} $A", special_tokens=[(texts[bos], bos)]
        )
    return tokenizer


def _wrap(tokenizer: tokenizers.Tokenizer, file: GgufFile) -> PreTrainedTokenizerFast:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{ours}_token": _token_id(file, theirs) for ours, theirs in names.items()}
    texts = file.metadata["tokenizer.ggml.tokens"]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: texts[index] for name, index in ids.items() if index is not None},
    )
    wrapped.chat_template = pinned_date.change_each(
        file.metadata.get("tokenizer.chat_template"), agent_template.original
    )
    return wrapped


def _whole_words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_SPLIT.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


# tokenizer.ggml.pre -> how text is cut before merging.
_PRE_TOKENIZERS = {
    "smollm": _single_digits,
    "qwen2": lambda: _whole_words(""),
    "llama-bpe": lambda: _whole_words("{1,3}"),
}
