"""Conversations of fixed lengths: greedy, and counted token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, runs

from ragen_jax.benchmarks import device, other_samplers, sampler
from ragen_jax.models import parameters, presets, transformer
from ragen_jax.models.io import hugging_face
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights

BATCH, TURNS, FED, REPLY = 8, 3, 10, 6
EVERY = sampler.DeviceLimits(matmul=1e9, copy=2e9, read=1e9, dtype="float32")


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def actor(run):
    return weights.load_parameters(run.model)


@pytest.fixture(scope="module")
def spoken(run, actor):
    """(the conversation, its rows)."""
    conversation = sampler.random_conversation(
        run.model.config.vocabulary, BATCH, TURNS, FED, REPLY
    )
    runner = sampler.make_runner(
        run.model,
        run.tokens[0],
        sampler.decoding_weights(run.model, actor),
        conversation,
    )
    return conversation, np.asarray(runner.converse())


@pytest.mark.slow
def test_a_conversation_is_its_messages_and_the_likeliest_replies(run, actor, spoken):
    conversation, rows = spoken
    assert rows.shape == (BATCH, conversation.row) == (BATCH, TURNS * (FED + REPLY))
    hidden = transformer.hidden_states(actor, jnp.asarray(rows), run.model.config)
    likeliest = transformer.vocabulary_logits(actor, hidden).argmax(-1)
    turns = rows.reshape(BATCH, TURNS, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(turns[:, :, :FED], conversation.fed)
    is_reply = np.arange(conversation.row) % (FED + REPLY) >= FED
    np.testing.assert_array_equal(
        rows[:, is_reply], np.asarray(likeliest)[:, :-1][:, is_reply[1:]]
    )
    assert conversation.replies == is_reply.sum() * BATCH


@pytest.mark.slow
def test_eight_devices_share_a_batch_and_say_the_same(run, actor, spoken):
    conversation, rows = spoken
    wide = run_lib.prepare(run.settings)
    laid_out = sampler.decoding_weights(wide.model, jax.device_get(actor))
    runner = sampler.make_runner(wide.model, wide.tokens[0], laid_out, conversation)
    assert runner.shards == 8
    np.testing.assert_array_equal(runner.converse(), rows)


def test_bytes_and_operations_are_counted_once(run, monkeypatch):
    """Of 2 prompts of 5 tokens and 3 more of each, by hand, in 2 s and 4 s."""
    conversation = sampler.random_conversation(run.model.config.vocabulary, 2, 1, 5, 3)
    runner = sampler.ConversationRunner(lambda: "cache", lambda cache: "rows", shards=1)
    taken = iter([[2.0], [4.0]])
    monkeypatch.setattr(sampler, "seconds", lambda call, repeats: next(taken))
    figures = sampler.conversation_figures(
        run.model, runner, conversation, EVERY, repeats=1
    )
    c = run.model.config
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim  # q, k, v, o
    layer += 3 * c.width * c.mlp_width + 2 * c.width  # mlp and norms
    layer += (c.heads + 2 * c.kv_heads) * c.head_dim  # biases
    layers, table = c.layers * layer, c.vocabulary * c.width
    entry = 2 * c.layers * c.kv_heads * c.head_dim
    read = 4 * (3 * (layers + table) + 2 * (5 + 6 + 7) * entry)
    wanted = {
        "prefill, tokens/s": 10 / 2,
        "prefill, model FLOP utilization": 2 * layers * 10 / 2 / 1e9,
        "decode, tokens/s": 6 / 4,
        "decode, ms a token of all": 4000 / 3,
        "decode, GB/s": read / 4 / 1e9,
        "decode, share of reading": read / 4 / 1e9,
    }
    assert figures == pytest.approx(wanted)


def test_a_comparison_reports_how_much_slower_others_are_and_where_they_differ():
    conversation = sampler.random_conversation(50, 2, 2, 3, 2)
    rows = np.zeros((2, 10), np.int32)
    other = rows.copy()
    other[0, [3, 5]] = 1  # One of eight reply tokens, and one that was fed.
    clock = iter([0.0, 1.0, 1.0, 4.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.time, "perf_counter", lambda: next(clock))
        runs_of = {"ours": lambda: rows, "them": lambda: other}
        figures = sampler.compare("talk", conversation, runs_of, repeats=1)
    assert figures == {
        "talk, ours, reply tokens/s": 8.0,
        "talk, them, reply tokens/s": 8 / 3,
        "talk, times faster than them": 3.0,
        "talk, same reply tokens as them": 7 / 8,
    }


def test_what_is_compiled_is_counted():
    with device.counting() as seen:
        jax.jit(lambda x: x * 3.25 - 1)(jnp.arange(7.0))
    assert seen.programs >= 1 and seen.seconds > 0
    before = dataclasses.replace(seen)
    jax.jit(lambda x: x * 4.25 - 1)(jnp.arange(7.0))
    assert seen == before


def test_peers_that_are_not_there_are_named(run, monkeypatch):
    monkeypatch.setattr(other_samplers.importlib.util, "find_spec", lambda name: None)
    assert other_samplers.missing(run.model.config) == {
        "transformers": "unmeasured: its models need torch, which is not here",
        "google-tunix": "unmeasured: it is not installed",
    }


@pytest.mark.parametrize("name", other_samplers.OPEN)
def test_a_peer_says_the_same_from_the_same_weights(run, actor, spoken, tmp_path, name):
    if why := other_samplers.missing(run.model.config).get(name):
        pytest.skip(why)
    conversation, rows = spoken
    folder = other_samplers.model_folder(run.model, actor, tmp_path / "model")
    assert folder == run.model.source.path  # It is a folder already.
    runner, version = other_samplers.OPEN[name](folder, run.model)
    assert version.startswith(name)
    np.testing.assert_array_equal(runner(conversation), rows)


def test_a_gguf_models_weights_are_written_for_peers(run, actor, tmp_path):
    source = dataclasses.replace(run.model.source, is_gguf=True)
    other = dataclasses.replace(run.model, source=source)
    folder = other_samplers.model_folder(other, actor, tmp_path / "new")
    assert folder == tmp_path / "new"
    assert hugging_face.read_config(folder) == run.model.config


def test_shapes_are_those_of_the_models_that_they_are_named_after():
    """As their files say: numbers of parameters that are stored, tied ones once."""
    counts = {
        name: parameters.count(parameters.declare(config))
        for name, config in presets.SHAPES.items()
    }
    assert counts == {
        "tiny_words": 1_206_592,
        **{
            name: parameters.count(models.read_model(presets.EMBEDDED[name])[0])
            for name in ("tiny", "tiny_symbols", "tiny_rooms")
        },
        "smollm2": 134_515_008,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
    }


def test_a_model_of_random_weights_is_a_folder_like_any_other(tmp_path):
    config = presets.SHAPES["tiny"]
    sampler.write_random_model(tmp_path / "model", config, jnp.bfloat16)
    other = run_lib.prepare(runs.settings(model__path=str(tmp_path / "model")))
    assert other.model.config == config
    weights.check_weights(other.model)
