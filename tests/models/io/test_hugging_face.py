"""Model folders: Hugging Face's own logits, round trips, and what is refused."""

import dataclasses
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import models
from helpers.paths import GOLDEN
from safetensors.numpy import load_file, save_file

from ragen_jax.errors import UserError
from ragen_jax.models import config as model_config
from ragen_jax.models import presets, transformer
from ragen_jax.models.io import hugging_face

golden = runpy.run_path(str(GOLDEN / "make_qwen2_logits.py"))
# A tokenizer's size has nothing to do with what is tested here.
CONFIG = models.small_config(40)
TIED = dataclasses.replace(CONFIG, tied=True)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_hugging_faces_on_the_same_weights(tmp_path, tied):
    (tmp_path / "config.json").write_text(json.dumps(golden["config"](tied)))
    save_file(golden["tensors"](tied), tmp_path / "model.safetensors")
    stored = np.load(GOLDEN / "qwen2_logits.npz")
    logits = _logits(*models.read_model(tmp_path), stored["tokens"])
    wanted = stored["tied" if tied else "untied"]
    assert wanted.std() > 1  # Logits that all but vanish would agree with anything.
    np.testing.assert_allclose(logits, wanted, atol=2e-4)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_logits_equal_those_of_transformers_run_here(tmp_path, config):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = models.random_parameters(config, seed=3)
    tokens = np.random.default_rng(4).integers(0, config.vocabulary, (3, 70))
    tokenizer = models.make_tokenizer()
    hugging_face.write_folder(tmp_path / "ours", config, ours, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert isinstance(theirs, transformers.Qwen2ForCausalLM)
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(_logits(ours, config, tokens), wanted, atol=2e-4)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    back, again = models.read_model(tmp_path / "theirs")
    assert again == config
    _assert_identical(back, ours)


def test_a_folders_text_is_cut_as_its_tokenizer_file_says():
    """By `tokenizers` alone; AutoTokenizer cuts any `qwen2` text as Qwen does."""
    folder = presets.EMBEDDED["tiny"]
    tokenizer = hugging_face.read_tokenizer(folder)
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        " At (2, 3), goal (0, 1): Left (2, 2)",
        "Actions: Left\n P _",
        "a  b1",
    ):
        ids = alone.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_what_was_written_is_read_back_bit_for_bit(tmp_path, config):
    folder, wanted = _write(tmp_path, config)
    found, again = models.read_model(folder)
    assert again == config
    _assert_identical(found, wanted)
    tokenizer = hugging_face.read_tokenizer(folder)
    chat = [{"role": "user", "content": "Down || Right"}]
    assert tokenizer.apply_chat_template(
        chat, tokenize=False
    ) == models.make_tokenizer().apply_chat_template(chat, tokenize=False)


