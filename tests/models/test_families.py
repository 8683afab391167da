"""Qwen3, Llama 3 and SmolLM2: transformers' logits, files, and what is refused."""

import json
import runpy
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from helpers import models
from helpers.paths import GOLDEN
from safetensors.numpy import load_file, save_file

from ragen_jax.errors import UserError
from ragen_jax.models import config as model_config
from ragen_jax.models import parameters, transformer
from ragen_jax.models.config import RopeScaling
from ragen_jax.models.io import hugging_face, safetensors_files

golden = runpy.run_path(str(GOLDEN / "make_family_logits.py"))
CONFIGS = golden["CONFIGS"]
SHAPES = {
    "qwen2": dict(head_dim=10),
    "qwen3": models.QWEN3,
    "qwen3 tied": models.QWEN3 | dict(tied=True),
    "llama": dict(family="llama", qkv_bias=False),
    "llama 3": models.LLAMA3,
    "smollm2": dict(
        family="llama",
        qkv_bias=False,
        width=36,
        heads=9,
        kv_heads=3,
        head_dim=4,
        tied=True,
    ),
}
FAMILY = models.small_config(40, **models.LLAMA3)  # for what all families share


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_equal_transformers_on_the_same_weights(tmp_path, case):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[case]))
    save_file(golden["tensors"](CONFIGS[case]), tmp_path / "model.safetensors")
    stored = np.load(GOLDEN / "family_logits.npz")
    logits = _logits(*models.read_model(tmp_path), stored["tokens"])
    assert stored[case].std() > 1  # Logits near 0 would agree with anything.
    np.testing.assert_allclose(logits, stored[case], atol=2e-4)


@pytest.mark.parametrize("case", SHAPES)
def test_a_written_folder_is_the_same_model_to_transformers_and_back(tmp_path, case):
    torch = pytest.importorskip("torch")
    folder, config, ours = _write(tmp_path, **SHAPES[case])
    tokens = np.random.default_rng(4).integers(0, config.vocabulary, (2, 70))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    assert type(theirs).__name__.lower() == f"{config.family}forcausallm"
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    assert wanted.std() > 1
    np.testing.assert_allclose(_logits(ours, config, tokens), wanted, atol=2e-4)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    back, again = models.read_model(tmp_path / "theirs")
    assert again == config
    _assert_identical(back, ours)


@pytest.mark.parametrize("case", SHAPES)
def test_transformers_reads_the_shape_of_a_written_folder(tmp_path, case):
    """Without torch, which the test above needs and few installations have."""
    folder, config, _ = _write(tmp_path, **SHAPES[case])
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert theirs.model_type == config.family
    assert theirs.architectures[0].lower() == f"{config.family}forcausallm"
    for name, wanted in dict(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.longest_context,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tied,
        hidden_act="silu",
    ).items():
        assert getattr(theirs, name) == wanted, name
    rope = theirs.rope_parameters
    assert rope["rope_theta"] == config.rope_base
    scaling = config.rope_scaling
    assert rope["rope_type"] == ("default" if scaling is None else "llama3")
    if scaling is not None:
        assert rope["factor"] == scaling.factor
        assert rope["low_freq_factor"] == scaling.low_frequency_factor
        assert rope["high_freq_factor"] == scaling.high_frequency_factor
        assert rope["original_max_position_embeddings"] == scaling.original_context


@pytest.mark.parametrize(("family", "biased"), [("llama", True), ("qwen2", False)])
def test_a_model_with_the_biases_of_another_family_is_written_as_that_one(
    tmp_path, family, biased
):
    """As GGUF files may hold them; transformers' own Llama would drop the biases."""
    folder, config, wanted = _write(tmp_path, family=family, qkv_bias=biased)
    found, again = models.read_model(folder)
    assert again.qkv_bias == biased and again.family != family
    _assert_identical(found, wanted)
    tokens = np.random.default_rng(4).integers(0, config.vocabulary, (2, 20))
    np.testing.assert_array_equal(
        _logits(found, again, tokens), _logits(wanted, config, tokens)
    )
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(_logits(wanted, config, tokens), logits, atol=2e-4)


