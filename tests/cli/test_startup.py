"""How a launch script starts JAX."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jaxlib
import pytest
from helpers import runs, warm_process
from helpers.paths import CONFIGS, ROOT

from ragen_jax import cli
from ragen_jax.cli import compiler_options, startup
from ragen_jax.errors import ProcessAbsent
from ragen_jax.training import checkpoint_files, checkpoints


@pytest.mark.parametrize(
    ("dtype", "users", "found"),
    [
        ("float32", None, "highest"),
        ("float32", "high", "high"),
        ("auto", None, None),  # A CPU's float32 has no other precision.
        ("bfloat16", None, None),
    ],
)
def test_float32_that_is_asked_for_keeps_its_digits_on_every_device(
    dtype, users, found
):
    settings = runs.prepare(model__compute_dtype=dtype).settings
    jax.config.update("jax_default_matmul_precision", users)
    try:
        compiler_options.set_precision(settings)
        assert jax.config.jax_default_matmul_precision == found
    finally:
        jax.config.update("jax_default_matmul_precision", None)


@pytest.mark.parametrize("users", [None, "7"])
def test_a_process_may_pin_all_of_its_hosts_memory_unless_the_user_says_less(
    monkeypatch, users
):
    settings = cli.read_settings(cli.load_config(str(CONFIGS / "frozenlake.py")))
    variable = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv(variable, users or "")
    if users is None:
        monkeypatch.delenv(variable)
    compiler_options.set_all(settings)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert int(os.environ[variable]) == int(users or max(64, pages // 2**30))


@pytest.mark.parametrize(
    ("error", "is_awaited", "code"),
    [
        (KeyError("a fault"), True, 1),
        (jax.errors.JaxRuntimeError("INTERNAL: a collective failed"), True, 75),
        (jax.errors.JaxRuntimeError("INTERNAL: a kernel failed"), False, 1),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True, 1),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such layout"), True, 1),
    ],
)
def test_a_device_error_among_several_processes_asks_for_another_try(
    monkeypatch, error, is_awaited, code
):
    """A host may be lost, and the heartbeat not have noticed it yet."""
    monkeypatch.setattr(startup.distributed, "is_awaited", lambda: is_awaited)
    assert startup._code_of(error) == code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(0), "test_startup.py, line "),
        (MemoryError("Unable to allocate 8 GiB"), " (Unable to allocate 8 GiB): lower"),
    ],
)
def test_what_no_command_survives_is_told_in_one_sentence(
    monkeypatch, capsys, error, said
):
    def main():
        raise error

    monkeypatch.setattr(startup.app, "run", lambda call, flags_parser: call(None))
    with pytest.raises(SystemExit) as ended:
        startup.run(main, computes=False)
    assert ended.value.code == 2
    assert said in (errors := capsys.readouterr().err) and errors.count("\n") == 1


def test_an_absent_process_ends_with_the_code_of_another_try(monkeypatch):
    def main():
        raise ProcessAbsent("process 1 did not come")

    monkeypatch.setattr(startup.app, "run", lambda call, flags_parser: call(None))
    with pytest.raises(SystemExit) as ended:
        startup.run(main, computes=False)
    assert ended.value.code == 75


_ABSENT = """
import atexit, os, signal, time

from ragen_jax.utils import endings
endings.install()
from ragen_jax.cli import startup

def as_srun_does():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)

def main():
    atexit.register(as_srun_does)
    from ragen_jax.errors import ProcessAbsent
    raise ProcessAbsent("process 1 did not come")

