"""The tokenizers of the embedded models: byte-level BPE of 1024 and of 2048 tokens.

Trained once on the words of FrozenLake, Sokoban and Bandit (`tiny`) or of SearchQA and
WebShop (`tiny_words`). A cell of a board and half a coordinate are one token each, so
that reading a board is a matter of attention and not of spelling; so is each name of an
arm of Bandit, and what ends a line of the shop's pages.
"""

import json
from collections.abc import Iterable, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
_SPACE = "Ġ"  # as byte-level BPE spells it
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# First match wins. Tags; a board's last cell with its newline; " (1" and ", 2)";
# decimals; words with their leading space; numbers; other symbols; white space.
_PIECES = "|".join(
    [
        r"</?[a-z]+>",
        r" \S\n",
        r" ?\(\d+",
        r", \d+\)",
        r" ?-?\d+\.\d",
        r" ?\p{L}+",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}<]+",
        r" ?<",
        r"\n",
        r"\s",
    ]
)

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What Sokoban and Bandit will say, so that they need no new tokenizer.
_OTHER_ENVIRONMENTS = """\
Push every box onto a target. You cannot pull a box or push two boxes at once. A box
against a wall may be stuck for good. # wall, _ floor, O target, X box, √ box on target,
P player, S player on target. Walls: Boxes: Targets: Player: The room has 6 rows and 6
columns. Up || Down || Left || Right. I push the box. Box at Target at.
Choose one of two slot machines, called arms, by its name. Each arm pays a reward drawn
from its own distribution. Think about what the names suggest. Arms: Librarian, Investor.
A careful safe steady choice pays little; a bold risky choice may pay much. Teacher Doctor
Engineer Trader Accountant Gambler Nurse Pilot Clerk Explorer Farmer Racer Banker Actor
"""  # noqa: E501


def train_tokenizer(
    texts: Iterable[str],
    words: Sequence[str] = (),
    marks: Sequence[str] = (),
    size: int = VOCABULARY,
) -> PreTrainedTokenizerFast:
    """Trains the tokenizer. The same texts in the same order give the same tokens.

    Args:
      texts: what the model will read and write.
      words: that are to be one token each, wherever they stand.
      marks: the same, within words too.
      size: tokens in all.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(words) - len(marks),
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if size == VOCABULARY:
        coordinates = "".join(f" ({r}, {c})" for r in range(10) for c in range(10))
        texts = [*texts, *[_OTHER_ENVIRONMENTS, coordinates] * 20]
    tokenizer.train_from_iterator(texts, trainer)
    fast = _with_template(tokenizer)
    add_words(fast, words)
    fast.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return fast


def with_cells(
    tokenizer: PreTrainedTokenizerFast, symbols: Iterable[str]
) -> PreTrainedTokenizerFast:
    """A tokenizer to which each symbol with its leading space is one token, as well.

    The new tokens are the last merges: a text is cut as before, but for a space and a
    letter that were two pieces next to each other. Their ids come before those of
    `add_words`, which move up, as the library gives such words ids behind all merges.

    Args:
      tokenizer: one of `train_tokenizer`'s.
      symbols: one ASCII character each, or one that is a token already.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    first = 1 + max(model["vocab"].values())
    new = [s for s in symbols if len(tokenizer.tokenize(f" {s}")) > 1]
    for token_id, symbol in enumerate(new, first):
        model["vocab"][f"{_SPACE}{symbol}"] = token_id
        model["merges"].append([_SPACE, symbol])
    for word in described["added_tokens"]:
        word["id"] += len(new) if word["id"] >= first else 0
    return _with_template(Tokenizer.from_str(json.dumps(described)))


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _TEMPLATE
    return fast


def add_words(tokenizer: PreTrainedTokenizerFast, words: Iterable[str]) -> None:
    """Makes each word one token, unless it is; in place.

    A name that is spelled in pieces is copied piece by piece, which takes a small model
    long to learn; the space before the name stays a token of its own, so that the name
    is the same token wherever it stands.
    """
    tokenizer.add_tokens(
        [AddedToken(word, single_word=True, normalized=False) for word in words]
    )
