"""`launch/warm_start.py` on a model that is there."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers import models, warm_process
from helpers.paths import ROOT
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from ragen_jax import cli
from ragen_jax.envs.bandit.env import NAMES
from ragen_jax.errors import UserError
from ragen_jax.models import presets
from ragen_jax.models.io import hugging_face, sources
from ragen_jax.warm_start import stages

SCRIPT = ROOT / "launch" / "warm_start.py"
CONFIG = f"--config={ROOT / 'configs' / 'warm_start.py'}:smoke"
TINY = ROOT / "ragen_jax" / "models" / "tiny"


_SMALL = ("steps", "rows")


def warm_start(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            CONFIG,
            *arguments,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("section", ["env", "limits", "demonstrator"])
def test_a_key_that_a_section_does_not_have_is_named(section):
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:smoke")
    with config.unlocked():
        config.frozen_lake[section].sise = 3
    with pytest.raises(UserError, match=f"frozen_lake.{section}.sise is not a key of"):
        stages.check_environments(config, ["lake_boards"])


def learn_nothing(stage: str, out: Path) -> tuple[dict, dict]:
    """The tensors of `tiny`, and those after one step of a stage at rate 0."""
    ended = warm_start(
        f"--start={TINY}",
        f"--first_stage={stage}",
        f"--last_stage={stage}",
        f"--config.{stage}.steps=1",
        f"--config.{stage}.rows=1",
        f"--config.{stage}.lr=0.0",
        f"--out={out}",
    )
    assert ended.returncode == 0, ended.stderr
    assert f"wrote {out}" in ended.stdout
    assert list(out.parent.glob("*.after_*")) == []
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, out))
    assert before.keys() == after.keys()
    return before, after


@pytest.mark.slow
def test_a_stage_that_learns_nothing_writes_the_model_it_began_with(tmp_path):
    out = tmp_path / "out"
    before, after = learn_nothing("sokoban_boards", out)
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name], err_msg=name)
    kept = "tokenizer.json"
    assert (out / kept).read_text() == (TINY / kept).read_text()


@pytest.mark.slow
def test_the_first_stage_of_bandit_begins_with_new_words_for_the_arms(tmp_path):
    before, after = learn_nothing("bandit_dialogues", tmp_path / "out")
    tokenizer = sources.locate(str(TINY)).read_tokenizer()
    words = tokenizer.convert_tokens_to_ids(list(NAMES))
    assert len(set(words)) == 48 and tokenizer.unk_token_id not in words
    for name, tensor in before.items():
        is_same = tensor == after[name]
        if name == "model.embed_tokens.weight":
            assert not is_same[words].any()
            directions = after[name][words]
            directions /= np.linalg.norm(directions, axis=1, keepdims=True)
            # Of 1,128 pairs of random directions in 128 dimensions, deviation 0.09.
            assert np.triu(directions @ directions.T, 1).max() < 0.5
            is_same[words] = True
        assert is_same.all(), name


@pytest.mark.parametrize("text", ["Arms: {},", " {}: bold.", "<answer>{}</answer>"])
def test_the_name_of_an_arm_is_one_token_wherever_it_stands(text):
    tokenizer = sources.locate(str(TINY)).read_tokenizer()
    for name in NAMES:
        written = text.format(name)
        ids = tokenizer(written)["input_ids"]
        assert ids.count(tokenizer.convert_tokens_to_ids(name)) == 1, written
        assert tokenizer.decode(ids) == written


def _beyond_the_vocabulary(tokenizer, weights: dict) -> None:
    tokenizer.add_tokens([f"word {number}" for number in range(100)])


def _without_an_end(tokenizer, weights: dict) -> None:
    inner = json.loads(tokenizer.backend_tokenizer.to_str().replace("im_end", "eot"))
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(inner))
    tokenizer.eos_token = "<|eot|>"


def _not_finite(tokenizer, weights: dict) -> None:
    weights["layers"]["up"][1, 2, 3] = np.nan


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_beyond_the_vocabulary, "has a tokenizer of another kind: choose"),
        (_without_an_end, "has a tokenizer of another kind: choose"),
        (_not_finite, "weights of layers.up are not finite; copy"),
    ],
)
def test_a_model_that_no_stage_can_go_on_from_is_refused(tmp_path, change, told):
    shape = presets.SHAPES["tiny"]
    source = sources.locate("tiny")
    weights, _ = models.read_model(source.path)
    tokenizer = source.read_tokenizer()
    change(tokenizer, weights)
    hugging_face.write_folder(tmp_path / "model", shape, weights, tokenizer)
    with pytest.raises(UserError) as caught:
        stages.begin(ConfigDict({"model": "tiny"}), str(tmp_path / "model"))
    assert str(tmp_path / "model") in str(caught.value) and told in str(caught.value)


def test_a_start_that_is_no_folder_is_named_without_asking_the_hub(monkeypatch):
    monkeypatch.setattr(sources, "locate", pytest.fail)
    with pytest.raises(UserError, match=r"^--start=runs/nope: there is no such folder"):
        stages.begin(ConfigDict({"model": "tiny"}), "runs/nope")


def test_later_stages_without_a_model_are_refused(tmp_path):
    ended = warm_process.attempt(
        SCRIPT,
        [CONFIG, "--first_stage=sokoban_boards", f"--out={tmp_path / 'out'}"],
        tmp_path,
    )
    assert (ended.code, ended.output, ended.made) == (2, "", [])
    assert "later stages need --start" in ended.errors
    assert ended.errors.startswith("error: ") and ended.errors.count("\n") == 1


def test_a_model_that_grows_from_another_one_is_not_begun_without_it(tmp_path):
    config = f"--config={ROOT / 'configs' / 'warm_start.py'}:symbols"
    ended = warm_process.attempt(SCRIPT, [config, f"--out={tmp_path / 'o'}"], tmp_path)
    assert (ended.code, ended.output, ended.made) == (2, "", [])
    assert ended.errors == (
        "error: tiny_symbols begins with the weights of another model: give"
        " --start=tiny_sokoban, or a folder that the variant solver wrote\n"
    )


@pytest.mark.slow
def test_stages_of_symbols_add_layers_that_alone_learn_to_read(tmp_path):
    out = tmp_path / "out"
    stages_of = ("symbols_legend", "symbols_prompt", "symbols_dialogues")
    ended = subprocess.run(
        [
            *(sys.executable, str(SCRIPT)),
            f"--config={ROOT / 'configs' / 'warm_start.py'}:symbols",
            *(f"--start={TINY}", f"--out={out}", "--last_stage=symbols_prompt"),
            *(f"--config.{name}.{key}=1" for name in stages_of for key in _SMALL),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert "symbols_prompt     1/1" in ended.stdout
    assert "cells read correctly" in ended.stdout
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, out))
    for name, tensor in before.items():
        if "layers." in name:  # They stand three layers higher now, as they were.
            layer = int(name.split(".")[2])
            name = name.replace(f"layers.{layer}.", f"layers.{layer + 3}.")
            np.testing.assert_array_equal(tensor, after[name], err_msg=name)
    assert np.abs(after["model.layers.0.mlp.down_proj.weight"]).max() > 0
    old, new = (sources.locate(str(f)).read_tokenizer() for f in (TINY, out))
    for word in ("Tutor", " Up", "<|im_end|>"):
        ids = [t.encode(word, add_special_tokens=False) for t in (old, new)]
        rows = [
            w["model.embed_tokens.weight"][i]
            for w, i in zip((before, after), ids, strict=True)
        ]
        np.testing.assert_array_equal(*rows)
    assert len(new) == 1024 and new.decode(new.encode(" W")) == " W"


@pytest.mark.slow
def test_a_model_that_lacks_only_last_layers_keeps_the_rows_and_columns_it_has_met(
    tmp_path,
):
    shape = dataclasses.replace(presets.SHAPES["tiny_rooms"], layers=8)
    source = sources.locate("tiny_rooms")
    weights, _ = models.read_model(source.path)
    weights["layers"] = {name: leaf[:8] for name, leaf in weights["layers"].items()}
    hugging_face.write_folder(tmp_path / "m", shape, weights, source.read_tokenizer())
    _, begun = stages.begin(
        ConfigDict({"model": "tiny_rooms", "seed": 0}), str(tmp_path / "m")
    )
    np.testing.assert_array_equal(begun["embedding"], weights["embedding"])
    assert begun["layers"]["up"].shape[0] == 12


@pytest.mark.slow
def test_the_stage_of_larger_rooms_begins_with_new_rows_and_columns(tmp_path):
    out = tmp_path / "out"
    small = (*_SMALL, "turns")
    ended = subprocess.run(
        [
            *(sys.executable, str(SCRIPT)),
            f"--config={ROOT / 'configs' / 'warm_start.py'}:rooms",
            *(f"--start={TINY}", f"--out={out}", "--last_stage=rooms_boards"),
            *(f"--config.rooms_boards.{key}=1" for key in small),
            *("--config.rooms_boards.lr=0", "--config.rooms_boards.noise=0.1"),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    before, after = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (TINY, out)
    )
    tokenizer = sources.locate(str(TINY)).read_tokenizer()
    places = "".join(f" ({n}, {n})" for n in range(5, 10))
    drawn = tokenizer.encode(places, add_special_tokens=False)
    assert len(set(drawn)) == 10
    is_new = (before != after).any(1)
    np.testing.assert_array_equal(np.flatnonzero(is_new), sorted(drawn))
