"""Processes that do not fit, or fail: refused at the start, ended in seconds."""

import re
import shutil
import signal
import time

import jax.numpy as jnp
import pytest
from helpers import runs
from safetensors import numpy

from ragen_jax.training import checkpoints, weights

pytestmark = pytest.mark.slow  # Several processes.

# Each process enters the workdir that it is given.
ENTERING = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[4])
import jax

index = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=index)
from helpers import runs

from ragen_jax.errors import UserError
from ragen_jax.training.workdir import only_run

try:
    with only_run(Path(sys.argv[3]), runs.settings(), print):
        print("entered")
except UserError as error:
    print(error)
"""

# One of two processes fails, while the other waits for it.
FAILING = """
import sys
import time

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.parallel import distributed
from ragen_jax.utils import endings

endings.install()
place, index, failing, mistake = sys.argv.pop(), *map(int, sys.argv[:0:-1])
del sys.argv[1:]


def main():
    distributed.start(place, 2, index)
    if index != failing:
        time.sleep(240)
    raise UserError("a mistake") if mistake else KeyError("a fault")


cli.run(main)
"""

# One of two processes ends as planned while the other still works, and then is lost.
LATER = """
import os
import signal
import sys
import time

from ragen_jax import cli
from ragen_jax.parallel import distributed
from ragen_jax.utils import endings

endings.install()
place, index, failing, seconds = sys.argv.pop(), *map(int, sys.argv[:0:-1])
del sys.argv[1:]


def main():
    distributed.start(place, 2, index)
    if index == failing:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    print("at its end", flush=True)


cli.run(main)
"""

# The first of two processes speaks, to whoever listens.
SPEAKING = """
import sys

from ragen_jax import cli
from ragen_jax.parallel import distributed
from ragen_jax.reporting.console import Console
from ragen_jax.utils import endings

endings.install()
place, index = sys.argv[1], int(sys.argv[2])
del sys.argv[1:]


def main():
    distributed.start(place, 2, index)
    if index == 0:
        console = Console(sys.stdout)
        with console.on_lost_reader(lambda: None):
            console.line("a line")


cli.run(main)
"""

# One of two processes is killed while both write a checkpoint.
KILLED = """
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ragen_jax import cli
from ragen_jax.parallel import distributed, gloo_groups
from ragen_jax.utils import endings

endings.install()
folder, place, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
del sys.argv[1:]


