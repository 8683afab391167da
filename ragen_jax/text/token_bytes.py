"""The bytes that each token of a byte-level BPE tokenizer stands for."""

import json

from transformers import PreTrainedTokenizerFast


def token_bytes(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int | None = None
) -> tuple[bytes, ...]:
    """V byte strings: what token v adds to a text, by its id.

    The bytes of a token need not be whole characters, but those of a sequence,
    joined, are the text's UTF-8. Special tokens add nothing, and neither do ids
    that stand for no token.

    Args:
      tokenizer: must be byte-level: GPT-2, Llama 3, Qwen and SmolLM2 are.
      vocab_size: V, the width of the model's logits, which may exceed the
        tokenizer's highest id; by default that id plus 1.

    Raises:
      ValueError: if the tokenizer is not byte-level or has ids beyond `vocab_size`.
    """
    _check_byte_level(tokenizer)
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    ids = highest_id(tokenizer) + 1
    if vocab_size is not None and vocab_size < ids:
        raise ValueError(
            f"the tokenizer's ids reach {ids - 1}, beyond {vocab_size=}: pass the"
            " vocabulary size of the model that the tokenizer belongs to"
        )

    table = [b""] * (vocab_size or ids)
    byte_of = _byte_of_character()
    for token, index in vocabulary.items():
        table[index] = _ordinary_bytes(token, byte_of)
    for index, added_token in added.items():
        table[index] = b"" if added_token.special else added_token.content.encode()
    for index in tokenizer.all_special_ids:
        table[index] = b""
    return tuple(table)


def highest_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The largest id of a token, added ones among them; below it there may be gaps."""
    return max([*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder])


def _check_byte_level(tokenizer: PreTrainedTokenizerFast) -> None:
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    parts = decoder.get("decoders", [decoder])
    kinds = [part.get("type", "none") for part in parts]
    if "ByteLevel" not in kinds:
        raise ValueError(
            f"{type(tokenizer).__name__} decodes with {', '.join(kinds)}, not with"
            " ByteLevel: choose a model with a byte-level BPE tokenizer, such as"
            " Qwen, Llama 3 or SmolLM2"
        )


def _ordinary_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """A token with a character outside the alphabet is plain text, as in decoding."""
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: the 256 characters that stand for bytes inside tokens.

    Printable Latin-1 characters stand for their own code; the other bytes, in
    order, are written as the characters from U+0100 on. Source: `bytes_to_unicode`
    of GPT-2, Radford et al. 2019, released code.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return alphabet
