"""An exported agent's chat template writes what the agent was trained on."""

import copy
import dataclasses
import random

import pytest
from helpers import updates
from helpers.chat_templates import CHAT_ML, DATED, LLAMA, QWEN3, ZEPHYR
from helpers.models import make_tokenizer
from transformers import PreTrainedTokenizerFast

from ragen_jax.models.io import fingerprint, hugging_face, tokenizer_files
from ragen_jax.text import agent_template, chat_template

TEMPLATES = CHAT_ML | {"llama": LLAMA, "dated": DATED, "zephyr": ZEPHYR}
MESSAGE = "{{- '<' + message['role'] + '>' + message['content'] + eos_token -}}"
EACH = "{%- for message in messages -%}"
ASK = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"


def tokenizer_with(template) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(make_tokenizer())
    names = ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.bos_token = "<|begin|>"
    tokenizer.chat_template = template
    return tokenizer


def chat(texts) -> list[dict]:
    roles = ["system", *("user", "assistant") * len(texts)]
    return [
        {"role": role, "content": text}
        for role, text in zip(roles, texts, strict=False)
    ]


def written(folder, tokenizer) -> PreTrainedTokenizerFast:
    """As transformers alone reads it after `write`."""
    folder.mkdir(exist_ok=True)
    tokenizer_files.write(folder, tokenizer)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def ask(tokenizer, texts) -> str:
    return tokenizer.apply_chat_template(
        chat(texts), tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_writes_each_prompt_as_training_did(name, thinking, tmp_path):
    tokenizer = tokenizer_with(TEMPLATES[name])
    pieces = chat_template.cut_pieces(tokenizer, "m")
    agent, difference = agent_template.for_agent(tokenizer, pieces, thinking=thinking)
    assert difference == ""
    theirs, rng = written(tmp_path / "agent", agent), random.Random(0)
    alphabet = ["a", "b ", "\n", "{{ x }}", "'", "<think>", "</think>", "é", "think>"]
    for replies in [0, 1, 2, 4] * 20:
        texts = ["x" + "".join(rng.choices(alphabet[:5], k=4)) + "x"]
        for _ in range(replies + 1):
            texts.append("x" + "".join(rng.choices(alphabet[:5], k=4)) + "x")
            thought = "".join(rng.choices(alphabet, k=rng.randint(0, 6)))
            answer = "<answer>Down || Up</answer>"
            texts.append(f"<think>{thought}</think>{answer}" if thinking else answer)
        prefix = "<think>" if thinking else "<answer>"
        assert ask(theirs, texts[:-1]) == pieces.join(texts[:-1]) + prefix


@pytest.mark.parametrize("name", TEMPLATES)
def test_training_goes_on_from_an_export_with_the_models_own_template(name, tmp_path):
    tokenizer = tokenizer_with(TEMPLATES[name])
    pieces = chat_template.cut_pieces(tokenizer, "m")
    agent, _ = agent_template.for_agent(tokenizer, pieces, thinking=True)
    first = written(tmp_path / "first", agent)
    assert first.chat_template != tokenizer.chat_template
    back = hugging_face.read_tokenizer(tmp_path / "first")
    assert chat_template.cut_pieces(back, "m") == pieces
    assert fingerprint.of_tokenizer(back) == fingerprint.of_tokenizer(tokenizer)
    # Of what it then becomes, nothing is written twice.
    again, _ = agent_template.for_agent(back, pieces, thinking=True)
    assert written(tmp_path / "again", again).chat_template == first.chat_template
    path = tmp_path / "first" / "chat_template.jinja"
    path.write_text(path.read_text() + "\n")  # As by an editor.
    edited = hugging_face.read_tokenizer(tmp_path / "first")
    assert edited.chat_template == back.chat_template


def test_qwen3s_own_template_drops_earlier_thoughts_from_what_training_shows():
    """Else the test of prompts above would say nothing of it."""
    tokenizer = tokenizer_with(QWEN3)
    texts = ["s", "u", "<think>seen</think><answer>Up</answer>", "u"]
    assert "seen" in chat_template.cut_pieces(tokenizer, "m").join(texts)
    assert "seen" not in ask(tokenizer, texts)


def test_a_template_that_is_one_of_several_is_changed_where_it_is_the_default():
    named = {"default": QWEN3, "tool_use": ZEPHYR}
    tokenizer = tokenizer_with(named)
    pieces = chat_template.cut_pieces(tokenizer, "m")
    agent, difference = agent_template.for_agent(tokenizer, pieces, thinking=True)
    assert (difference, tokenizer.chat_template) == ("", named)
    assert agent.chat_template["tool_use"] == ZEPHYR
    texts = ["s", "u", "<think>seen</think><answer>Up</answer>", "u"]
    assert ask(agent, texts) == pieces.join(texts) + "<think>"


def test_thoughts_that_cannot_be_kept_are_disclosed():
    """This template cuts replies where no tag of a thought stands."""
    cut = MESSAGE.replace("['content']", "['content'].split('<answer>')[-1]")
    tokenizer = tokenizer_with(EACH + cut + ASK)
    pieces = chat_template.cut_pieces(tokenizer, "m")
    agent, difference = agent_template.for_agent(tokenizer, pieces, thinking=True)
    assert difference.startswith("the chat template drops thoughts of earlier replies")
    assert ask(agent, ["s", "u"]) == pieces.join(["s", "u"]) + "<think>"


def test_how_an_agent_was_sampled_is_told_where_it_is_unusual():
    usual = updates.settings().rollout
    assert agent_template.of_rollout(usual) == []
    unusual = dataclasses.replace(usual, stop_at_answer=True, history="single")
    stops, one = agent_template.of_rollout(unusual)
    assert "give '</answer>' as a stop text" in stops and "the last turn alone" in one
    three = dataclasses.replace(usual, history="window", window=3)
    assert "the last 3 turns alone" in agent_template.of_rollout(three)[0]


def test_a_template_that_cannot_be_continued_is_left_alone_and_disclosed():
    """It ends with white space, which whatever follows would remove."""
    message = MESSAGE.replace("'>'", "'>\\n'")
    template = EACH + message + "{%- endfor -%}{{- '<assistant>' }}\n\n"
    tokenizer = tokenizer_with(template)
    pieces = chat_template.cut_pieces(tokenizer, "m")
    assert pieces.before_reply.endswith("<assistant>\n")
    agent, difference = agent_template.for_agent(tokenizer, pieces, thinking=True)
    assert agent.chat_template == template
    assert "end prompts with '<think>', with which" in difference
