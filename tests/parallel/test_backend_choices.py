"""What is chosen by backend, for devices that need not be there."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import models

from ragen_jax.errors import SettingsError
from ragen_jax.parallel import backend, backend_choices
from ragen_jax.parallel.backend import Backend
from ragen_jax.rollout import rollout as rollout_lib


def target(name="gpu", capability=(9, 0)) -> Backend:
    devices = tuple(jax.devices()[:1])  # Nothing is compiled for them.
    return Backend(name, devices, devices, capability)


def plan(window=0, **sizes):
    task = models.usual_task()
    sizes = dict(group_size=4, slots=0, context=0, decode_chunk=0, buckets=0) | sizes
    share = task.share(4)
    return models.make_plan((share,), (task.tokens,), shards=1, window=window, **sizes)


@pytest.mark.slow
def test_a_cpu_reads_by_bucket_and_a_gpu_in_aligned_rows_with_one_bucket():
    here = plan()
    assert (here.decode_chunk, here.extend_width, here.extend_share) == (4, 4, 0)
    assert here.context == 352 and here.buckets == (264, 352)
    with backend.targeting(target()):
        there = plan()
        assert (there.decode_chunk, there.extend_width) == (4, 2)
        assert there.extend_share == 8
        assert there.context == 384 and there.buckets == (384,)


@pytest.mark.slow
def test_what_the_settings_say_is_not_chosen_for_them():
    with backend.targeting(target()):
        there = plan(decode_chunk=3, buckets=4)
        assert there.decode_chunk == 3 and there.buckets == (288, 384)
        # A window that is shorter than all turns need says which turns are dropped.
        assert plan(window=2, context=301).context == 301


def test_attention_takes_the_kernel_of_the_settings_or_what_suits_the_device():
    bf16, f32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    decode, rows = backend_choices.decode_attention, backend_choices.row_attention
    with backend.targeting(target()):
        for chosen in (decode, rows):
            assert chosen("auto", bf16, 64) == chosen("cudnn", bf16, 64) == "cudnn"
            assert chosen("xla", bf16, 64) == chosen("auto", f32, 64) == "xla"
    with backend.targeting(target("tpu", None)):
        assert rows("auto", bf16, 64) == rows("splash", bf16, 64) == "splash"
        assert rows("xla", bf16, 64) == rows("auto", f32, 64) == "xla"
        assert decode("auto", bf16, 64) == decode("auto", f32, 64) == "merged"
        assert decode("xla", bf16, 64) == "xla"
    with backend.targeting(target("cpu", None)):
        assert decode("auto", bf16, 64) == "xla"
        assert rows("auto", f32, 64) == "rows"
        assert rows("xla", f32, 64) == "xla"


def test_rows_are_whole_tiles_on_a_gpu_and_a_failure_leaves_its_target():
    assert backend_choices.row_length(65) == 65
    with pytest.raises(KeyError), backend.targeting(target()):
        assert [backend_choices.row_length(n) for n in (64, 65)] == [64, 128]
        raise KeyError
    assert backend.name() == "cpu"


@pytest.mark.parametrize(
    ("where", "dtype", "head_dim", "said"),
    [
        (target("cpu", None), jnp.float32, 64, "here are cpu, float32 and 64"),
        (target(capability=(7, 5)), jnp.bfloat16, 64, "here are gpu, bfloat16 and 64"),
        (target(), jnp.bfloat16, 12, "here are gpu, bfloat16 and 12"),
    ],
)
def test_cudnn_is_refused_where_it_has_no_kernel(where, dtype, head_dim, said):
    with backend.targeting(where), pytest.raises(SettingsError, match=said):
        backend_choices.decode_attention("cudnn", dtype, head_dim)
    with backend.targeting(where), pytest.raises(SettingsError, match=said):
        backend_choices.row_attention("cudnn", dtype, head_dim)


@pytest.mark.parametrize(
    ("where", "dtype", "said"),
    [
        (target("cpu", None), jnp.float32, "here are cpu and float32: set it to"),
        (target(), jnp.bfloat16, "here are gpu and bfloat16: set it to 'auto'"),
        (target("tpu", None), jnp.float32, "here are tpu and float32: set it to"),
    ],
)
def test_splash_attention_is_refused_where_there_is_none(where, dtype, said):
    with backend.targeting(where), pytest.raises(SettingsError, match=said):
        backend_choices.row_attention("splash", dtype, 64)


def test_a_rollout_that_wants_a_missing_kernel_is_refused_before_it_is_traced():
    task = models.usual_task()
    context = dataclasses.replace(
        task.rollout_context(models.one_device()), decode_attention="cudnn"
    )
    with pytest.raises(SettingsError, match="rollout.decode_attention = 'cudnn'"):
        rollout_lib.make_rollout(context, task.plan())


def test_a_cuda_graph_is_made_where_it_is_wanted_and_can_be():
    assert backend_choices.rollout_compiler_options(True) is None
    with backend.targeting(target()):
        assert backend_choices.rollout_compiler_options(False) is None
        options = backend_choices.rollout_compiler_options(True)
        assert "WHILE" in options["xla_gpu_enable_command_buffer"].split(",")
    with backend.targeting(target("tpu", None)):
        assert backend_choices.rollout_compiler_options(True) is None


def test_a_cuda_graph_is_refused_where_none_can_be():
    with pytest.raises(SettingsError, match="and the devices here are cpu: set it to"):
        backend_choices.check_cuda_graph(True)
    backend_choices.check_cuda_graph(False)
    with backend.targeting(target()):
        backend_choices.check_cuda_graph(True)


def test_a_tpu_differs_from_a_gpu_in_lengths_of_the_cache_alone():
    with backend.targeting(target()):
        gpu = backend_choices.choices()
    with backend.targeting(target("tpu", None)):
        tpu = backend_choices.choices()
    assert tpu.buckets == 4 > gpu.buckets  # A slice of its cache needs no copy.
    assert dataclasses.replace(tpu, buckets=gpu.buckets) == gpu


def test_a_training_batch_on_a_cpu_is_decoded_32_episodes_at_a_time():
    assert backend_choices.choices().slots == 32
    with backend.targeting(target()):
        assert backend_choices.choices().slots == 0  # All of them.
