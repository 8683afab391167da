"""Model folders and GGUF files that mean harm, and the command lines that name them."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from helpers.wrong_input import Wrong, edit_config, model, write

_DEEP = "[" * 100_000


def template(text: str) -> Callable[[Path], None]:
    """Damage: another chat template."""

    def edit(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return edit


def replace(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Damage: in a file's place there is something else."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return edit


def expression(pattern: str) -> Callable[[Path], None]:
    """Damage: another expression by which the tokenizer cuts text into pieces."""

    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        written = json.loads(path.read_text())
        cutting = {"behavior": "Isolated", "invert": False}
        written["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            **cutting,
        }
        path.write_text(json.dumps(written))

    return edit


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def header(change: Callable[[dict], None], length: int | None = None):
    """Damage: another header in front of the same weights."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        content = json.loads(data[8:end])
        change(content)
        text = json.dumps(content).encode()
        size = len(text) if length is None else length
        path.write_bytes(size.to_bytes(8, "little") + text + data[end:])

    return edit


def raw_header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    """Damage: a file of nothing but a header."""

    def edit(folder: Path) -> None:
        size = len(text) if length is None else length
        content = size.to_bytes(8, "little") + text
        (folder / "model.safetensors").write_bytes(content)

    return edit


_NORM = "model.norm.weight"
_LOOP = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
_REFUSES = ("the chat template refuses", "choose a model whose template")

# Name -> (damage to a good folder, parts of the sentence).
FOLDERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "config deep": (write("config.json", _DEEP), ("config.json", "nested")),
    "config a list": (write("config.json", "[]"), ("not an object", "needs the")),
    "config endless": (replace("config.json", endless), ("a pipe or a device",)),
    "config a pipe": (replace("config.json", os.mkfifo), ("a pipe or a device",)),
    "config a folder": (replace("config.json", os.mkdir), ("cannot be read",)),
    "many layers": (edit_config(num_hidden_layers=10**9), ("num_hidden_layers", "ten")),
    "more layers": (edit_config(num_hidden_layers=10**30), ("num_hidden_layers = 1",)),
    "no layers": (edit_config(num_hidden_layers=0), ("num_hidden_layers = 0",)),
    "vocabulary": (edit_config(vocab_size=10**30), ("vocab_size = 1", "cannot be")),
    "large vocabulary": (edit_config(vocab_size=2**31 - 1), ("take both from one",)),
    "wide": (edit_config(hidden_size=2**30), ("config.json implies",)),
    "narrow": (edit_config(hidden_size=-32), ("hidden_size = -32",)),
    "half a head": (edit_config(num_attention_heads=2.5), ("num_attention_heads",)),
    "true heads": (edit_config(num_attention_heads=True), ("num_attention_heads",)),
    "no head": (edit_config(num_attention_heads=0), ("num_attention_heads = 0",)),
    "base": (edit_config(rope_theta=10**400), ("rope_theta = 1000", "cannot be")),
    "infinite base": (
        edit_config(rope_theta=float("inf"), rope_parameters=None),
        ("rope_theta = inf",),
    ),
    "epsilon": (edit_config(rms_norm_eps=float("inf")), ("rms_norm_eps = inf",)),
    "epsilon nan": (edit_config(rms_norm_eps=float("nan")), ("rms_norm_eps = nan",)),
    "small epsilon": (edit_config(rms_norm_eps=1e-60), ("rms_norm_eps = 1e-60",)),
    "tied as text": (edit_config(tie_word_embeddings="no"), ("tie_word_embeddings",)),
    "architectures": (edit_config(architectures={"a": 1}), ("not supported",)),
    "layer types": (edit_config(layer_types=7), ("layer_types",)),
    "header deep": (raw_header(b'{"a":' * 50_000), ("is damaged", "nested")),
    "header a list": (raw_header(b"[]"), ("is damaged", "not an object")),
    "header's length": (header(lambda x: None, 2**63), ("ends within its header",)),
    "header nothing": (raw_header(b"", 0), ("is damaged",)),
    "header's shape": (
        header(lambda x: x[_NORM].update(shape=[2**62, 4])),
        ("is damaged", "needs"),
    ),
    "header's type": (header(lambda x: x[_NORM].update(dtype=3)), (_NORM, "stored as")),
    "header's offsets": (
        header(lambda x: x[_NORM].update(data_offsets=[0, 10**30])),
        ("is damaged",),
    ),
    "header's entry": (header(lambda x: x.update({_NORM: 5})), ("is damaged",)),
    "weights a device": (replace("model.safetensors", endless), ("is damaged",)),
    "weights a pipe": (replace("model.safetensors", os.mkfifo), ("is damaged",)),
    "tokenizer deep": (write("tokenizer.json", _DEEP), ("no tokenizer that can",)),
    "tokenizer a list": (write("tokenizer.json", "[1]"), ("no tokenizer that can",)),
    "tokenizer nothing": (write("tokenizer.json", ""), ("no tokenizer that can",)),
    "tokenizer endless": (replace("tokenizer.json", endless), ("tokenizer.json",)),
    "tokenizer backtracks": (expression(r"(.*)*x\z"), ("cannot cut", "choose another")),
    "tokenizer unclosed": (expression("((a"), ("no tokenizer that can",)),
    "its config deep": (write("tokenizer_config.json", _DEEP), ("no tokenizer that",)),
    "its config a pipe": (
        replace("tokenizer_config.json", os.mkfifo),
        ("a pipe or a device",),
    ),
    "template loops": (template(_LOOP), (*_REFUSES, "takes longer than")),
    "template grows": (
        template(
            "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}"
        ),
        (*_REFUSES, "of memory"),
    ),
    "template is long": (template("{{ 'a' * 10**7 }}"), (*_REFUSES, "characters")),
    "template divides": (template("{{ 1 / 0 }}"), (*_REFUSES, "division by zero")),
    "template adds": (template("{{ 'a' + 1 }}"), (*_REFUSES, "TypeError")),
    "template imports": (template("{% import 'os' as x %}"), _REFUSES),
    "template includes": (template("{% include '/etc/passwd' %}"), _REFUSES),
    "template escapes": (template("{{ ''.__class__.__mro__ }}"), (*_REFUSES, "unsafe")),
    "template deep": (template("{% if 1 %}" * 3000), (*_REFUSES, "RecursionError")),
    "template calls itself": (
        template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        (*_REFUSES, "RecursionError"),
    ),
    "template unfinished": (template("{% for"), _REFUSES),
}
_LARGE = struct.pack("<Q", 2**63)


