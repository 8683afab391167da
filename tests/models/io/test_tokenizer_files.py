"""Tokenizers are written as transformers 4 and 5 both read them, and stay the same."""

import copy
import json

import pytest
from helpers import models

from ragen_jax.models.io import hugging_face, tokenizer_files
from ragen_jax.models.presets import EMBEDDED

TEXT = "<|im_start|>user\nAt (2, 3): Down || Right don't <|im_end|>\n"


def config_of(folder) -> dict:
    return json.loads((folder / "tokenizer_config.json").read_text())


def check_names(written: dict) -> None:
    """Fails for names that transformers 4 has not heard of."""
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in written and "is_local" not in written
    assert not isinstance(written.get("extra_special_tokens"), list)


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_models_tokenizer_is_written_as_it_comes(name, tmp_path):
    check_names(config_of(EMBEDDED[name]))
    tokenizer_files.write(tmp_path, hugging_face.read_tokenizer(EMBEDDED[name]))
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / file).read_bytes() == (EMBEDDED[name] / file).read_bytes()
    written = config_of(tmp_path)
    assert written | config_of(EMBEDDED[name]) == written


def test_a_written_tokenizer_has_the_names_and_tokens_that_it_had(tmp_path):
    tokenizer = copy.deepcopy(models.make_tokenizer())
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|one|>", "<|two|>"]})
    tokenizer_files.write(tmp_path, tokenizer)
    written = config_of(tmp_path)
    check_names(written)
    assert written["additional_special_tokens"] == ["<|one|>", "<|two|>"]
    back = hugging_face.read_tokenizer(tmp_path)
    assert back.extra_special_tokens == ["<|one|>", "<|two|>"]
    assert back.all_special_tokens == tokenizer.all_special_tokens
    assert back.encode(TEXT + "<|two|>") == tokenizer.encode(TEXT + "<|two|>")