def test_rotations_are_slowed_as_llama_3_says():
    found = transformer.rotary_frequencies(4, 1e4, RopeScaling(8.0, 1.0, 4.0, 1000))
    # In 1000 positions the pairs turn 159, 15.9, 1.59155 and 0.159 times. The third
    # keeps (1.59155 - 1) / (4 - 1) = 0.197183 of its speed and an eighth of the rest.
    third = 0.01 * (0.197183 + 0.802817 / 8)
    np.testing.assert_allclose(found, [1, 0.1, third, 0.001 / 8], rtol=1e-5)
    plain = transformer.rotary_frequencies(4, 1e4)
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-5)


@pytest.mark.parametrize("case", SHAPES)
def test_what_was_written_is_read_back_bit_for_bit(tmp_path, case):
    folder, config, wanted = _write(tmp_path, **SHAPES[case])
    found, again = models.read_model(folder)
    assert again == config
    _assert_identical(found, wanted)


def test_the_files_name_the_ids_of_special_tokens(tmp_path):
    folder, _, _ = _write(tmp_path)
    tokenizer = models.make_tokenizer()
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("eos", "pad")}
    assert None not in ids.values() and tokenizer.bos_token_id is None
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    written = json.loads((folder / "config.json").read_text())
    assert {key: written[key] for key in ids} == ids
    config = model_config.to_hugging_face(FAMILY, 7, 8, "float32", bos=9)
    assert config["bos_token_id"] == 9


def _edited(case: str, **changes) -> dict:
    return CONFIGS[case] | changes


