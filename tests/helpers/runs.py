"""Whole runs, small enough for tests: a model folder, settings, runs and processes."""

import atexit
import dataclasses
import functools
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache

from helpers import models, xla
from helpers.paths import ROOT
from ragen_jax import settings as settings_lib
from ragen_jax.models.io import hugging_face
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.training import checkpoints, trainer
from ragen_jax.training import run as run_lib
from ragen_jax.training.run import Run

CONFIG = ROOT / "configs" / "frozenlake.py"
COMMAND = "python launch/train.py --workdir=here"

# Over `:smoke`: all of a run's parts, each as small as eight devices can share.
SMALL = {
    "algorithm": "starpo",
    "iterations": 4,
    "env.size": 3,
    "env.frozen_probability": 0.7,
    "rollout.prompts": 2,
    "rollout.group_size": 4,
    "rollout.turns": 2,
    "rollout.reply_tokens": 8,
    "rollout.decode_chunk": 4,
    "rollout.buckets": 1,
    "optimizer.actor_lr": 1e-3,
    "optimizer.warmup": 0,
    "optimizer.schedule": "constant",
    "optimizer.minibatch": 8,
    "optimizer.microbatch": 8,
    "evaluation.prompts": 8,
    "evaluation.test_prompts": 8,
    "evaluation.slots": 8,
    "evaluation.temperature": 1.0,
    "every.evaluate": 2,
    "checkpoint.keep_last": 99,
}


@functools.cache
def home() -> Path:
    """A folder of this test session, deleted at its end."""
    folder = tempfile.mkdtemp(prefix="ragen_jax_tests.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def model() -> Path:
    """A random model that often names moves, as a Hugging Face folder."""
    task, folder = models.make_task(), home() / "model"
    weights = jax.device_get(task.parameters)
    hugging_face.write_folder(folder, task.config, weights, task.tokenizer)
    return folder


def cache() -> str:
    """The folder of compiled programs that all processes of this session may share."""
    return os.environ["RAGEN_JAX_TESTS"] + "/cache"


def share_compilations() -> None:
    """Lets this process use the compiled programs of others that do so, and they its.

    Writing them costs time: only for programs that several modules or processes need.
    """
    jax.config.update("jax_compilation_cache_dir", cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()


# In this process ---------------------------------------------------------------------


def settings(**changes) -> settings_lib.Settings:
    """Small settings; `__` in a key stands for its dot."""
    from ragen_jax import cli

    config = cli.load_config(f"{CONFIG}:smoke")
    config.update_from_flattened_dict(_values(changes))
    return settings_lib.from_dict(config.to_dict())


def prepare(**changes) -> Run:
    """A small run on the first device alone."""
    return run_lib.prepare(settings(**changes), models.one_device())


def prepare_on(*sizes: int) -> Run:
    """A small run on a mesh of two, three or six devices, which can share its rows."""
    names = ["rollout.prompts", "optimizer.minibatch", "optimizer.microbatch"]
    names += [f"evaluation.{name}" for name in ("prompts", "test_prompts", "slots")]
    changes = {name.replace(".", "__"): 6 for name in names}
    return run_lib.prepare(settings(**changes), models.first_devices(*sizes))


def replace_settings(run: Run, **changes) -> Run:
    """The same run with other settings, none that a compiled program depends on."""
    model = dataclasses.replace(run.model, settings=settings(**changes))
    return dataclasses.replace(run, model=model)


def train(run: Run, workdir: Path) -> str:
    """The console's lines of `trainer.train` for a run in `workdir`."""
    workdir.mkdir(exist_ok=True)
    console = io.StringIO()
    try:
        trainer.train(run, workdir, console_lib.Console(console), COMMAND)
    finally:
        (workdir / "console.txt").write_text(console.getvalue())
    return console.getvalue()


# In processes ------------------------------------------------------------------------


def arguments(workdir: Path, **changes) -> list[str]:
    """The command line of launch/train.py; `__` in a key stands for its dot."""
    values = _values(changes)
    if not values["every.evaluate"]:  # Then it is refused, as nothing reads it.
        del values["evaluation.prompts"]
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return [f"--config={CONFIG}:smoke", f"--workdir={workdir}", *overrides]


def start(
    arguments: list[str],
    script: Path = ROOT / "launch" / "train.py",
    more: Mapping[str, str] = types.MappingProxyType({}),
):
    """A launch script in a process of its own with one CPU device; output in pipes.

    Args:
      arguments: of the script.
      script: which.
      more: variables of its environment.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "XLA_FLAGS": xla.FLAGS,
        "JAX_COMPILATION_CACHE_DIR": cache(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **more,
    }
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; ended by force if it hangs."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"still running:\n{output}\n{errors}") from None
    return process.returncode, output, errors


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen) -> None:
    """Returns as soon as `is_so()`; fails when the process ends before."""
    for _ in range(60_000):
        if is_so():
            return
        if process.poll() is not None:
            raise AssertionError(f"ended too early: {process.communicate()}")
        time.sleep(0.005)
    raise AssertionError("waited in vain")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# What a run leaves behind ------------------------------------------------------------


def leaves(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every saved leaf of a step by its dotted path."""
    folder = workdir / checkpoints.FOLDER / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        # As host arrays: this process may lack the devices that they were on.
        host = ocp.RestoreArgs(restore_type=np.ndarray)
        kinds = dict.fromkeys(reader.metadata(folder).item_metadata.tree, host)
        return dict(reader.restore(folder, restore_args=kinds))


def steps(workdir: Path) -> list[int]:
    """The complete checkpoints of a run."""
    return list(checkpoints.scores(workdir / checkpoints.FOLDER))


def records(workdir: Path) -> list[dict]:
    """The metrics of a run without what no two runs share: times and memory."""
    own = ("time/", "memory/", "rollout/tokens_per_second")
    return [
        {name: value for name, value in record.items() if not name.startswith(own)}
        for record in metrics.read(workdir)
    ]


def assert_same_leaves(one: dict, other: dict) -> None:
    """Bit for bit: NaN equals NaN, and 0 is not -0."""
    assert one.keys() == other.keys()
    assert [n for n in one if one[n].tobytes() != other[n].tobytes()] == []


def _values(changes: dict) -> dict:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return {**SMALL, "model.path": str(model()), **changes}
