"""A tokenizer's files, written so that transformers 4 and 5 both read them."""

import copy
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ragen_jax.text import pinned_date

CONFIG = "tokenizer_config.json"
# What transformers 5 notes on how the tokenizer was read.
_ORIGIN = ("is_local", "local_files_only", "backend")
# transformers 4 adds token_type_ids otherwise, and its `generate` refuses a call that
# brings what the model does not take.
_INPUTS = ["input_ids", "attention_mask"]


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
