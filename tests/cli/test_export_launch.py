"""launch/export.py from the command line: the folder holds the trained actor."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, runs, warm_process, wrong_input
from transformers import PreTrainedTokenizerFast

from ragen_jax import settings as settings_lib
from ragen_jax.models.io import hugging_face

SCRIPT = runs.ROOT / "launch" / "export.py"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run on eight devices that has one step."""
    folder = tmp_path_factory.mktemp("export") / "run"
    settings = settings_lib.to_dict(runs.settings(mesh__data=8))
    wrong_input.save_checkpoint(folder, runs.model(), settings)
    return folder


def export(*arguments) -> subprocess.CompletedProcess:
    """The script in a process of its own, on one device."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**kept, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_exported_folder_holds_the_checkpoints_actor(workdir, tmp_path):
    out = tmp_path / "made" / "an ägent"
    done = export(f"--checkpoint={workdir}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert f"folder       {out}\n" in done.stdout
    # Quoted, so that it can be copied: the folder's name has a space.
    assert f"next: python launch/evaluate.py '--model={out}'\n" in done.stdout
    (weights, config), (wanted, wanted_config) = map(
        models.read_model, (out, runs.model())
    )
    assert config == wanted_config
    jax.tree.map(np.testing.assert_array_equal, weights, wanted)
    texts = "Up || Left √ (1, 2)"
    tokenizers = [hugging_face.read_tokenizer(f) for f in (out, runs.model())]
    assert tokenizers[0].encode(texts) == tokenizers[1].encode(texts)
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert [path.name for path in out.parent.iterdir()] == ["an ägent"]
    origin = json.loads((out / hugging_face.ORIGIN).read_text())
    assert (origin["run"], origin["step"]) == ("run", 1)
    assert origin["settings"] == settings_lib.to_dict(runs.settings(mesh__data=8))
    # Other programs are to begin replies as training did; its own template does not.
    theirs = PreTrainedTokenizerFast.from_pretrained(out)
    prompts = [
        each.apply_chat_template(
            [{"role": "user", "content": "hi"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for each in (theirs, tokenizers[1])
    ]
    assert prompts[0] == prompts[1] + "<think>"


@pytest.mark.slow
def test_an_exported_agent_stops_where_its_replies_ended(tmp_path):
    """Base models' end of text is often not what their chat template closes with."""
    base = shutil.copytree(runs.model(), tmp_path / "base")
    path = base / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}
    path.write_text(json.dumps(written))
    settings = settings_lib.to_dict(runs.settings(model__path=str(base)))
    wrong_input.save_checkpoint(tmp_path / "run", base, settings)
    out = tmp_path / "agent"
    done = export(f"--checkpoint={tmp_path / 'run'}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    tokenizer = hugging_face.read_tokenizer(out)
    assert tokenizer.eos_token == "<|endoftext|>"
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    found = json.loads((out / "generation_config.json").read_text())
    assert found["eos_token_id"] == sorted(stops)


@pytest.mark.slow
def test_a_model_that_has_moved_is_found_by_its_new_path(workdir, tmp_path):
    own = dict(model__path=str(tmp_path / "gone"), reward__hook="my_hook.py")
    settings = settings_lib.to_dict(runs.settings(**own))
    wrong_input.save_checkpoint(tmp_path / "run", runs.model(), settings)
    arguments = [f"--checkpoint={tmp_path / 'run'}", f"--out={tmp_path / 'agent'}"]
    refused = warm_process.attempt(SCRIPT, arguments, tmp_path)
    assert refused.code == 2
    assert f"no folder {tmp_path / 'gone'}; give" in refused.errors
    done = export(*arguments, f"--model={runs.model()}", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    # What the run names of the user's is executed only where the command says so.
    assert done.stdout.endswith("/agent --trust-code\n")
    rounded = lambda leaf: np.asarray(jnp.asarray(leaf, jnp.bfloat16), np.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        models.read_model(tmp_path / "agent")[0],
        jax.tree.map(rounded, models.read_model(runs.model())[0]),
    )


def test_what_cannot_be_exported_is_refused_in_one_sentence(workdir, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("x")
    for arguments, part in (
        ([f"--checkpoint={workdir}", f"--out={full}"], "exists and is not empty"),
        ([f"--checkpoint={tmp_path}", f"--out={tmp_path / 'a'}"], "give the workdir"),
        ([f"--checkpoint={workdir}"], "--out is missing"),
        (
            [f"--checkpoint={workdir}", "--out=a", "--adapter", "--dtype=bfloat16"],
            "--dtype has no effect with --adapter",
        ),
    ):
        ended = warm_process.attempt(SCRIPT, arguments, tmp_path)
        assert (ended.code, ended.output, ended.made) == (2, "", [])
        assert ended.errors.startswith("error: ") and ended.errors.count("\n") == 1
        assert part in ended.errors
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
