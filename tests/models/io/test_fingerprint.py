"""Marks of a model: the same wherever it lies, others when numbers or tokens are."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from helpers import models, runs

from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.models.config import RopeScaling
from ragen_jax.models.io import fingerprint, hugging_face, safetensors_files
from ragen_jax.models.io.sources import Source
from ragen_jax.training import checkpoints, weights
from ragen_jax.training import run as run_lib
from ragen_jax.training.model import make_model
from ragen_jax.training.workdir import claim_workdir

CONFIG = models.small_config(40)


def write(folder, tree, tokenizer=None, **options) -> Source:
    tokenizer = tokenizer or models.make_tokenizer()
    hugging_face.write_folder(folder, CONFIG, tree, tokenizer, **options)
    return Source(folder, is_gguf=False)


def mark(source: Source) -> str:
    declared = parameters.declare(CONFIG)
    return fingerprint.of_weights(source.open_parameters(CONFIG, declared), declared)


@pytest.fixture(scope="module")
def tree():
    return jax.device_get(models.random_parameters(CONFIG))


def test_a_model_is_the_same_in_another_folder_and_in_other_files(tree, tmp_path):
    one = write(tmp_path / "one", tree)
    other = write(tmp_path / "other", tree, max_shard_bytes=20_000)
    files = [safetensors_files.weight_files(x.path) for x in (one, other)]
    assert len(files[0]) == 1 < len(files[1])
    assert mark(one) == mark(other)


def test_every_parameter_counts(tree, tmp_path):
    """Of a matrix a few rows are looked at, and training moves every row."""
    found = {mark(write(tmp_path / "as it is", tree))}
    leaves, structure = jax.tree.flatten(tree)
    for number, leaf in enumerate(leaves):
        moved = [*leaves[:number], leaf + np.float32(1e-3), *leaves[number + 1 :]]
        found.add(mark(write(tmp_path / str(number), structure.unflatten(moved))))
    assert len(found) == 1 + len(leaves)


def test_tokens_and_template_count_and_a_copy_of_them_does_not(tree, tmp_path):
    tokenizer = models.make_tokenizer()
    copied = write(tmp_path / "copy", tree, tokenizer).read_tokenizer()
    own = fingerprint.of_tokenizer(tokenizer)
    assert fingerprint.of_tokenizer(copied) == own
    copied.chat_template += "\n"
    assert fingerprint.of_tokenizer(copied) != own
    copied.chat_template = tokenizer.chat_template
    assert fingerprint.of_tokenizer(copied) == own
    copied.add_tokens(["unknown"])
    assert fingerprint.of_tokenizer(copied) != own


# Of a run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with adapters whose model no other test writes to; not trained."""
    folder = tmp_path_factory.mktemp("fingerprint") / "model"
    task = models.make_task()
    given = jax.device_get(task.parameters)
    hugging_face.write_folder(folder, task.config, given, task.tokenizer)
    changes = {"lora.rank": 2, "model.path": str(folder)}
    return run_lib.prepare(runs.settings(**changes))


@pytest.fixture
def saved(run, tmp_path):
    """The workdir of a run that was stopped before its first iteration ended."""
    claim_workdir(tmp_path, run.settings)
    with checkpoints.Checkpoints(
        tmp_path / checkpoints.FOLDER, keep_last=1, keep_best=0
    ) as writer:
        info = {"settings": {}, "model": weights.model_fingerprint(run.model)}
        writer.save(1, weights.new_state(run), info, score=None, wait=True)
    return tmp_path


def with_other_weights(run, folder):
    model = run.model
    tree, _ = models.read_model(model.source.path)
    tree["layers"]["down"] = tree["layers"]["down"] * 1.01
    hugging_face.write_folder(folder, model.config, tree, model.tokenizer)
    return dataclasses.replace(model, source=Source(folder, is_gguf=False))


@pytest.mark.slow
def test_adapters_are_not_put_onto_another_base(run, saved, tmp_path):
    directory = saved / checkpoints.FOLDER
    weights.restore_actor(run.model, directory, 1)
    other = with_other_weights(run, tmp_path / "other")
    with pytest.raises(
        UserError, match="began with a model of other weights"
    ) as caught:
        weights.restore_actor(other, directory, 1)
    assert str(directory / "1") in str(caught.value)
    assert str(run.settings.model.path) in str(caught.value)


@pytest.mark.slow
def test_an_actor_is_not_played_with_other_tokens(run, saved):
    tokenizer = run.model.source.read_tokenizer()
    tokenizer.add_tokens(["unknown"])
    other = dataclasses.replace(run.model, adapters=None, tokenizer=tokenizer)
    with pytest.raises(UserError, match="began with a model of other tokens"):
        weights.restore_actor(other, saved / checkpoints.FOLDER, 1)


@pytest.mark.slow
def test_a_moved_model_whose_replies_end_at_other_tokens_is_another_one(
    run, saved, tmp_path
):
    """As where a copy has lost its generation_config.json, or has an edited one."""
    moved, own = shutil.copytree(run.model.source.path, tmp_path / "moved"), run.model
    ids = sorted({*own.pieces.stop_tokens, own.tokenizer.pad_token_id})
    assert len(ids) > len(own.pieces.stop_tokens)
    (moved / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    now = make_model(runs.settings(model__path=str(moved)), own.mesh)
    found = weights.model_fingerprint(now)
    with pytest.raises(UserError, match="began with a model of other stop tokens"):
        weights.check_same_model(now, saved / checkpoints.FOLDER, 1, found)


@pytest.mark.slow
def test_an_actor_is_not_played_with_other_rotations_or_norms(run, saved):
    """Its own weights fit any of them, and its shapes do not tell."""
    directory = saved / checkpoints.FOLDER
    own = dataclasses.replace(run.model, adapters=None)
    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    for changes in (
        dict(rope_base=1e6),
        dict(norm_epsilon=1e-5),
        dict(rope_scaling=scaling),
    ):
        config = dataclasses.replace(own.config, **changes)
        other = dataclasses.replace(own, config=config)
        with pytest.raises(UserError, match="a model of other rotations or norms than"):
            weights.restore_trained(other, directory, 1)
    config = dataclasses.replace(own.config, longest_context=99)
    found = weights.model_fingerprint(dataclasses.replace(own, config=config))
    weights.check_same_model(own, directory, 1, found)


@pytest.mark.slow
def test_a_run_is_not_resumed_on_another_model_and_may_be_where_it_moved(
    run, saved, tmp_path
):
    other = with_other_weights(run, tmp_path / "other")
    before = sorted(path.name for path in saved.iterdir())
    with pytest.raises(UserError, match="began with a model of other weights"):
        runs.train(dataclasses.replace(run, model=other), saved)
    (saved / "console.txt").unlink()
    assert sorted(path.name for path in saved.iterdir()) == before
    moved = shutil.copytree(run.model.source.path, tmp_path / "moved")
    now = dataclasses.replace(run.model, source=Source(moved, is_gguf=False))
    found = weights.model_fingerprint(now)
    weights.check_same_model(now, saved / checkpoints.FOLDER, 1, found)
    old, new = (settings_lib.to_dict(runs.settings(model__path=path)) for path in "ab")
    assert settings_lib.differences(old, new) == []
