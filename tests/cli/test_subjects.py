"""Who is evaluated, and by which settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs

from ragen_jax import settings as settings_lib
from ragen_jax.cli import subjects
from ragen_jax.errors import UserError
from ragen_jax.models.io import hugging_face
from ragen_jax.training import checkpoints, model, weights


@pytest.mark.parametrize(
    ("one", "other"),
    [("runs/a/export", "runs/b/export"), ("Qwen/Qwen2.5-0.5B", "other/Qwen2.5-0.5B")],
)
def test_models_of_one_last_name_are_written_to_different_files(one, other):
    names = {subjects.of_model(runs.settings(), path).name for path in (one, other)}
    last = one.split("/")[-1]
    assert len(names) == 2 and all(name.startswith(f"{last}-") for name in names)
    assert subjects.of_model(runs.settings(), f"{one}/").name in names
    assert subjects.of_model(runs.settings(), "tiny").name == "tiny"


@pytest.mark.parametrize("rank", [0, 2])
def test_an_agent_played_by_another_config_has_the_adapters_of_its_own_run(
    rank, tmp_path, monkeypatch
):
    # It would restrict the other tests of this process.
    monkeypatch.setattr(subjects.trust, "restrict_to_trusted", lambda *given: None)
    run = runs.prepare(lora__rank=rank, estimator="grpo", loss__kl=0.0)
    actor = weights.new_state(run).actor
    directory = tmp_path / checkpoints.FOLDER
    with checkpoints.Checkpoints(directory, keep_last=1, keep_best=0) as saved:
        info = {"settings": settings_lib.to_dict(run.settings)}
        saved.save(1, {"actor": actor}, info, score=None)
    other = runs.settings(env__size=4, lora__rank=2 - rank)
    subject = subjects.of_checkpoint(str(tmp_path), None, other)
    assert subject.settings.env == other.env
    player = model.make_model(subject.settings, run.model.mesh)
    found = weights.restore_actor(player, directory, 1)
    # Adapters begin as nothing added.
    jax.tree.map(np.testing.assert_array_equal, found, weights.load_parameters(player))


@pytest.mark.parametrize(
    ("rows", "decoding", "played"),
    [("cudnn", "cudnn", "auto"), ("splash", "auto", "auto"), ("xla", "xla", "xla")],
)
def test_an_agent_is_played_without_a_kernel_that_only_its_device_had(
    rows, decoding, played, tmp_path, monkeypatch
):
    monkeypatch.setattr(subjects.trust, "restrict_to_trusted", lambda *given: None)
    kernels = dict(model__attention=rows, rollout__decode_attention=decoding)
    info = {"settings": settings_lib.to_dict(runs.settings(**kernels))}
    directory = tmp_path / checkpoints.FOLDER
    with checkpoints.Checkpoints(directory, keep_last=1, keep_best=0) as saved:
        saved.save(1, {"actor": jnp.zeros(1)}, info, score=None)
    _, settings = subjects.find_checkpoint(str(tmp_path))
    assert settings.model.attention == settings.rollout.decode_attention == played


def _agent(folder, settings, **other):
    """A folder as launch/export.py writes it, without the model."""
    told = {"run": "lakes", "step": 40, "settings": settings} | other
    hugging_face.write_origin(folder, told)
    return str(folder)


def test_an_exported_agent_is_played_as_it_was_trained(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        subjects.trust, "restrict_to_trusted", lambda *given: asked.append(given)
    )
    trained = runs.settings(
        env__size=4, env__note="Go.", evaluation__temperature=0.25, lora__rank=2
    )
    path = _agent(tmp_path, settings_lib.to_dict(trained), code={"env.py": "12ab"})
    assert subjects.has_origin(path) and not subjects.has_origin("tiny")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert subjects.has_origin(f"~/{tmp_path.name}")
    assert not subjects.has_origin("~no-such-user/agent")
    subject = subjects.of_exported(path)
    assert subject.who == f"{path}, step 40 of the run lakes"
    assert (subject.settings.env, subject.settings.evaluation) == (
        trained.env,
        trained.evaluation,
    )
    (task,) = subject.only(None, None).settings.tasks()
    assert task.note == "Go."
    # The adapters are part of the weights.
    assert (subject.settings.model.path, subject.settings.lora.rank) == (path, 0)
    assert [given[2]["code"] for given in asked] == [{"env.py": "12ab"}]


@pytest.mark.parametrize(
    "settings", [None, [1], {}, {"env": 3}, {"unknown": {"key": 1}}]
)
def test_an_agent_that_does_not_say_how_it_was_trained_asks_for_a_config(
    settings, tmp_path
):
    path = _agent(tmp_path, settings)
    with pytest.raises(UserError, match=r"ragen_jax.json does not .* name the --conf"):
        subjects.of_exported(path)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "/1 was saved without settings: give a check"),
        ({"settings": None}, "/1 is damaged: info/info.json has no usable settings"),
        ({"settings": [1]}, "/1 is damaged: info/info.json has no usable settings"),
    ],
)
def test_a_checkpoint_of_something_else_than_a_run_is_refused(info, message, tmp_path):
    directory = tmp_path / checkpoints.FOLDER
    with checkpoints.Checkpoints(directory, keep_last=1, keep_best=0) as saved:
        saved.save(1, {"actor": jnp.zeros(1)}, info, score=None)
    with pytest.raises(UserError, match=message):
        subjects.find_checkpoint(str(tmp_path))