REFUSALS = {
    "experts": (
        _edited("qwen3_tied", architectures=["Qwen3MoeForCausalLM"]),
        "architecture Qwen3MoeForCausalLM is a mixture of experts, which is not"
        " supported; choose a dense model of LlamaForCausalLM, Qwen2ForCausalLM,"
        " Qwen3ForCausalLM",
    ),
    "two families": (
        _edited("qwen3_tied", model_type="qwen2"),
        "model_type = 'qwen2' contradicts architecture Qwen3ForCausalLM; take",
    ),
    "window": (
        _edited("qwen2", use_sliding_window=True, max_window_layers=1),
        "use_sliding_window is on, which is not supported; choose a model whose",
    ),
    "window of nobody knows what": (
        _edited("qwen2", use_sliding_window=True, sliding_window=None),
        "use_sliding_window is on",
    ),
    "window by layer": (
        _edited("qwen3_tied", layer_types=["full_attention", "sliding_attention"]),
        "layer_types has 'sliding_attention', which is not supported; choose a model",
    ),
    "quantized": (
        _edited("llama", quantization_config={"quant_method": "fp8"}),
        "quantization_config says that the weights are quantized, which is not"
        " supported; choose the same model in bfloat16 or float32",
    ),
    "yarn": (
        _edited("qwen3_untied", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rotary positions are scaled by 'yarn', which is not supported; choose a model",
    ),
    "linear, as old files say": (
        _edited("llama", rope_scaling={"type": "linear", "factor": 2.0}),
        "rotary positions are scaled by 'linear'",
    ),
    "part of a head": (
        _edited("llama", partial_rotary_factor=0.5),
        "partial_rotary_factor = 0.5 is not supported; choose a model that rotates",
    ),
    "part of a head, nested": (
        _edited(
            "qwen3_tied",
            rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        "partial_rotary_factor = 0.25 is not supported",
    ),
    "activation": (
        _edited("llama", hidden_act="gelu"),
        "hidden_act = 'gelu' is not supported; choose a model of 'silu'",
    ),
    "biases": (
        _edited("llama", attention_bias=True),
        "attention_bias = True is not supported for llama; choose a model without",
    ),
    "biases of Qwen3": (
        _edited("qwen3_tied", attention_bias=True),
        "attention_bias = True is not supported for qwen3",
    ),
    "biases of the MLP": (
        _edited("llama", mlp_bias=True),
        "mlp_bias = True is not supported for llama",
    ),
    "no slow rotation": (
        _edited("llama3", rope_scaling=golden["_SCALED"] | {"high_freq_factor": 1.0}),
        "high_freq_factor = 1.0 cannot be used; take the config.json",
    ),
    "no factor": (
        _edited("llama3", rope_scaling=golden["_SCALED"] | {"factor": "8"}),
        "factor = '8' cannot be used; take the config.json",
    ),
    "two original contexts": (
        _edited("llama3", original_max_position_embeddings=32),
        "original_max_position_embeddings is 32 here and 64 beside rope_type; take the",
    ),
    "rotations by layer": (
        _edited("llama", rope_parameters={"full_attention": {"rope_theta": 500.0}}),
        "rotary positions differ between kinds of layers, which is not supported",
    ),
    "tokens that see those behind them": (
        _edited("qwen2", is_causal=False),
        "is_causal = False: every token attends to later ones, which is not",
    ),
    "a window of Llama by layer": (
        _edited("llama", layer_types=["full_attention", "sliding_attention"]),
        "layer_types has 'sliding_attention', which is not supported; choose a model",
    ),
    "a window of Llama": (
        _edited("llama", sliding_window=8),
        "sliding_window = 8 is ambiguous for llama: in transformers it limits the KV"
        " cache, but not the full forward pass; write null there",
    ),
    "chunks of Llama": (
        _edited("llama", attention_chunk_size=8),
        "attention_chunk_size = 8 is ambiguous for llama",
    ),
    "a truth instead of a number": (
        _edited("llama", num_hidden_layers=True),
        "num_hidden_layers = True cannot be used; take the config.json",
    ),
    "a truth instead of a fraction": (
        _edited("llama", rms_norm_eps=True),
        "rms_norm_eps = True cannot be used",
    ),
    "nothing in float32": (
        _edited("llama", rms_norm_eps=1e-38),
        "rms_norm_eps = 1e-38 cannot be used",
    ),
    "more than int32 counts": (
        _edited("llama", vocab_size=2**31),
        "vocab_size = 2147483648 cannot be used",
    ),
    "half a pair": (_edited("llama", head_dim=7), "head_dim = 7 cannot be used"),
    "groups of unequal size": (
        _edited("llama", num_key_value_heads=3),
        "num_key_value_heads = 3 cannot be used",
    ),
    "not an object": (
        _edited("llama3", rope_scaling="llama3"),
        "rope_scaling = 'llama3' cannot be used",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_computed_here_is_refused_by_name(case):
    config, message = REFUSALS[case]
    text = _refusal(model_config.from_hugging_face, config, "here/config.json")
    assert text.startswith(f"here/config.json: {message}")


@pytest.mark.parametrize("key", ["head_dim", "original_max_position_embeddings"])
def test_what_transformers_would_guess_must_be_written(key):
    case = "qwen3_untied" if key == "head_dim" else "llama3"
    config = {name: value for name, value in CONFIGS[case].items() if name != key}
    if "rope_scaling" in config:
        scaling = dict(config["rope_scaling"])
        del scaling[key]
        config["rope_scaling"] = scaling
    text = _refusal(model_config.from_hugging_face, config, "config.json")
    assert text.startswith(f"config.json lacks the key '{key}'; take the config.json")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", dict(rope_parameters={"rope_theta": None, "rope_type": "default"})),
        ("llama", dict(rope_theta=7, rope_parameters={"rope_theta": 1000.0})),
        ("llama3", dict(rope_parameters={"rope_type": "default"})),
        ("qwen2", dict(attention_bias=True)),  # It knows no such key.
    ],
)
def test_where_a_file_has_a_number_twice_the_one_counts_that_transformers_takes(
    case, changes
):
    read = model_config.from_hugging_face
    assert read(_edited(case, **changes), "") == read(CONFIGS[case], "")


def test_a_llama_file_without_a_rotary_base_means_what_transformers_takes():
    config = {key: x for key, x in CONFIGS["llama"].items() if key != "rope_theta"}
    theirs = transformers.LlamaConfig(**config).to_dict()
    usual = theirs.get("rope_theta") or theirs["rope_parameters"]["rope_theta"]
    read = model_config.from_hugging_face
    assert read(config, "").rope_base == usual == 10_000
    other = {key: x for key, x in CONFIGS["qwen2"].items() if key != "rope_theta"}
    assert "lacks the key 'rope_theta'" in _refusal(read, other, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        dict(sliding_window=128, max_window_layers=0),  # as wide as the context
        dict(sliding_window=8, max_window_layers=2),  # of layers there are not
        dict(layer_types=["full_attention"] * 2),
    ],
)
def test_a_sliding_window_that_hides_nothing_is_no_obstacle(changes):
    config = _edited("qwen2", use_sliding_window=True, **changes)
    plain = CONFIGS["qwen2"]
    read = model_config.from_hugging_face
    assert read(config, "") == read(plain, "")


@pytest.mark.parametrize(
    "changes",
    [
        dict(sliding_window=None, attention_chunk_size=None),
        dict(sliding_window=128),
        dict(sliding_window=8, layer_types=["full_attention"] * 2),
        dict(use_sliding_window=True),
    ],
)
def test_a_window_of_llama_that_hides_nothing_is_no_obstacle(changes):
    read = model_config.from_hugging_face
    assert read(_edited("llama", **changes), "") == read(CONFIGS["llama"], "")


def _index(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_shards_keep_to_their_limit_and_the_index_names_each_tensors(tmp_path, dtype):
    most = 12_000
    folder, config, wanted = _write(tmp_path, dtype=dtype, max_shard_bytes=most)
    index = _index(folder)
    files = sorted(folder.glob("*.safetensors"))
    count = len(files)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert [path.name for path in files] == names and count > 2
    # safetensors itself reads each file, and finds in it what the index says.
    tensors = {path.name: load_file(path) for path in files}
    held = {name: file for file, part in tensors.items() for name in part}
    assert index["weight_map"] == held
    sizes = [sum(x.nbytes for x in part.values()) for part in tensors.values()]
    assert max(sizes) <= most and index["metadata"]["total_size"] == sum(sizes)
    if dtype != np.float32:
        wanted = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), wanted)
    found, again = models.read_model(folder)
    assert again == config
    _assert_identical(found, wanted)


