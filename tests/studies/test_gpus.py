"""Which GPUs the runs of a study see."""

import subprocess

import pytest

from ragen_jax.studies import gpus

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a-1)
  MIG 1g.10gb     Device  0: (UUID: MIG-7)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0b-2)
"""


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs, and JAX's plugin for them."""
    asked = subprocess.CompletedProcess([], 0, stdout=LISTED)
    monkeypatch.setattr(gpus.subprocess, "run", lambda *_, **__: asked)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _: "there")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    return monkeypatch


def test_gpus_are_those_that_the_driver_lists(machine):
    assert gpus.found() == ["GPU-0a-1", "GPU-0b-2"]


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [("3,GPU-0b-2", ["3", "GPU-0b-2"]), ("1,-1,0", ["1"]), ("", []), ("none", [])],
)
def test_gpus_that_were_chosen_are_all_that_there_are(machine, chosen, seen):
    machine.setenv(gpus.VARIABLE, chosen)
    assert gpus.found() == seen


def test_gpus_that_jax_leaves_alone_are_none(machine):
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert gpus.found() == []
    machine.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert len(gpus.found()) == 2
    machine.setattr(gpus.importlib.util, "find_spec", lambda _: None)
    assert gpus.found() == []


def test_a_machine_without_a_driver_has_none(machine):
    def missing(*_, **__):
        raise FileNotFoundError

    machine.setattr(gpus.subprocess, "run", missing)
    assert gpus.found() == []


def test_no_gpu_is_in_two_shares_and_shares_are_equal():
    names = ["0", "1", "2", "3", "4"]
    assert gpus.split(names, 1) == ["0,1,2,3,4"]
    assert gpus.split(names, 2) == ["0,1", "2,3"]
    assert gpus.split(names, 9) == names
    assert gpus.split([], 2) == []
