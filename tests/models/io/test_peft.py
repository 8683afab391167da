"""Folders of adapters: read as what they add to their base model, or refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from safetensors.numpy import load_file, save_file

from ragen_jax.errors import UserError
from ragen_jax.models import lora, parameters
from ragen_jax.models.io import hugging_face, partial_reads, peft, sources

CONFIG = models.small_config(40)
ADAPTERS = lora.Adapters(rank=3, alpha=1.5, targets=lora.TARGETS)
LM_HEAD = "base_model.model.lm_head"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LAYER_3 = Q_PROJ.replace(".0.", ".2.")  # of two


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(the base model's folder, its weights)."""
    folder = tmp_path_factory.mktemp("peft") / "base"
    weights = jax.device_get(models.random_parameters(CONFIG))
    tokenizer = models.make_tokenizer()
    hugging_face.write_folder(folder, CONFIG, weights, tokenizer, stop_tokens=(5,))
    return folder, weights


def write(folder, base_folder, adapters=ADAPTERS, base=None, **said):
    """An exported folder of adapters, changed as `said`; returns what it holds."""
    shapes = parameters.shapes(lora.declare_adapters(CONFIG, adapters))
    rng = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
    )
    peft.write_folder(folder, CONFIG, trained, adapters, base or str(base_folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return trained


def read(path, declared=None):
    source = sources.locate(str(path))
    assert source.read_config() == CONFIG
    declared = declared or parameters.declare(CONFIG)
    reader = source.open_parameters(CONFIG, declared)
    return partial_reads.read_tree(reader, declared), reader


def merged(trained, weights, adapters=ADAPTERS):
    """What the export writes without --adapter."""
    return lora.merge(lora.assemble(trained, weights, adapters))


def check_close(found, wanted):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        found,
        wanted,
    )


@pytest.mark.parametrize("targets", [lora.TARGETS, ("query", "down")])
def test_adapters_are_read_as_the_export_merges_them(base, tmp_path, targets):
    folder, weights = base
    adapters = lora.Adapters(rank=3, alpha=1.5, targets=targets)
    trained = write(tmp_path / "out", folder, adapters)
    found, reader = read(tmp_path / "out")
    check_close(found, merged(trained, weights, adapters))
    changed = {
        x for x, y in found["layers"].items() if (y != weights["layers"][x]).any()
    }
    assert changed == set(targets)
    # A device's part of each kind of matrix is the same numbers.
    for name, index in (
        ("query", np.s_[1:2, 4:9, 1:3, :]),
        ("output", np.s_[:, 2:4, :, 8:16]),
        ("down", np.s_[:1, 10:30, 3:5]),
    ):
        part = reader(("layers", name), index)
        np.testing.assert_array_equal(part, found["layers"][name][index])


def test_rank_stabilized_half_width_and_partial_adapters_are_read(base, tmp_path):
    folder, weights = base
    trained = write(tmp_path / "a", folder, use_rslora=True, layers_to_transform=[0])
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {
        name: tensor.astype(jnp.bfloat16)
        for name, tensor in load_file(path).items()
        if ".layers.0." in name
    }
    save_file(tensors, path)
    found, _ = read(tmp_path / "a")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), trained)
    scaled = lora.Adapters(3, 1.5 * 3**0.5, lora.TARGETS)
    wanted = merged(half, weights, scaled)["layers"]
    check_close(
        {name: leaf[0] for name, leaf in found["layers"].items()},
        {name: leaf[0] for name, leaf in wanted.items()},
    )
    np.testing.assert_array_equal(found["layers"]["up"][1], weights["layers"]["up"][1])


def test_tokens_and_stops_are_those_of_the_base_unless_the_folder_has_a_tokenizer(
    base, tmp_path
):
    out = tmp_path / "out"
    write(out, base[0])
    source = sources.locate(str(out))
    assert source.read_stop_tokens() == (5,)
    known = source.base.read_tokenizer()
    assert source.read_tokenizer().get_vocab() == known.get_vocab()
    known.chat_template = "{{ messages }}"
    known.save_pretrained(out)
    assert source.read_tokenizer().chat_template == "{{ messages }}"
    assert source.whole_folder is None and source.base.whole_folder == base[0]