def test_a_tensor_larger_than_a_shard_has_a_file_to_itself(tmp_path):
    folder, _, wanted = _write(tmp_path, max_shard_bytes=1)
    files = set(_index(folder)["weight_map"].values())
    assert len(files) == len(_index(folder)["weight_map"]) > 20
    _assert_identical(models.read_model(folder)[0], wanted)


def test_a_shard_is_filled_up_to_the_last_byte_of_its_limit():
    found = safetensors_files._shards({"a": 6, "b": 6, "c": 6}, 12)
    assert found == [["a", "b"], ["c"]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_files_of_half_the_width_that_others_wrote_are_read(tmp_path, dtype):
    folder, _, weights = _write(tmp_path)
    path = folder / "model.safetensors"
    save_file({name: x.astype(dtype) for name, x in load_file(path).items()}, path)
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), weights)
    _assert_identical(models.read_model(folder)[0], rounded)


def test_files_beside_those_of_the_model_are_left_alone(tmp_path):
    folder, _, wanted = _write(tmp_path, max_shard_bytes=12_000)
    save_file({"other": np.ones(3)}, folder / "consolidated.safetensors")
    _assert_identical(models.read_model(folder)[0], wanted)
    whole, _, _ = _write(tmp_path / "whole")
    save_file({"other": np.ones(3)}, whole / "adapter_model.safetensors")
    _assert_identical(models.read_model(whole)[0], wanted)