def gguf(**metadata) -> Callable[[Path], None]:
    """A GGUF file of a good model with other metadata."""

    def make(path: Path) -> None:
        from helpers import gguf_files, models

        config = models.small_config(40, family="llama", qkv_bias=False)
        folder = path.with_name(path.stem + "_hf")
        weights = {k: v for k, v in models.random_parameters(config).items()}
        tensors = gguf_files.converted(folder, config, weights)
        shutil.rmtree(folder)
        gguf_files.write(path, config, tensors, **metadata)

    return make


def patched(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A good GGUF file with other bytes."""

    def make(path: Path) -> None:
        gguf()(path)
        path.write_bytes(change(path.read_bytes()))

    return make


GGUF: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "nothing": (lambda path: path.write_bytes(b""), ("is not a GGUF file",)),
    "a pipe": (os.mkfifo, ("is damaged", "a pipe or a device")),
    "cut": (patched(lambda data: data[: len(data) // 2]), ("is damaged",)),
    "cut in its header": (patched(lambda data: data[:40]), ("is damaged",)),
    "tensors": (patched(lambda d: d[:8] + _LARGE + d[16:]), ("is damaged",)),
    "pairs": (patched(lambda d: d[:16] + _LARGE + d[24:]), ("is damaged",)),
    "a text's length": (patched(lambda d: d[:24] + _LARGE + d[32:]), ("exceeds",)),
    "alignment": (gguf(**{"general.alignment": 0}), ("general.alignment = 0",)),
    "layers": (gguf(**{"llama.block_count": 10**9}), ("block_count = 1000000000",)),
    "heads": (gguf(**{"llama.attention.head_count": 0}), ("head_count = 0",)),
    "heads as text": (gguf(**{"llama.attention.head_count": "4"}), ("head_count = 4",)),
    "base": (gguf(**{"llama.rope.freq_base": float("inf")}), ("freq_base = inf",)),
    "odd heads": (gguf(**{"llama.attention.key_length": 7}), ("key_length = 7",)),
    "no tokenizer": (gguf(), ("tokenizer.ggml.model = None",)),
    "tokenizer": (
        gguf(**{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": ["a", "b"]}),
        ("tokenizer.ggml.pre",),
    ),
    "tokens": (
        gguf(
            **{
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": ["x y"],
            }
        ),
        ("no tokenizer that can be read",),
    ),
}
WRONG: dict[str, Wrong] = {
    f"folders: {name}": model(f"hostile/{name}", *parts)
    for name, (_, parts) in FOLDERS.items()
} | {
    f"gguf: {name}": model(f"hostile/{name}.gguf", *parts)
    for name, (_, parts) in GGUF.items()
}


def make_place(folder: Path) -> None:
    """Makes all of them from `folder`/model."""
    (folder / "hostile").mkdir()
    for name, (damage, _) in FOLDERS.items():
        shutil.copytree(folder / "model", folder / "hostile" / name)
        damage(folder / "hostile" / name)
    for name, (make, _) in GGUF.items():
        make(folder / "hostile" / f"{name}.gguf")
