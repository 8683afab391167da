"""Talks of fixed lengths are greedy conversations, and what is counted of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from ragen_jax import loop, peers, speed, weights
from ragen_jax.models import hugging_face, parameters, presets, transformer

BATCH, TURNS, TOLD, REPLY = 8, 3, 10, 6
EVERY = speed.Ceilings(matmul=1e9, copy=2e9, read=1e9, dtype="float32")


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def actor(run):
    return weights.load_parameters(run, value_head=False)


@pytest.fixture(scope="module")
def spoken(run, actor):
    """(the talk, its rows)."""
    talk = speed.random_talk(run.config.vocabulary, BATCH, TURNS, TOLD, REPLY)
    talker = speed.make_talker(run, speed.decoding_weights(run, actor), talk)
    return talk, np.asarray(talker.speak())


def test_a_talk_is_what_is_told_and_the_likeliest_replies(run, actor, spoken):
    talk, rows = spoken
    assert rows.shape == (BATCH, talk.row) == (BATCH, TURNS * (TOLD + REPLY))
    hidden = transformer.hidden_states(actor, jnp.asarray(rows), run.config)
    likeliest = transformer.vocabulary_logits(actor, hidden).argmax(-1)
    turns = rows.reshape(BATCH, TURNS, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(turns[:, :, :TOLD], talk.fed)
    is_reply = np.arange(talk.row) % (TOLD + REPLY) >= TOLD
    np.testing.assert_array_equal(
        rows[:, is_reply], np.asarray(likeliest)[:, :-1][:, is_reply[1:]]
    )
    assert talk.replies == is_reply.sum() * BATCH


def test_eight_devices_share_a_batch_and_say_the_same(run, actor, spoken):
    talk, rows = spoken
    wide = loop.prepare(run.settings)
    talker = speed.make_talker(
        wide, speed.decoding_weights(wide, jax.device_get(actor)), talk
    )
    assert talker.shards == 8
    np.testing.assert_array_equal(talker.speak(), rows)


def test_bytes_and_operations_are_counted_once(run, monkeypatch):
    """Of 2 prompts of 5 tokens and 3 more of each, by hand, in 2 s and 4 s."""
    talk = speed.random_talk(run.config.vocabulary, 2, 1, 5, 3)
    talker = speed.Talker(lambda: "cache", lambda cache: "rows", shards=1)
    taken = iter([[2.0], [4.0]])
    monkeypatch.setattr(speed, "seconds", lambda call, repeats: next(taken))
    figures = speed.talk_figures(run, talker, talk, EVERY, repeats=1)
    c = run.config
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


def test_a_race_tells_how_much_slower_the_others_are_and_where_they_differ():
    talk = speed.random_talk(50, 2, 2, 3, 2)
    rows = np.zeros((2, 10), np.int32)
    other = rows.copy()
    other[0, [3, 5]] = 1  # One of eight reply tokens, and one that was told.
    clock = iter([0.0, 1.0, 1.0, 4.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed.time, "perf_counter", lambda: next(clock))
        runs_of = {"ours": lambda: rows, "them": lambda: other}
        figures = speed.race("talk", talk, runs_of, repeats=1)
    assert figures == {
        "talk, ours, reply tokens/s": 8.0,
        "talk, them, reply tokens/s": 8 / 3,
        "talk, times faster than them": 3.0,
        "talk, same reply tokens as them": 7 / 8,
    }


def test_what_is_compiled_is_counted():
    with speed.counting() as seen:
        jax.jit(lambda x: x * 3.25 - 1)(jnp.arange(7.0))
    assert seen.programs >= 1 and seen.seconds > 0
    before = dataclasses.replace(seen)
    jax.jit(lambda x: x * 4.25 - 1)(jnp.arange(7.0))
    assert seen == before


def test_peers_that_are_not_there_are_named(run, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.missing(run.config) == {
        "transformers": "unmeasured: its models need torch, which is not here",
        "google-tunix": "unmeasured: it is not installed",
    }


@pytest.mark.parametrize("name", peers.OPEN)
def test_a_peer_says_the_same_from_the_same_weights(run, actor, spoken, tmp_path, name):
    if why := peers.missing(run.config).get(name):
        pytest.skip(why)
    talk, rows = spoken
    folder = peers.model_folder(run, actor, tmp_path / "model")
    assert folder == run.source.path  # It is a folder already.
    speaker, told = peers.OPEN[name](folder, run)
    assert told.startswith(name)
    np.testing.assert_array_equal(speaker(talk), rows)


def test_a_gguf_models_weights_are_written_for_peers(run, actor, tmp_path):
    source = dataclasses.replace(run.source, is_gguf=True)
    other = dataclasses.replace(run, source=source)
    folder = peers.model_folder(other, actor, tmp_path / "new")
    assert folder == tmp_path / "new"
    assert hugging_face.read_config(folder) == run.config


def test_shapes_are_those_of_the_models_that_they_are_named_after():
    """As their cards say: 135 M and 494 M; the embedded one as its file says."""
    counts = {
        name: parameters.count(parameters.declare(config))
        for name, config in presets.SHAPES.items()
    }
    assert counts == {
        "tiny": parameters.count(
            hugging_face.read_parameters(
                presets.TINY_FOLDER, presets.TINY, parameters.declare(presets.TINY)
            )
        ),
        "smollm2": 134_515_008,
        "qwen2.5-0.5b": 494_032_768,
    }


def test_a_model_of_random_weights_is_a_folder_like_any_other(tmp_path):
    config = presets.SHAPES["tiny"]
    speed.write_random_model(tmp_path / "model", config, jnp.bfloat16)
    other = loop.prepare(runs.settings(model__path=str(tmp_path / "model")))
    assert other.config == config
    weights.check_weights(other)
