"""Replies parse alike whether the tags of a thought are single tokens or several."""

import random
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers.paths import GOLDEN
from tokenizers import decoders, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen_jax.text import reference_parser, reply_parser, token_bytes

TEXTS = runpy.run_path(str(GOLDEN / "make_smollm2.py"))["TEXTS"]
NAMES = ("Left", "Down", "Right", "Up")
MOST, LONGEST = 3, 64
PARTS = (
    "</think>",
    "<answer>",
    "</answer>",
    "Left",
    " || ",
    "Up",
    "<think>",
    "hm",
    "\n",
)


@pytest.fixture(scope="module", params=["Qwen3", "Qwen2.5"])
def tokenizer(request):
    """Byte-level BPE; <think> and </think> are added, not special, as in Qwen3."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator([*TEXTS] * 3, trainer)
    if request.param == "Qwen3":
        tags = ("<think>", "</think>")
        bpe.add_tokens([tokenizers.AddedToken(x, normalized=False) for x in tags])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    is_single = len(wrapped.encode("<think>")) == 1
    assert is_single == (request.param == "Qwen3")
    return wrapped


def test_replies_mean_what_their_text_says(tokenizer):
    table = token_bytes.token_bytes(tokenizer)
    assert b"".join(table[i] for i in tokenizer.encode("<think>")) == b"<think>"
    tables = reply_parser.reply_tables(table, NAMES, b"<think>", thinking=True)
    rng = random.Random(0)
    texts = ["a plan</think>\n<answer>Up || Left</answer>"]
    texts += ["".join(rng.choices(PARTS, k=rng.randint(0, 7))) for _ in range(300)]
    moves = [" || ".join(rng.choices(NAMES, k=k)) for k in (1, 2, 4) * 20]
    texts += [f"hm<think></think>\n<answer>{some}</answer>" for some in moves]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [tokenizer.encode(text) for text in texts]
    padded = np.array([row + [end] * (LONGEST - len(row)) for row in ids], np.int32)

    @jax.jit
    @jax.vmap
    def read(tokens):
        def step(reply, token):
            return reply_parser.read_token(tables, reply, token), None

        reply, _ = jax.lax.scan(step, reply_parser.start_reply(tables, MOST), tokens)
        valid = reply_parser.is_valid(tables, reply)
        return reply_parser.final_actions(tables, reply), valid

    actions, valid = jax.device_get(read(jnp.asarray(padded)))
    for text, found, is_valid in zip(texts, actions, valid, strict=True):
        wanted = reference_parser.parse_reply(
            b"<think>", text.encode(), NAMES, MOST, True
        )
        assert tuple(found[found >= 0].tolist()) == wanted.actions, text
        assert is_valid == wanted.is_valid, text
    assert actions[0].tolist() == [3, 0, -1] and valid[0]
    assert 60 < valid.sum() < 100
