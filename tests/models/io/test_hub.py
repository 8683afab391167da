"""Models of the hub, fetched by its own client from a hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import hub, models

from ragen_jax.models import parameters
from ragen_jax.models.io import hugging_face, partial_reads, sources

# In a process of its own: the client reads its switches while it is imported.
_SCRIPT = """
import json, sys
from ragen_jax.models.io import sources
from ragen_jax.errors import UserError
from ragen_jax.planning import model
names = sys.argv[1:]
planned = [name.removeprefix("plan:") for name in names if name.startswith("plan:")]
for name in planned or names:
    try:
        found = model.find(name, None) if planned else sources.locate(name)
        print(json.dumps(str(found.path)))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def locate(home: Path, names: list[str], **environment: str) -> list[str]:
    """What a fresh process says to each name: a path, or why there is none."""
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names],
        env={
            **kept,
            "PYTHONPATH": ":".join(sys.path),
            "JAX_PLATFORMS": "cpu",
            "HOME": str(home),
            "HF_HOME": str(home),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model folder with the usual company, its shape and its weights."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    config = models.small_config(40)
    weights = jax.device_get(models.random_parameters(config))
    hugging_face.write_folder(folder, config, weights, models.make_tokenizer())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("raise SystemExit('code was run')")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another form")
    return folder, config, weights


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once_and_then_found_without_it(made, tmp_path):
    folder, config, weights = made
    names = ["owner/model", "owner/none", f"owner/model@{hub.COMMIT}"]
    with hub.serve({"owner/model": folder}) as server:
        path, missing, named = locate(tmp_path, names, HF_ENDPOINT=server.address)
        address, sent = server.address, sorted(server.sent)
    assert path == named
    assert "owner/none here" in missing and "status 404" in missing
    offline = locate(tmp_path, names[:1], HF_HUB_OFFLINE="1")
    unreachable = locate(tmp_path, names[:1], HF_ENDPOINT=address)
    assert [path] == offline == unreachable
    # Neither pickle nor code nor another form of the weights was asked for.
    inside = sorted(file.name for file in Path(path).iterdir())
    assert inside == sent
    assert "model.safetensors" in sent and "config.json" in sent
    assert not {"pytorch_model.bin", "modeling.py", "onnx"} & set(inside)
    source = sources.locate(path)
    assert source.read_config() == config
    declared = parameters.declare(config)
    found = partial_reads.read_tree(source.open_parameters(config, declared), declared)
    jax.tree.map(np.testing.assert_array_equal, found, weights)


@pytest.mark.slow
def test_a_plan_fetches_no_weights_and_a_run_fetches_them_later(made, tmp_path):
    folder, config, _ = made
    with hub.serve({"owner/model": folder}) as server:
        (path,) = locate(tmp_path, ["plan:owner/model"], HF_ENDPOINT=server.address)
        source = sources.Source(Path(path), is_gguf=False)
        assert source.read_config() == config
        assert len(source.read_tokenizer()) == len(models.make_tokenizer())
        assert not [name for name in server.sent if "safetensors" in name]
        (refusal,) = locate(tmp_path, ["owner/model"], HF_HUB_OFFLINE="1")
        assert refusal.startswith("model.path: of owner/model the cache holds no weigh")
        assert f"({path}), as after a plan: fetch them once with" in refusal
        (again,) = locate(tmp_path, ["owner/model"], HF_ENDPOINT=server.address)
    assert again == path and (Path(path) / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_gated_model_is_fetched_with_the_users_token_and_refused_without(
    made, tmp_path
):
    gated = {"owner/gated"}
    with hub.serve({"owner/gated": made[0]}, gated) as server:
        (refusal,) = locate(tmp_path, ["owner/gated"], HF_ENDPOINT=server.address)
        assert "status 401" in refusal and refusal.endswith("and HF_TOKEN")
        assert not server.sent
        (path,) = locate(
            tmp_path,
            ["owner/gated"],
            HF_ENDPOINT=server.address,
            HF_TOKEN=hub.TOKEN,
        )
    assert sources.locate(path).read_config() == made[1]


@pytest.mark.slow
def test_a_fetch_that_breaks_off_is_one_sentence_and_goes_on_next_time(made, tmp_path):
    with hub.serve({"owner/model": made[0]}) as server:
        server.cut.add("model.safetensors")
        (refusal,) = locate(tmp_path, ["owner/model"], HF_ENDPOINT=server.address)
        assert refusal.startswith("model.path: there is no folder owner/model here")
        assert "\n" not in refusal
        server.cut.clear()
        (path,) = locate(tmp_path, ["owner/model"], HF_ENDPOINT=server.address)
    whole = (made[0] / "model.safetensors").read_bytes()
    assert (Path(path) / "model.safetensors").read_bytes() == whole