def test_the_base_is_found_as_a_models_path_is(base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(sources, "_fetch", lambda path, _: tmp_path / path)
    found = tmp_path / "owner" / "name@v1"
    found.parent.mkdir()
    found.symlink_to(base[0])
    write(out, base[0], base="owner/name", revision="v1")
    assert sources.locate(str(out)).base.path == found
    monkeypatch.chdir(tmp_path)  # A folder here comes first.
    (tmp_path / "owner" / "name").symlink_to(base[0])
    assert str(sources.locate(str(out)).base.path) == "owner/name"
    monkeypatch.setattr(sources, "_HUB_ID", sources.re.compile("$^"))
    path = out / "adapter_config.json"
    for name in ("/gone/base", "~nobody-here/base"):
        said = json.loads(path.read_text()) | {"base_model_name_or_path": name}
        path.write_text(json.dumps(said))
        message = _refusal(sources.locate, str(out))
        assert message.startswith(f"{path}: base_model_name_or_path = {name!r}: ")
    said["base_model_name_or_path"] = str(out)
    path.write_text(json.dumps(said))
    assert "holds adapters itself: merge those" in _refusal(sources.locate, str(out))


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"use_dora": True}, "use_dora = True is not supported; merge them into their"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not sup"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = {'q_proj': 4} is not"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern = {'q_proj': 4} is not"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"peft_type": None}, "has no peft_type"),
        ({"a_new_kind": {"x": 1}}, "a_new_kind = {'x': 1} is not supported"),
        ({"base_model_name_or_path": None}, "names no model: write the base model's"),
        ({"revision": 7}, "with revision = 7 names no model"),
        ({"r": 0}, "r = 0 and lora_alpha = 1.5 are not a whole number above 0"),
        ({"lora_alpha": "16"}, "lora_alpha = '16' are not a whole"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan are not a whole"),
    ],
)
def test_adapters_of_other_kinds_are_refused_before_the_base_is_looked_for(
    said, part, base, tmp_path
):
    out = tmp_path / "out"
    write(out, base[0], base="/gone", **said)
    message = _refusal(sources.locate, str(out))
    assert message.startswith(f"{out / 'adapter_config.json'}") and part in message


def _without(name):
    return lambda tensors: tensors.pop(name)


def _with(name, shape, dtype=np.float32):
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_without(f"{Q_PROJ}.lora_B.weight"), f"missing ['{Q_PROJ}.lora_B.weight'] (1"),
        (_with(f"{LM_HEAD}.lora_A.weight", (3, 32)), f"not supported ['{LM_HEAD}.lor"),
        (_with(f"{Q_PROJ}.lora_magnitude_vector", (32,)), "lora_magnitude_vector'] (1"),
        (_with(f"{LAYER_3}.lora_A.weight", (3, 32)), f"not supported ['{LAYER_3}.lor"),
        (_with(f"{Q_PROJ}.lora_A.weight", (4, 32)), "F32 of shape (4, 32); the base m"),
        (_with(f"{Q_PROJ}.lora_B.weight", (3, 32)), "imply (32, 3), of F32, F16, BF16"),
        (_with(f"{Q_PROJ}.lora_A.weight", (3, 32), np.int8), "is I8 of shape (3, 32)"),
        (dict.clear, f"missing ['{Q_PROJ}.lora_A.weight', "),
    ],
)
def test_weights_that_do_not_fit_base_and_config_are_one_sentence(
    change, part, base, tmp_path
):
    out = tmp_path / "out"
    write(out, base[0])
    file = out / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    message = _refusal(read, out)
    assert message.startswith(str(file)) and part in message
    assert "name the base model that the adapters were trained on" in message


def test_adapters_without_readable_files_are_one_sentence(base, tmp_path):
    out = tmp_path / "out"
    write(out, base[0])
    (out / "adapter_model.safetensors").rename(out / "adapter_model.bin")
    assert "pickled .bin weights are never opened" in _refusal(read, out)
    (out / "adapter_config.json").write_text("[")
    message = _refusal(read, out)
    assert message.startswith(f"{out / 'adapter_config.json'} cannot be read as JSON")


def test_adapters_on_adapters_are_not_exported_as_a_second_set(base, tmp_path):
    """peft would look for a model where the first set lies."""
    out = tmp_path / "out"
    write(out, base[0])
    source = sources.locate(str(out))
    message = _refusal(sources.outside_name, str(out), source)
    assert "leave --adapter out, which writes the whole model" in message


def _refusal(call, *args):
    """The message of the UserError, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
