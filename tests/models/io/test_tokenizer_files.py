"""Tokenizers are written as transformers 4 and 5 both read them, and stay the same."""

import copy
import json

import pytest
from helpers import models

from ragen_jax.errors import UserError
from ragen_jax.models.io import fingerprint, hugging_face, tokenizer_files
from ragen_jax.models.presets import EMBEDDED
from ragen_jax.text import chat_template

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


def test_a_written_tokenizer_gives_what_the_model_takes_and_no_more(tmp_path):
    """Else transformers 4 adds token_type_ids, which `generate` refuses."""
    tokenizer_files.write(tmp_path, models.make_tokenizer())
    names = ["input_ids", "attention_mask"]
    assert config_of(tmp_path)["model_input_names"] == names
    assert list(hugging_face.read_tokenizer(tmp_path)(TEXT)) == names


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


def _written(folder, **changes) -> dict:
    """A good folder's tokenizer.json, with changes in it."""
    tokenizer_files.write(folder, models.make_tokenizer())
    written = json.loads((folder / "tokenizer.json").read_text())
    written["normalizer"] = changes.get("normalizer")
    written["model"]["dropout"] = changes.get("dropout")
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return written


_LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REFUSED = {
    "longer": (dict(normalizer=_LONGER), "its normalizer 'Replace' is not supported"),
    "in a sequence": (
        dict(
            normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, _LONGER]}
        ),
        "its normalizer 'Replace' is not supported",
    ),
    "of no type": (dict(normalizer=_LONGER | {"type": None}), "its normalizer None is"),
    "dropout": (dict(dropout=0.9), "with model.dropout = 0.9 texts are cut into"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_changes_texts_or_cuts_them_at_random_is_not_loaded(
    case, tmp_path, monkeypatch
):
    changes, said = REFUSED[case]
    _written(tmp_path, **changes)
    monkeypatch.delattr(hugging_face, "PreTrainedTokenizerFast")
    with pytest.raises(UserError, match=rf"tokenizer\.json: {said}"):
        hugging_face.read_tokenizer(tmp_path)


def test_unicodes_forms_are_read_and_no_others_file_is_taken(tmp_path):
    forms = [{"type": "NFC"}, {"type": "Sequence", "normalizers": []}]
    changes = dict(normalizer={"type": "Sequence", "normalizers": forms}, dropout=0.0)
    written = _written(tmp_path, **changes)
    other = json.dumps(written | {"normalizer": {"type": "Lowercase"}})
    (tmp_path / "tokenizer.5.0.0.json").write_text(other)
    named = config_of(tmp_path) | {"fast_tokenizer_files": ["tokenizer.5.0.0.json"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    found = hugging_face.read_tokenizer(tmp_path)
    assert found.encode(TEXT) == models.make_tokenizer().encode(TEXT)


# In the manner of Llama 3.2.
DATED = """\
{%- if strftime_now is defined %}{% set today = strftime_now('%d %B %Y') %}
{%- else %}{% set today = 'unknown' %}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if loop.first %}{{- 'Today is ' + today + '.\n' }}{% endif %}
{{- message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def test_whoever_reads_a_written_template_sees_the_date_of_training(tmp_path):
    tokenizer = copy.copy(models.make_tokenizer())
    tokenizer.chat_template = DATED
    pieces = chat_template.cut_pieces(tokenizer, "m")
    assert "Today is 26 July 2024.\n" in pieces.before_system
    texts = ["be brief", "a", "b", "c"]
    roles = ["system", "user", "assistant", "user"]
    chat = [dict(role=r, content=t) for r, t in zip(roles, texts, strict=True)]
    wanted = pieces.join(texts)
    for name in ("one", "again"):  # The second is written of what the first holds.
        (tmp_path / name).mkdir()
        tokenizer_files.write(tmp_path / name, tokenizer)
        back = hugging_face.read_tokenizer(tmp_path / name)
        made = back.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert made == wanted
        assert chat_template.cut_pieces(back, "m") == pieces
        assert fingerprint.of_tokenizer(back) == fingerprint.of_tokenizer(tokenizer)
        assert back.chat_template.count("macro strftime_now") == 1
        tokenizer = back


def test_templates_that_a_tokenizer_has_by_name_say_the_date_too(tmp_path):
    tokenizer = copy.copy(models.make_tokenizer())
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": DATED}
    tokenizer_files.write(tmp_path, tokenizer)
    assert tokenizer.chat_template == {"default": plain, "tool_use": DATED}
    back = hugging_face.read_tokenizer(tmp_path)
    assert back.chat_template["default"] == plain
    assert back.chat_template["tool_use"].startswith("{%- macro strftime_now")
    assert fingerprint.of_tokenizer(back) == fingerprint.of_tokenizer(tokenizer)
