"""Fingerprints of tokens, constants and weights, by which a run knows its model.

A path can lead elsewhere tomorrow: a folder is written again, a branch of the hub moves
on. Shapes would still fit, and adapters would be merged into weights that they were not
trained on. They are of values and not of files, so that a model may move, or be cut
into other files, and stays the same.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from ragen_jax.models import parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import partial_reads
from ragen_jax.models.parameters import Leaf, Parameters
from ragen_jax.text import pinned_date

_SAMPLE = 8  # rows of a file's matrix that are looked at


def of_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """Of the tokens with their ids, and of the chat template.

    A written folder's template may have the date in front that training pinned.
    """
    table = sorted(tokenizer.get_vocab().items())
    template = pinned_date.change_each(tokenizer.chat_template, pinned_date.unpin)
    return _mark(json.dumps([table, template]).encode())


def of_stops(ids: Sequence[int]) -> str:
    """Of the tokens that end a reply: a copied folder may lack the file that has them.

    Args:
      ids: as `ChatPieces.stop_tokens` has them.
    """
    return _mark(json.dumps(sorted(ids)).encode())


def of_constants(config: ModelConfig) -> str:
    """Of what the forward pass computes with and no weight's shape tells."""
    scaling = config.rope_scaling and dataclasses.asdict(config.rope_scaling)
    return _mark(json.dumps([config.rope_base, config.norm_epsilon, scaling]).encode())


def of_weights(read: partial_reads.ReadPart, declared: Parameters) -> str:
    """Of some numbers of each parameter, of the last layer where there are layers.

    Args:
      read: of the model's files.
      declared: the tree of what they hold.
    """
    content: list[bytes] = []

    def visit(tree: Parameters, path: partial_reads.Path) -> None:
        for name in sorted(tree):
            leaf, where = tree[name], (*path, name)
            if parameters.is_leaf(leaf):
                content.append("/".join(where).encode())
                content.append(read(where, _sample(where, leaf)).tobytes())
            else:
                visit(leaf, where)

    visit(declared, ())
    return _mark(b"\0".join(content))


def _sample(path: partial_reads.Path, leaf: Leaf) -> partial_reads.Index:
    """A part that lies together in the file: of matrices, a few of the file's rows."""
    index = [slice(0, size) for size in leaf.shape]
    first = 0
    if path[0] == "layers":
        index[0] = slice(leaf.shape[0] - 1, leaf.shape[0])
        first = 1
    if path[-1] in partial_reads.MATRICES and path[-1] != "output":
        cut = first + 1  # [in, out] or [in, heads, head_dim]: rows are of out
    elif path[-1] == "output":
        cut = first + 2  # [heads, head_dim, out]
    elif path[-1] == "embedding":
        cut = first  # [V, D]
    else:
        return tuple(index)
    middle, size = leaf.shape[cut] // 2, leaf.shape[cut]
    is_heads = len(leaf.shape) - cut == 2 and path[-1] in partial_reads.MATRICES
    index[cut] = slice(middle, min(size, middle + (1 if is_heads else _SAMPLE)))
    return tuple(index)


def _mark(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
