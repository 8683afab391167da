"""A tokenizer's files: checked, and written so that transformers 4 and 5 read them."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.text import pinned_date
from ragen_jax.utils import json_files

CONFIG = "tokenizer_config.json"
# What transformers 5 notes on how the tokenizer was read.
_ORIGIN = ("is_local", "local_files_only", "backend")
# transformers 4 adds token_type_ids otherwise, and its `generate` refuses a call that
# brings what the model does not take.
_INPUTS = ["input_ids", "attention_mask"]
# Unicode's normal forms. Others may alter every letter, or write it as a million.
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


def check(path: Path) -> None:
    """Refuses a tokenizer.json that cuts texts at random or is free to change them.

    To be called before a library reads the file, as that normalizes added tokens.

    Args:
      path: the file.

    Raises:
      UserError: if it drops merges at random, or has a normalizer that is none of
        Unicode's forms.
      OSError, ValueError: if it cannot be read as JSON.
    """
    written = json_files.read_object(path)
    for kind in _normalizers(written.get("normalizer")):
        if kind not in _NORMALIZERS:
            raise UserError(
                f"{path}: its normalizer {kind!r:.40} is not supported; choose a model"
                " with a byte-level BPE tokenizer that leaves texts as they are, such"
                " as Qwen, Llama 3 or SmolLM2"
            )
    model = written.get("model")
    if isinstance(model, dict) and (dropout := model.get("dropout")):
        raise UserError(
            f"{path}: with model.dropout = {dropout!r:.40} texts are cut into tokens at"
            " random: write null there"
        )


def _normalizers(described: Any) -> Iterator[Any]:
    """The types of a normalizer and, in place of a sequence, of its parts."""
    if not isinstance(described, dict):
        if described is not None:
            yield described
    elif described.get("type") == "Sequence":
        for part in described.get("normalizers", ()):
            yield from _normalizers(part)
    else:
        yield described.get("type")


def write(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template.

    transformers 5 writes a class and a list of special tokens under names that
    transformers 4 does not know, and it still reads the names that both know. A
    template that asks for the day's date says the one with which the model was trained.

    Args:
      folder: exists.
      tokenizer: with its chat template, or without one; it stays as it is.
    """
    saved = copy.copy(tokenizer)
    saved.chat_template = pinned_date.change_each(
        tokenizer.chat_template, pinned_date.pin
    )
    saved.save_pretrained(folder)
    path = folder / CONFIG
    written = json.loads(path.read_text(encoding="utf-8"))
    for key in _ORIGIN:
        written.pop(key, None)
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    written["model_input_names"] = _INPUTS
    if isinstance(written.get("extra_special_tokens"), list):
        written["additional_special_tokens"] = written.pop("extra_special_tokens")
    text = json.dumps(written, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
