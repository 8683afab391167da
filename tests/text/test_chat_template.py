"""Chat pieces, joined, are what the template itself makes of a conversation."""

import copy
import datetime
import json
import random
import subprocess
import sys
import venv

import pytest
import tokenizers
from helpers.chat_templates import CHAT_ML, DATED, LLAMA, QWEN2, ZEPHYR
from helpers.models import make_tokenizer
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.text import chat_template, pinned_date, template_process

_START = "{%- for message in messages -%}"
_MESSAGE = "{{- '<' + message['role'] + '>' + message['content'] + eos_token -}}"
_END = (
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)
REFUSED = {
    "drops the system prompt": (
        f"{_START}{{%- if message['role'] != 'system' -%}}{_MESSAGE}{{%- endif -%}}"
        f"{_END}",
        "drops or reorders",
    ),
    "writes the newest first": (
        f"{{%- for message in messages | reverse -%}}{_MESSAGE}{_END}",
        "drops or reorders",
    ),
    "writes the system prompt twice": (
        f"{{{{- messages[0]['content'] -}}}}{_START}{_MESSAGE}{_END}",
        "a text twice",
    ),
    "writes how long a text is": (
        f"{{{{- messages[0]['content'] | length -}}}}{_START}{_MESSAGE}{_END}",
        "not the same around every text",
    ),
    "draws at random": (
        f"{{{{- ['a'] | random -}}}}{_START}{_MESSAGE}{_END}",
        "'random'",
    ),
    "draws words at random": (
        f"{{{{- lipsum(1) -}}}}{_START}{_MESSAGE}{_END}",
        "'lipsum'",
    ),
    "drops earlier replies": (
        f"{_START}{{%- if message['role'] != 'assistant' -%}}{_MESSAGE}{{%- endif -%}}"
        f"{_END}",
        "drops or reorders",
    ),
    "takes no system prompt": (
        "{%- if messages[0]['role'] == 'system' -%}"
        "{{- raise_exception('System role not supported') -}}{%- endif -%}"
        f"{_START}{_MESSAGE}{_END}",
        "System role not supported",
    ),
    "closes a reply with plain text": (
        f"{_START}{{{{- message['role'] + ': ' + message['content'] + '.' -}}}}{_END}",
        "does not begin with a control token",
    ),
    "opens a new reply in another way": (
        f"{_START}{_MESSAGE}{_END}".replace("'<assistant>'", "'<assistant>\n'"),
        "in another way",
    ),
    "numbers its turns": (
        f"{_START}{_MESSAGE}{{{{- loop.index0 // 2 -}}}}{_END}",
        "in another way",
    ),
    "writes a long conversation in another way": (
        f"{_START}{_MESSAGE}{{%- if loop.index > 5 -%}}{{{{- '!' -}}}}{{%- endif -%}}"
        f"{_END}",
        "in another way",
    ),
}


def tokenizer_with(template: str | None, end: str = "<|im_end|>"):
    tokenizer = copy.deepcopy(make_tokenizer())
    names = ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module", params=["tiny", "llama", "zephyr", *CHAT_ML])
def tokenizer(request):
    if request.param == "tiny":
        return make_tokenizer()
    if request.param == "llama":
        return tokenizer_with(LLAMA, end="<|eot|>")
    if request.param in CHAT_ML:
        return tokenizer_with(CHAT_ML[request.param])
    return tokenizer_with(ZEPHYR)


def test_pieces_equal_the_template_on_random_conversations(tokenizer):
    pieces, rng = chat_template.cut_pieces(tokenizer, "m"), random.Random(0)
    alphabet = "ab {}'\"|<>\n√é🙂%"
    for replies in [0, 1, 2, 5] * 50:
        texts = [
            "x" + "".join(rng.choices(alphabet, k=rng.randint(0, 12))) + "x"
            for _ in range(2 + 2 * replies)
        ]
        roles = ["system", *("user", "assistant") * (replies + 1)]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=False)
        ]
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert pieces.join(texts) == whole