def test_stored_rotary_frequencies_and_a_tied_models_head_are_not_read(tmp_path):
    folder, _, wanted = _write(tmp_path, **SHAPES["smollm2"])
    buffers = {
        "lm_head.weight": wanted["embedding"],
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "model.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    _add(folder, buffers)
    _assert_identical(models.read_model(folder)[0], wanted)
    _add(folder, {"lm_head.weight": np.ones((7, 36), np.float32)})
    assert "lm_head.weight has shape (7, 36)" in _refusal(models.read_model, folder)


def test_an_index_that_cannot_be_followed_is_one_sentence(tmp_path):
    folder, _, _ = _write(tmp_path, max_shard_bytes=12_000)
    index = folder / "model.safetensors.index.json"
    first = sorted(folder.glob("*.safetensors"))[0]
    away = first.rename(tmp_path / "away")
    text = _refusal(models.read_model, folder)
    assert f"names {first.name} (1 of" in text and "copy or download the whole" in text
    away.rename(first)
    for wrong in ("{", "[]", "{}", '{"weight_map": {"a": "../away"}}'):
        index.write_text(wrong)
        assert f"{index} cannot be read" in _refusal(models.read_model, folder)


def test_tensors_that_no_weights_can_be_are_named(tmp_path):
    folder, _, _ = _write(tmp_path)
    name = "model.norm.weight"
    _add(folder, {name: np.ones(32, np.int8)})
    text = _refusal(models.read_model, folder)
    assert f"{name} is stored as I8, which is not supported; choose weights of" in text
    folder, _, _ = _write(tmp_path / "twice", max_shard_bytes=12_000)
    last = sorted(folder.glob("*.safetensors"))[-1]
    save_file(
        load_file(last) | {"model.embed_tokens.weight": np.ones((40, 32), np.float32)},
        last,
    )
    assert "embed_tokens.weight is both in model-00001-of-0000" in _refusal(
        models.read_model, folder
    )


HEADERS = {
    "ends within its header": b"\xff" * 8 + b"{}",
    "Expecting": b"\x02" + bytes(7) + b"{x",
    "does not begin where": {"data_offsets": [4, 12]},
    "'shape'": {"shape": None},
    "needs 8 bytes": {"data_offsets": [0, 4]},
    "its tensors take": {"shape": [1], "data_offsets": [0, 4]},
}


@pytest.mark.parametrize("reason", HEADERS)
def test_a_damaged_header_is_one_sentence(tmp_path, reason):
    folder, _, _ = _write(tmp_path)
    path, wrong = folder / "model.safetensors", HEADERS[reason]
    if isinstance(wrong, dict):
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | wrong
        entry = {key: value for key, value in entry.items() if value is not None}
        header = json.dumps({"model.norm.weight": entry}).encode()
        wrong = len(header).to_bytes(8, "little") + header + bytes(8)
    path.write_bytes(wrong)
    text = _refusal(models.read_model, folder)
    assert text.startswith(f"{path} is damaged or unreadable (") and reason in text


def test_one_tensor_of_a_file_is_in_memory_at_a_time(tmp_path):
    config = models.small_config(400, layers=8, width=64, mlp_width=200)
    weights = jax.device_get(models.random_parameters(config))
    total = 4 * parameters.count(weights)
    largest = 4 * 400 * 64
    assert total > 10 * largest
    peaks = []
    for act in (
        lambda: hugging_face.write_folder(
            tmp_path / "model", config, weights, models.make_tokenizer()
        ),
        lambda: models.read_model(tmp_path / "model"),
    ):
        tracemalloc.start()
        act()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Room for the tokenizer's texts and the modules that reading imports.
    room = 2 * largest + 500_000
    assert peaks[0] < room and total < peaks[1] < total + room < 1.7 * total


def _write(where: Path, *, dtype=np.float32, max_shard_bytes=2**30, **shape):
    config = models.small_config(40, **(shape or models.LLAMA3))
    weights = jax.device_get(models.random_parameters(config))
    folder = where / "model"
    hugging_face.write_folder(
        folder, config, weights, models.make_tokenizer(), dtype, max_shard_bytes
    )
    return folder, config, weights


def _add(folder: Path, tensors: dict) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def _logits(weights, config, tokens) -> jax.Array:
    hidden = transformer.hidden_states(weights, jnp.asarray(tokens), config)
    return transformer.vocabulary_logits(weights, hidden)


def _assert_identical(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def _refusal(call, *args) -> str:
    """The message of the UserError, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