startup.run(main, computes=False)
"""


def test_a_sigterm_after_the_error_leaves_an_absent_process_its_code():
    """srun sends one as soon as any process has ended, and tells the highest code."""
    ended = subprocess.run(
        [sys.executable, "-c", _ABSENT], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (75, "error: process 1 did not come\n")


def test_flags_for_xla_that_the_user_gives_win_over_ours():
    ours = compiler_options.xla_flags("", deterministic=False)
    assert "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling," in ours
    assert "nondeterministic" not in ours
    given = "--xla_backend_extra_options=xla_cpu_optimize_for_size"
    both = compiler_options.xla_flags(given, deterministic=True)
    assert both.count("xla_backend_extra_options") == 1
    assert both.startswith(given)
    assert "--xla_gpu_exclude_nondeterministic_ops=true" in both


def test_xla_still_knows_the_options_by_which_it_compiles_less():
    # It ignores those that it does not know.
    library = Path(jaxlib.__file__).with_name("libjax_common.so")
    if not library.exists():
        pytest.skip("jaxlib keeps XLA in another file here")
    with (
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for name in compiler_options._LEFT_OUT:
            # A compiler may write a short name in vectors of 16 bytes (jaxlib 0.11).
            whole, end = name.encode(), name.encode()[-16:]
            assert max(content.find(whole), content.find(end)) >= 0, name


def test_a_config_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(CONFIGS / "frozenlake.py", tmp_path / "mine.py")
    assert cli.load_config("~/mine.py:smoke").iterations == 2


def test_a_user_without_a_home_folder_goes_without_the_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(Path, "home", home)
    try:
        jax.config.update(names[0], None)
        startup.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_job_of_one_process_asks_the_cluster_once(monkeypatch):
    asked = []
    settings = cli.read_settings(cli.load_config(str(CONFIGS / "frozenlake.py")))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv(compiler_options._HOST_MEMORY, "7")
    monkeypatch.setattr(startup, "_collect_garbage_seldom", lambda: None)
    monkeypatch.setattr(startup.distributed, "find_place", lambda *a: asked.append(a))
    for flag in ("_COORDINATOR", "_PROCESSES", "_PROCESS"):
        monkeypatch.setattr(startup, flag, types.SimpleNamespace(value=None))
    startup.start_jax_alone(settings, "a diagnosis")
    assert len(asked) == 1
    assert "--xla_cpu_collective" in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("diagnose", "a diagnosis"),
        ("benchmark", "a benchmark"),
        ("study", "a study"),
        ("warm_start", "a supervised start"),
        ("export", "an export"),
    ],
)
def test_what_one_process_makes_is_refused_to_several_at_once(tmp_path, script, what):
    """They printed and wrote all of it twice, and ended in a traceback."""
    place = ["--coordinator=127.0.0.1:1", "--processes=2", "--process=1"]
    own = {
        "benchmark": [f"--config={CONFIGS / 'frozenlake.py'}:smoke"],
        "study": [f"--study={CONFIGS / 'studies' / 'stabilized.py'}"],
        "warm_start": [f"--config={CONFIGS / 'warm_start.py'}"],
    }.get(script) or [f"--checkpoint={_checkpoint(tmp_path / 'run')}"]
    if script in ("study", "warm_start", "export"):
        folder = "folder" if script == "study" else "out"
        own.append(f"--{folder}={tmp_path / 'new'}")
    ended = warm_process.attempt(
        ROOT / "launch" / f"{script}.py", own + place, tmp_path
    )
    assert (ended.code, ended.output, ended.compiled) == (2, "", [])
    assert ended.errors == (
        f"error: {what} runs in one process, but 2 were started: start one, without"
        " --coordinator, --processes and --process, or outside of the cluster's"
        " launcher\n"
    )
    assert not (tmp_path / "new").exists()


def _checkpoint(workdir: Path) -> Path:
    """A workdir with the record of a step, and none of its arrays."""
    folder = workdir / checkpoints.FOLDER / "1"
    (folder / "info").mkdir(parents=True)
    config = cli.load_config(f"{CONFIGS / 'frozenlake.py'}:smoke")
    info = {"settings": config.to_dict()}
    record = dict(format=checkpoint_files.FORMAT, step=1, score=None, info=info)
    (folder / checkpoint_files.INFO).write_text(json.dumps(record))
    checkpoint_files.write_digests(folder)
    return workdir