def test_bfloat16_weights_are_rounded_once_and_read_as_float32(tmp_path):
    folder, wanted = _write(tmp_path, CONFIG, dtype=jnp.bfloat16)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    stored = load_file(folder / "model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), wanted)
    _assert_identical(models.read_model(folder)[0], rounded)


def test_weights_may_lie_in_several_files(tmp_path):
    folder, wanted = _write(tmp_path, CONFIG)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part in range(3):
        piece = {name: tensors[name] for name in names[part::3]}
        save_file(piece, folder / f"model-0000{part + 1}-of-00003.safetensors")
    _assert_identical(models.read_model(folder)[0], wanted)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_tied_models_stored_head_may_be_a_copy_of_the_embedding(tmp_path, dtype):
    folder, wanted = _write(tmp_path, TIED)
    copy = wanted["embedding"].astype(dtype)
    _change_tensors(folder, {"lm_head.weight": copy})
    _assert_identical(models.read_model(folder)[0], wanted)


def test_a_tied_models_matrix_may_be_stored_as_its_head_alone(tmp_path):
    """As `safetensors.torch.save_model` and Accelerate's `save_model` write it."""
    folder, wanted = _write(tmp_path, TIED)
    changes = {"lm_head.weight": wanted["embedding"], "model.embed_tokens.weight": None}
    _change_tensors(folder, changes)
    _assert_identical(models.read_model(folder)[0], wanted)


def test_a_tied_models_stored_head_that_is_no_copy_is_refused(tmp_path):
    """transformers 4 leaves it unread, transformers 5 computes with it."""
    folder, wanted = _write(tmp_path, TIED)
    other = np.asarray(wanted["embedding"]) * np.float32(1.001)
    _change_tensors(folder, {"lm_head.weight": other})
    text = _refusal(models.read_model, folder)
    assert text.startswith(f"{folder / 'model.safetensors'}: lm_head.weight is another")
    assert "write false there to compute with it, or take the weights without" in text
    written = json.loads((folder / "config.json").read_text())
    written["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(written))
    np.testing.assert_array_equal(models.read_model(folder)[0]["head"], other.T)


KEY = "model.layers.1.self_attn.k_proj.weight"
WRONG_TENSORS = {
    "missing": ({KEY: None}, f"missing ['{KEY}'] (1 in all), not used [] (0 in all)"),
    "left over": ({"model.extra": np.ones(3, np.float32)}, "not used ['model.extra']"),
    "too small": ({KEY: np.ones((8, 32), np.float32)}, f"{KEY} has shape (8, 32)"),
    # As many numbers as there should be, so that their count shows nothing.
    "turned": ({KEY: np.ones((32, 16), np.float32)}, "config.json implies (16, 32)"),
    "too flat": ({KEY: np.ones(512, np.float32)}, f"{KEY} has shape (512,)"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit_config_json_are_named(tmp_path, case):
    changes, message = WRONG_TENSORS[case]
    folder, _ = _write(tmp_path, CONFIG)
    _change_tensors(folder, changes)
    text = _refusal(models.read_model, folder)
    assert message in text and "config.json and weights of one model" in text


@pytest.mark.parametrize("damage", ["cut", "not safetensors", "empty"])
def test_a_damaged_weights_file_is_named(tmp_path, damage):
    folder, _ = _write(tmp_path, CONFIG)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-100], "empty": b""}.get(damage, b"x" * 5000))
    assert f"{path} is damaged" in _refusal(models.read_model, folder)


def test_a_folder_without_safetensors_is_refused_and_pickles_are_never_opened(tmp_path):
    folder, _ = _write(tmp_path, CONFIG)
    pickled = (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "holds no .safetensors file; pickled .bin weights" in _refusal(
        models.read_model, folder
    )
    pickled.unlink()
    assert "file; copy or download the model's weights into" in _refusal(
        models.read_model, folder
    )


def test_a_missing_folder_or_an_unreadable_config_is_named(tmp_path):
    folder, _ = _write(tmp_path, CONFIG)
    assert "there is no folder" in _refusal(models.read_model, tmp_path / "nowhere")
    for text in ("{", "[1]"):
        (folder / "config.json").write_text(text)
        assert "config.json cannot be read as JSON" in _refusal(
            models.read_model, folder
        )
    (folder / "config.json").unlink()
    assert "config.json cannot be read as JSON" in _refusal(models.read_model, folder)


UNSUPPORTED = {
    "architectures": (["MambaForCausalLM"], "architecture MambaForCausalLM is not"),
    "use_sliding_window": (True, "use_sliding_window is on"),
    "rope_scaling": ({"type": "yarn", "factor": 4.0}, "scaled by 'yarn'"),
    "rope_parameters": ({"rope_type": "linear", "rope_theta": 1e4}, "by 'linear'"),
    "hidden_act": ("gelu", "hidden_act = 'gelu'"),
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_an_unsupported_feature_is_refused_by_name(key):
    value, message = UNSUPPORTED[key]
    config = model_config.to_hugging_face(CONFIG, 0, 1, "float32") | {key: value}
    text = _refusal(model_config.from_hugging_face, config, "here/config.json")
    assert message in text and text.startswith("here/config.json: ")


@pytest.mark.parametrize("key", ["hidden_size", "rope_theta", "rms_norm_eps"])
def test_a_key_that_config_json_lacks_is_named(key):
    config = model_config.to_hugging_face(CONFIG, 0, 1, "float32")
    del config[key]
    text = _refusal(model_config.from_hugging_face, config, "here/config.json")
    assert text.startswith(f"here/config.json lacks the key '{key}'")


def test_rope_theta_is_found_where_newer_files_keep_it():
    config = model_config.to_hugging_face(CONFIG, 0, 1, "float32")
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert model_config.from_hugging_face(config, "").rope_base == 5e5


@pytest.mark.parametrize("text", [None, "{not json", "{}", '{"model": {"type": "X"}}'])
def test_a_missing_or_damaged_tokenizer_is_one_sentence(tmp_path, text):
    folder, _ = _write(tmp_path, CONFIG)
    path = folder / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    message = _refusal(hugging_face.read_tokenizer, folder)
    assert str(folder) in message and "copy the model's tokenizer.json" in message


def test_whoever_generates_stops_at_every_token_that_ends_a_reply(tmp_path):
    weights, tokenizer = models.random_parameters(CONFIG), models.make_tokenizer()
    eos = tokenizer.eos_token_id
    for number, (given, wanted) in enumerate([((), eos), ((5,), 5), ((7, 3), [3, 7])]):
        folder = tmp_path / str(number)
        hugging_face.write_folder(folder, CONFIG, weights, tokenizer, stop_tokens=given)
        written = json.loads((folder / "generation_config.json").read_text())
        assert written["eos_token_id"] == wanted


def test_a_folder_that_holds_anything_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        message = _refusal(_write, target, CONFIG, name="")
        assert "give a new folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_filled_and_parents_are_made(tmp_path):
    (tmp_path / "model").mkdir()
    assert models.read_model(_write(tmp_path, CONFIG)[0])[1] == CONFIG
    deep, _ = _write(tmp_path / "a" / "b", CONFIG)
    assert models.read_model(deep)[1] == CONFIG
    assert [path.name for path in deep.parent.iterdir()] == ["model"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    weights = models.random_parameters(CONFIG)
    with pytest.raises(AttributeError):  # When the weights are already on disk.
        hugging_face.write_folder(tmp_path / "model", CONFIG, weights, tokenizer=None)
    assert list(tmp_path.iterdir()) == []


def _write(where: Path, config, *, dtype=np.float32, name: str = "model"):
    weights = jax.device_get(models.random_parameters(config))
    tokenizer = models.make_tokenizer()
    hugging_face.write_folder(where / name, config, weights, tokenizer, dtype)
    return where / name, weights


def _logits(weights, config, tokens) -> jax.Array:
    hidden = transformer.hidden_states(weights, jnp.asarray(tokens), config)
    return transformer.vocabulary_logits(weights, hidden)


def _change_tensors(folder: Path, changes: dict) -> None:
    """Replaces tensors of a folder with one file; None takes one away."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


def _assert_identical(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def _refusal(call, *args, **options) -> str:
    """The message of the UserError, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_tokens_that_end_a_reply_are_read_from_the_models_generation_settings(
    tmp_path,
):
    path, stops = tmp_path / "generation_config.json", hugging_face.read_stop_tokens
    assert stops(tmp_path) == ()
    for written, read in (({}, ()), ({"eos_token_id": 7}, (7,))):
        path.write_text(json.dumps(written))
        assert stops(tmp_path) == read
    path.write_text('{"eos_token_id": [151645, 151643]}')
    assert stops(tmp_path) == (151645, 151643)
    for wrong in ('{"eos_token_id": ["</s>"]}', '{"eos_token_id": -1}', "[1]", "{"):
        path.write_text(wrong)
        with pytest.raises(UserError, match=r"generation_config\.json.* or delete it:"):
            stops(tmp_path)


def test_without_generation_settings_config_json_says_which_tokens_end_a_reply(
    tmp_path,
):
    """As in transformers; a file of generation settings that names none counts."""
    config, stops = tmp_path / "config.json", hugging_face.read_stop_tokens
    for written, read in (({"eos_token_id": [2, 0]}, (2, 0)), ({}, ())):
        config.write_text(json.dumps(written))
        assert stops(tmp_path) == read
    config.write_text('{"eos_token_id": -1}')
    with pytest.raises(UserError, match=r"config\.json: eos.* or write null: then the"):
        stops(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert stops(tmp_path) == ()


def test_adapters_that_lie_beside_their_model_are_not_left_out_silently(tmp_path):
    """Of such a folder transformers makes the model with its adapters."""
    folder, _ = _write(tmp_path, CONFIG)
    (folder / "adapter_config.json").write_text("{}")
    message = _refusal(hugging_face.read_config, folder)
    assert message.startswith(f"{folder} holds adapters (adapter_config.json), which")
    assert "merge_and_unload" in message and "copy the folder without them" in message


def test_a_runs_folder_is_not_taken_for_a_model(tmp_path):
    run = tmp_path / "run"
    step = run / "checkpoints" / "8"
    step.mkdir(parents=True)
    for folder, remedy in (
        (run, f"python launch/export.py --checkpoint={run} --out=FOLDER"),
        (step, f"python launch/export.py --checkpoint={step} --out=FOLDER"),
    ):
        message = _refusal(hugging_face.read_config, folder)
        assert message.startswith(str(folder)) and remedy in message