def test_the_end_of_turn_opens_what_follows_a_reply_and_stops_sampling(tokenizer):
    pieces = chat_template.cut_pieces(tokenizer, "m")
    assert pieces.after_reply.startswith(pieces.end_of_turn)
    assert tokenizer.convert_tokens_to_ids(pieces.end_of_turn) in pieces.stop_tokens


@pytest.mark.parametrize("name", ["tiny", *CHAT_ML])
def test_these_templates_pieces_are_chat_ml(name):
    tokenizer = make_tokenizer() if name == "tiny" else tokenizer_with(CHAT_ML[name])
    pieces = chat_template.cut_pieces(tokenizer, name)
    assert pieces.before_system == "<|im_start|>system\n"
    assert pieces.before_user == "<|im_end|>\n<|im_start|>user\n"
    assert pieces.before_reply == "<|im_end|>\n<|im_start|>assistant\n"
    assert pieces.after_reply == "<|im_end|>\n<|im_start|>user\n"
    assert pieces.end_of_turn == "<|im_end|>"


@pytest.mark.parametrize("format", ["%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%m/%d/%y"])
def test_a_date_that_the_template_asks_for_is_pinned(format):
    date = datetime.date(2024, 7, 26).strftime(format)
    assert datetime.date.today().strftime(format) != date
    template = DATED.replace("%d %b %Y", format)
    tokenizer = tokenizer_with(template, end="<|eot|>")
    tokenizer.bos_token = "<|begin|>"
    pieces = chat_template.cut_pieces(tokenizer, "m")
    assert pieces.before_system == (
        f"<|begin|><|header|>system<|/header|>\n\nToday is {date}.\n\n"
    )
    roles = ["system", *("user", "assistant") * 2, "user"]
    texts = ["be brief", "a", "b", "c", "d", "e"]
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
    ]
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string=date
    )
    assert pieces.join(texts) == whole
    assert tokenizer.chat_template == template
    pinned = pinned_date.pin(template)
    assert pinned_date.pin(pinned) == pinned
    assert pinned_date.unpin(pinned) == template


def test_an_end_of_text_token_stops_a_reply_too():
    tokenizer = tokenizer_with(LLAMA, end="<|endoftext|>")
    pieces = chat_template.cut_pieces(tokenizer, "m")
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|eot|>"])
    assert pieces.stop_tokens == tuple(sorted(ids))
    assert pieces.end_of_turn == "<|eot|>"


def test_what_the_models_makers_stop_at_stops_a_reply_too_if_the_tokenizer_has_it():
    tokenizer = tokenizer_with(LLAMA)
    own = chat_template.cut_pieces(tokenizer, "m").stop_tokens
    another = next(i for i in tokenizer.added_tokens_decoder if i not in own)
    pieces = chat_template.cut_pieces(tokenizer, "m", (*own, another))
    assert pieces.stop_tokens == tuple(sorted({*own, another}))
    with pytest.raises(UserError, match=r"^m: generation_config\.json, or"):
        chat_template.cut_pieces(tokenizer, "m", (len(tokenizer),))


def test_a_token_behind_a_gap_among_the_ids_may_end_a_reply():
    """There are fewer tokens than its id then."""
    highest = len(tokenizer_with(LLAMA)) + 100

    def with_a_gap(written: dict) -> None:
        written["model"]["vocab"]["<|stop|>"] = highest
        stop = written["added_tokens"][-1] | {"content": "<|stop|>", "id": highest}
        written["added_tokens"].append(stop)

    gapped = _edited(tokenizer_with(LLAMA), with_a_gap)
    assert len(gapped) < highest
    assert highest in chat_template.cut_pieces(gapped, "m", (highest,)).stop_tokens
    with pytest.raises(UserError, match=f"ids reach {highest}; take both from one"):
        chat_template.cut_pieces(gapped, "m", (highest + 1,))


