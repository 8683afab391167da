"""Compares a model's GGUF file, read and run here, with transformers' reading of it.

  pip install torch transformers accelerate gguf
  python tests/golden/compare_gguf.py FILE.gguf

Prints how far the logits of four prompts are apart at most, how many greedy tokens of
50 prompts agree where the best is ahead by more than 1e-3, and which texts are cut into
other tokens. A tied embedding that the file holds twice is taken in the finer copy; so
transformers is given that one too, for it reads both.
"""

import os
import runpy
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_jax.models import parameters, transformer
from ragen_jax.models.io import partial_reads
from ragen_jax.models.io.sources import Source

golden = runpy.run_path(str(Path(__file__).with_name("make_smollm2.py")))
CLEAR = 1e-3  # margin of the best logit


def reference(path: Path, is_tied: bool):
    """transformers' tokenizer, and its model in float32."""
    where = dict(gguf_file=path.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **where
    ).eval()
    if is_tied:
        model.get_input_embeddings().weight.data = model.lm_head.weight.data
    return tokenizer, model


def main(path: Path) -> None:
    source = Source(path, is_gguf=True)
    config, ours = source.read_config(), source.read_tokenizer()
    tokenizer, model = reference(path, config.tied)
    for text in golden["TEXTS"]:
        ids = [x.encode(text, add_special_tokens=False) for x in (ours, tokenizer)]
        if ids[0] != ids[1]:
            print(f"other tokens: {text!r} is {ids[0]} here and {ids[1]} there")
    declared = parameters.declare(config)
    weights = partial_reads.read_tree(
        source.open_parameters(config, declared), declared
    )
    weights = jax.tree.map(jnp.asarray, weights)

    @jax.jit
    def logits_of(tokens):
        states = transformer.hidden_states(weights, tokens, config)
        return transformer.vocabulary_logits(weights, states)

    chats = [
        ours.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for text in golden["CHATS"]
    ]
    apart, agreed, clear = 0.0, 0, 0
    texts = [*chats, *golden["PLAIN"]]
    prompts = [ours.encode(text, add_special_tokens=False) for text in texts]
    longest = max(map(len, prompts)) + golden["NEW"]
    for number, ids in enumerate(prompts):
        added, margins = golden["_continue"](model, ids)
        row = np.zeros((1, longest), np.int32)  # One shape: compiled once.
        row[0, : len(ids) + len(added)] = ids + added
        found = np.asarray(logits_of(row))[0, : len(ids) + len(added)]
        if number < golden["ROWS"]:
            with torch.no_grad():
                wanted = model(torch.tensor([ids + added])).logits[0].numpy()
            apart = max(apart, float(np.abs(found - wanted).max()))
        is_clear = np.array(margins) > CLEAR
        same = found[len(ids) - 1 : -1].argmax(-1) == added
        agreed, clear = agreed + (same & is_clear).sum(), clear + is_clear.sum()
        print(f"\r{number + 1} of {len(prompts)} prompts", end="", flush=True)
    print(f"\nlogits differ by {apart:.2g} at most")
    print(f"greedy tokens agree: {agreed} of {clear} with a margin above {CLEAR:g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