def die_when_step_2_is_begun():
    while not any(any(path.iterdir()) for path in folder.glob("2.*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    distributed.start(place, 2, index)
    import jax

    from ragen_jax.parallel import mesh as meshes
    from ragen_jax.training import checkpoint_leaves
    from ragen_jax.training.checkpoints import Checkpoints

    mesh = meshes.make_mesh(1, 2, 1)
    gloo_groups.connect(mesh)
    half = jax.NamedSharding(mesh, jax.P("fsdp"))
    state = {"x": jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=half)()}
    with Checkpoints(folder, keep_last=1, keep_best=0) as saved:
        saved.save(1, state, {}, score=None, wait=True)
        if index == 1:
            threading.Thread(target=die_when_step_2_is_begun, daemon=True).start()
        saved.save(2, state, {}, score=None, wait=True)


cli.run(main)
"""

# The first exchange of two processes, for which one is late.
LATE = """
import sys
import time

from ragen_jax import cli
from ragen_jax.cli import startup
from ragen_jax.parallel import distributed
from ragen_jax.utils import endings

endings.install()
settings, start = cli.read_settings(cli.load_config(sys.argv.pop())), distributed.start


def start_late(*given):
    start(*given)
    if "--process=1" in sys.argv:
        time.sleep(33)


distributed.start = start_late
cli.run(lambda: cli.start_jax(settings))
"""

# An environment whose rules name words in the order of a set.
UNSORTED = """
import dataclasses
from ragen_jax.envs.frozen_lake import env as lake
Settings = lake.FrozenLake
def make(settings):
    honest = lake.make(settings)
    words = ", ".join({"ice", "hole", "goal", "start", "player"})
    rules = f"{honest.instruction} Words: {words}."
    return dataclasses.replace(honest, instruction=rules)
"""

# The plan as one of the processes shows it, without what it takes to make one.
PLANNING = """
import sys

sys.path.insert(0, sys.argv[1])
import jax
import train

from ragen_jax.training import memory_plan

index = int(sys.argv[2])
jax.process_index = lambda: index
memory_plan.plan = lambda run: None
memory_plan.report = lambda run, plan: "the plan"
train._report_plan(None)
"""


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_workdir_that_is_another_folder_elsewhere_is_refused(tmp_path, name):
    """Apart, the processes would wait for each other at the first checkpoint."""
    script = tmp_path / "entering.py"
    script.write_text(ENTERING)
    folders = [tmp_path / "first", tmp_path / name]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    place = f"127.0.0.1:{runs.free_port()}"
    rest = str(runs.ROOT / "tests")
    both = [
        runs.start([place, str(index), str(folder), rest], script)
        for index, folder in enumerate(folders)
    ]
    for folder, (code, output, errors) in zip(
        folders, [runs.finish(process) for process in both], strict=True
    ):
        assert code == 0, errors
        said = re.sub(r"\[Gloo\].*\n", "", output)
        if name == "first":
            assert said == "entered\n"
        else:
            assert said == (
                f"--workdir={folder} of process 1 is another folder than that of"
                " process 0: give all of them one folder, on storage that all hosts"
                " see\n"
            )
        assert not list(folder.glob(".seen*"))


@pytest.mark.parametrize(("failing", "mistake"), [(0, 1), (0, 0), (1, 1), (1, 0)])
def test_a_process_that_fails_ends_the_others_and_itself_at_once(
    tmp_path, failing, mistake
):
    """JAX would wait for the others when it ends, for minutes, and they for it."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    place = f"127.0.0.1:{runs.free_port()}"
    both = [
        runs.start([str(mistake), str(failing), str(index), place], script)
        for index in (0, 1)
    ]
    ended = [runs.finish(process, 120) for process in both]
    code, _, errors = ended[failing]
    if mistake:
        assert (code, errors) == (2, "error: a mistake\n")
    else:
        assert code == 1 and errors.endswith("KeyError: 'a fault'\n")
    its_code, _, errors = ended[1 - failing]
    assert its_code == code  # As it would end the next time, too.
    assert errors.startswith(f"error: process {failing} (host "), errors
    assert errors.endswith(f") has ended with code {code}: its output says why\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_at_its_end_hears_that_another_is_lost(tmp_path, failing):
    """JAX would wait for that one for 300 s, and end in a dump."""
    script = tmp_path / "later.py"
    script.write_text(LATER)
    place = f"127.0.0.1:{runs.free_port()}"
    given = ["2", str(failing)]
    both = [runs.start([*given, str(index), place], script) for index in (0, 1)]
    ended = [runs.finish(process, 120) for process in both]
    assert ended[failing][0] == -signal.SIGKILL
    code, _, errors = ended[1 - failing]
    assert code == 75
    *_, errors = errors.splitlines()  # JAX may notice process 0's end first.
    assert errors.startswith(f"error: process {failing}"), errors
    assert "has ended; the same command on all" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_for_others_at_its_end(tmp_path, number):
    """JAX takes SIGTERM when it connects the processes, and only notes it.

    It may come from a scheduler, and cuts short what the others still save.
    """
    script = tmp_path / "later.py"
    script.write_text(LATER)
    place = f"127.0.0.1:{runs.free_port()}"
    both = [runs.start(["240", "0", str(index), place], script) for index in (0, 1)]
    while both[1].stdout.readline() != "at its end\n":
        assert both[1].poll() is None
    time.sleep(0.5)
    both[1].send_signal(number)
    (code, _, errors), (its_code, _, its_errors) = map(runs.finish, both)
    assert (its_code, its_errors) == {
        signal.SIGINT: (130, "interrupted\n"),
        signal.SIGTERM: (
            75,
            "error: terminated at the end, while other processes still worked; the"
            " same command on all of them resumes from the last checkpoint\n",
        ),
    }[number]
    assert code == 75 and errors.startswith("error: process 1 (host ")


def test_a_first_process_to_which_nobody_listens_does_not_abort_the_others(tmp_path):
    """It ends by a pipe's code, without Python's end, in which JAX takes its leave."""
    script = tmp_path / "speaking.py"
    script.write_text(SPEAKING)
    place = f"127.0.0.1:{runs.free_port()}"
    buffered = {"PYTHONUNBUFFERED": ""}
    both = [runs.start([place, str(i)], script, buffered) for i in (0, 1)]
    both[0].stdout.close()
    both[0].stdout = None
    assert [runs.finish(process, 120)[::2] for process in both] == [(141, ""), (0, "")]


def test_a_save_that_a_lost_process_cuts_short_is_not_blamed_on_the_disk(tmp_path):
    """Exit code 75 says that the same command resumes, 2 that it will not."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = tmp_path / checkpoints.FOLDER
    place = [str(folder), f"127.0.0.1:{runs.free_port()}"]
    both = [runs.start([*place, str(index)], script) for index in (0, 1)]
    (code, _, errors), (its_code, *_) = [runs.finish(process, 120) for process in both]
    assert (code, its_code) == (75, -signal.SIGKILL), errors
    assert errors.startswith("error: process 1 (host "), errors
    assert errors.count("\n") == 1
    assert list(checkpoints.scores(folder)) == [1]


def test_a_process_may_be_half_a_minute_late_for_the_first_exchange(tmp_path):
    """Gloo waits 30 s for processes that it has not connected."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    place = [f"--coordinator=127.0.0.1:{runs.free_port()}", "--processes=2"]
    both = [
        runs.start([*place, f"--process={index}", str(runs.CONFIG)], script)
        for index in (0, 1)
    ]
    for code, _, errors in [runs.finish(process) for process in both]:
        assert (code, errors) == (0, "")


MANY = ["--model=tiny", "--prompts=4096", "--rollouts=8", "--out=out.jsonl"]


@pytest.mark.parametrize(("name", "given"), [("evaluate", MANY), ("train", ["--plan"])])
def test_a_signal_ends_an_evaluation_or_a_plan_by_several_processes(
    tmp_path, monkeypatch, name, given
):
    """JAX would take SIGTERM for training, which alone asks about it."""
    monkeypatch.chdir(tmp_path)
    script = runs.ROOT / "launch" / f"{name}.py"
    place = f"--coordinator=127.0.0.1:{runs.free_port()}"
    config = f"--config={runs.ROOT / 'configs' / 'bandit.py'}"
    given = [config, *given, place, "--processes=2"]
    both = [runs.start([*given, f"--process={i}"], script) for i in (0, 1)]
    for line in both[1].stdout:
        if line.startswith("[Gloo]"):  # They are connected.
            break
    both[1].send_signal(signal.SIGTERM)
    (code, _, errors), (its_code, _, its_errors) = map(runs.finish, both)
    assert (its_code, its_errors) == (143, "terminated\n")
    assert code == 75 and errors.startswith("error: process 1 (host ")


def test_an_evaluation_of_models_that_differ_between_hosts_is_refused(tmp_path):
    """Each process would play its share of the levels with weights of its own."""
    other = tmp_path / "model"
    shutil.copytree(runs.model(), other)
    file = other / "model.safetensors"
    tensors = numpy.load_file(file)
    numpy.save_file({k: v + 1 for k, v in tensors.items()}, file, {"format": "pt"})
    script = runs.ROOT / "launch" / "evaluate.py"
    given = runs.arguments(tmp_path)
    given = [x for x in given if "workdir" not in x and "evaluation." not in x]
    # The others are of training, and refused.
    given = [x for x in given if x.startswith(("--config=", "--config.env."))]
    place = [f"--coordinator=127.0.0.1:{runs.free_port()}", "--processes=2"]
    out = tmp_path / "out.jsonl"
    both = [
        runs.start([*given, f"--model={model}", f"--out={out}", *place, own], script)
        for model, own in ((runs.model(), "--process=0"), (other, "--process=1"))
    ]
    ended = [runs.finish(process) for process in both]
    assert [code for code, _, _ in ended] == [2, 2], ended
    # One that is late only learns that the other has ended, and with what code.
    told = [errors for _, _, errors in ended]
    refused = "error: process 1 has a model of other weights"
    assert any(errors.startswith(refused) for errors in told), told
    late = re.compile(r"process [01] .*has ended with code 2: its output says why")
    assert all(e.startswith(refused) or late.search(e) for e in told), told
    assert not list(tmp_path.glob("out*"))


def test_processes_whose_environments_have_other_texts_are_refused(tmp_path):
    """Each process has an order of its own of a set of strings."""
    (tmp_path / "unsorted.py").write_text(UNSORTED)
    env = str(tmp_path / "unsorted.py")
    given = runs.arguments(tmp_path / "run", env__name=env)
    place = [f"--coordinator=127.0.0.1:{runs.free_port()}", "--processes=2"]
    both = [
        runs.start(
            [*given, *place, f"--process={index}"],
            more={"PYTHONHASHSEED": str(index + 1)},
        )
        for index in (0, 1)
    ]
    for code, _, errors in map(runs.finish, both):
        lines = [line for line in errors.splitlines() if line.startswith("error")]
        assert code == 2 and len(lines) == 1, errors
        assert lines[0].startswith(
            "error: the environments of process 1 have other texts than those of"
        )
    assert not (tmp_path / "run" / checkpoints.FOLDER).exists()


def test_the_fingerprint_of_a_checkpoint_that_plays_tells_copies_from_others(tmp_path):
    for name, number in (("one", 1.0), ("copy", 1.0), ("other", 2.0)):
        state = {"actor": jnp.float32(number)}
        with checkpoints.Checkpoints(tmp_path / name, keep_last=1, keep_best=0) as all:
            all.save(1, state, {}, score=None)
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    model = runs.prepare().model
    one, copy, other = (
        weights.played_fingerprint(model, tmp_path / name, 1)
        for name in ("one", "copy", "other")
    )
    assert one == copy != other
    assert {name for name in one if one[name] != other[name]} == {
        "checkpointed weights"
    }


def test_a_plan_is_shown_by_the_first_process_alone(tmp_path):
    script = tmp_path / "planning.py"
    script.write_text(PLANNING)
    launch = str(runs.ROOT / "launch")
    both = [runs.start([launch, str(index)], script) for index in (0, 1)]
    first, second = [runs.finish(process) for process in both]
    assert first[0] == second[0] == 0, (first, second)
    assert "the plan\n" in first[1] and second[1] == ""