def test_a_piece_of_ordinary_text_does_not_end_replies():
    tokenizer = tokenizer_with(LLAMA)
    letter = tokenizer.convert_tokens_to_ids("e")
    said = rf"ends replies at token {letter} \('e'\), which is a piece of ordinary text"
    with pytest.raises(UserError, match=said):
        chat_template.cut_pieces(tokenizer, "m", (letter,))


def test_a_text_before_the_end_of_turn_is_refused_though_the_token_swallows_it():
    """A reply that ends its turn itself would be closed a second time."""

    def swallow_spaces(written: dict) -> None:
        for token in written["added_tokens"]:
            token["lstrip"] |= token["content"] == "<|eot|>"

    spaced = tokenizer_with(LLAMA.replace("+ '<|eot|>'", "+ ' <|eot|>'"))
    greedy = _edited(spaced, swallow_spaces)
    first = greedy.encode(" <|eot|>", add_special_tokens=False)
    assert greedy.convert_ids_to_tokens(first) == ["<|eot|>"]
    with pytest.raises(UserError, match="does not begin with a control token"):
        chat_template.cut_pieces(greedy, "m")


def _edited(tokenizer, edit) -> PreTrainedTokenizerFast:
    """A tokenizer with its tokenizer.json changed."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(written)
    inner = tokenizers.Tokenizer.from_str(json.dumps(written))
    edited = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eot|>")
    edited.chat_template = tokenizer.chat_template
    return edited


@pytest.mark.parametrize("fault", REFUSED)
def test_a_template_that_cannot_be_continued_in_place_is_refused(fault):
    template, part = REFUSED[fault]
    with pytest.raises(UserError, match="^folder/x: the chat template .*; choose") as e:
        chat_template.cut_pieces(tokenizer_with(template), "folder/x")
    assert part in str(e.value)


def test_a_template_is_read_where_jinja_lies_on_pythons_path_alone(
    tmp_path, monkeypatch
):
    """As packages of a cluster's modules do, and those of `pip install --user`."""
    venv.create(tmp_path, symlinks=True)  # An interpreter that has no packages.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    tokenizer = tokenizer_with(QWEN2 + "{#- not rendered before -#}")
    wanted = chat_template.cut_pieces(tokenizer_with(QWEN2), "m")
    assert chat_template.cut_pieces(tokenizer, "m") == wanted


MACOS = """
import resource, runpy, sys
set_others = resource.setrlimit
def setrlimit(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    set_others(kind, limits)
resource.setrlimit = setrlimit
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_template_is_read_where_memory_cannot_be_limited():
    """As macOS answers: it maps gigabytes into each process, and refuses less."""
    messages = [{"role": "user", "content": "hi"}]
    given = dict(template=ZEPHYR, tokens={"eos_token": "."}, conversations=[messages])
    done = subprocess.run(
        [sys.executable, "-c", MACOS, template_process.__file__],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == {"texts": ["<user>\nhi.\n<assistant>\n"]}


def test_a_template_writes_json_as_it_is_and_no_more_than_a_megabyte_of_text():
    """Jinja's own filter writes "<" so that HTML may hold it."""
    given = dict(tokens={}, conversations=[[{"content": "<é>"}]])
    template = "{{ messages | tojson }}"
    found = template_process._render(given | dict(template=template))
    assert found == {"texts": ['[{"content": "<é>"}]']}
    template = "{{ 'x' * 1048577 }}"
    with pytest.raises(ValueError, match="it writes 1048577 characters"):
        template_process._render(given | dict(template=template))


def test_a_template_cannot_read_what_python_holds():
    """Jinja 3.1.5 let it, by a borrowed `format` (CVE-2025-27516)."""
    outside = "{{ ('{0.__call__.__globals__[sys].path}' | attr('format'))(dict) }}"
    with pytest.raises(UserError, match="access to attribute '__call__'"):
        chat_template.cut_pieces(tokenizer_with(outside + QWEN2), "m")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="^folder/x has no chat template; take"):
        chat_template.cut_pieces(tokenizer_with(None), "folder/x")
