"""One run in two processes: the same episodes and numbers, saved and resumed."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import runs

pytestmark = pytest.mark.slow  # Several processes, each of which compiles a run.

# launch/train.py as it is, but each process also notes what it holds and looks at.
WATCHED = """
import os
import sys
from pathlib import Path

sys.path.insert(0, {launch!r})
sys.path.insert(0, {tests!r})

from ragen_jax import cli
import numpy as np
import train
from jax.experimental import multihost_utils

from ragen_jax import starpo

iterate, gather = starpo.iterate, multihost_utils.process_allgather
notes = Path({notes!r})


def watched_iterate(run, programs, state):
    multihost_utils.process_allgather = refuse
    result = iterate(run, programs, state)
    multihost_utils.process_allgather = gather
    (notes / "threads").write_text(os.environ.get("NPROC", "all"))
    rows = result[2].rows
    for shard in rows.tokens.addressable_shards:
        name = f"{{int(result[0].iteration)}}.{{shard.index[0].start or 0}}.npy"
        np.save(notes / name, np.asarray(shard.data))
    assert not rows.tokens.is_fully_addressable or {processes} == 1
    return result


def refuse(*_, **__):
    raise AssertionError("a batch was gathered for training")


starpo.iterate = watched_iterate
cli.run(train.main)
"""


# The second iteration is judged a collapse, which process 0 is slow to write down.
FALLEN = """
import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, {launch!r})
sys.path.insert(0, {tests!r})

from ragen_jax import cli
import jax
import train

from ragen_jax import starpo
from ragen_jax.diagnostics import health, rollbacks

iterate, observe, note = starpo.iterate, health.observe, rollbacks.note_rollback


def watched_iterate(run, programs, state):
    with open(Path({notes!r}) / f"rates.{{jax.process_index()}}", "a") as file:
        file.write(f"{{run.settings.optimizer.actor_lr}}\\n")
    return iterate(run, programs, state)


def judge(state, iteration, values, policy):
    state, decision = observe(state, iteration, values, policy)
    if (iteration, state.rollbacks) == (2, 0):
        decision = dataclasses.replace(
            decision, action=health.ROLLBACK, sentence="a collapse", healthy_until=1
        )
    return state, decision


def note_slowly(*given):
    time.sleep(3)
    note(*given)


starpo.iterate, health.observe = watched_iterate, judge
rollbacks.note_rollback = note_slowly
cli.run(train.main)
"""


# The first iteration is judged a collapse. Process 0 is slow to draw the last picture.
STOPPING = """
import dataclasses
import sys
import time

sys.path.insert(0, {launch!r})

from ragen_jax.utils import endings

endings.install()  # As the script does where it is started itself.

from ragen_jax import cli
import jax
import train

from ragen_jax.diagnostics import health
from ragen_jax.reporting import plots

observe = health.observe


def judge(*given):
    state, decision = observe(*given)
    return state, dataclasses.replace(
        decision, action=health.STOP, sentence="a collapse"
    )


def draw(*_, **__):
    assert jax.process_index() == 0
    time.sleep(8)


health.observe, plots.draw = judge, draw
cli.run(train.main)
"""


# A run's handler alone. A signal comes before a question is asked, as while a resumed
# run compiles, and later a second handler stands in for the run after a rollback.
ASKING = """
import os
import signal
import sys
import time

import jax

index = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=index)
from ragen_jax.training.interrupts import InterruptHandler

early = sys.argv[3] == "early"
with InterruptHandler(print) as handler:
    if not early:
        print([handler.should_stop() for _ in range(3)])
with InterruptHandler(print) as handler:
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)
    with handler.nothing_to_save("last words"):
        print([handler.should_stop() for _ in range(3)])
"""


def start(
    workdir: Path, notes: Path, processes: int, script_text: str = WATCHED, **changes
) -> list:
    """The processes of one run, all watched."""
    notes.mkdir(exist_ok=True)
    script = notes / "watched.py"
    script.write_text(
        script_text.format(
            launch=str(runs.ROOT / "launch"),
            tests=str(runs.ROOT / "tests"),
            notes=str(notes),
            processes=processes,
        )
    )
    arguments = runs.arguments(workdir, **changes)
    if processes == 1:
        return [runs.start(arguments, script)]
    place = [f"--coordinator=127.0.0.1:{runs.free_port()}", f"--processes={processes}"]
    return [
        runs.start([*arguments, *place, f"--process={index}"], script)
        for index in range(processes)
    ]


def tokens(notes: Path, iteration: int) -> np.ndarray:
    """int32[R, T], the rows of one iteration from all processes' notes."""
    parts = [
        (int(path.name.split(".")[1]), np.load(path))
        for path in notes.glob(f"{iteration}.*.npy")
    ]
    return np.concatenate([part for _, part in sorted(parts, key=lambda x: x[0])])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Two processes until one gets SIGTERM."""
    folder = tmp_path_factory.mktemp("story")
    workdir = folder / "run"
    processes = start(workdir, folder / "first", 2, iterations=500)
    written = workdir / "metrics.jsonl"
    runs.wait_until(
        lambda: written.exists() and '"iteration": 2,' in written.read_text(),
        processes[0],
    )
    processes[1].send_signal(signal.SIGTERM)
    ended = [runs.finish(process) for process in processes]
    return folder, workdir, runs.steps(workdir)[-1], ended


@pytest.fixture(scope="module")
def story(stopped):
    """Then two again, for one iteration."""
    folder, workdir, last, ended = stopped
    processes = start(workdir, folder / "then", 2, iterations=last + 1)
    return folder, workdir, last, [ended, [runs.finish(p) for p in processes]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The first two iterations in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (process,) = start(folder / "run", folder / "notes", 1, iterations=2)
    assert runs.finish(process)[0] == 0
    return folder


def test_sigterm_to_any_process_saves_in_all_at_one_step(stopped):
    _, _, last, ended = stopped
    assert 2 <= last < 500
    assert f"saved after iteration {last}; the same command continues" in ended[0][1]


def test_all_processes_end_well_and_only_the_first_speaks(story):
    *_, story_ends = story
    for ended in story_ends:
        for index, (code, output, _) in enumerate(ended):
            assert code == 0, ended
            # The transport's own note on its connections comes from each process.
            assert (re.sub(r"\[Gloo\].*\n", "", output) == "") == (index > 0)
        assert "mesh         data 2 x fsdp 1 x tensor 1 (cpu)" in ended[0][1]


def test_each_of_several_processes_on_cpus_computes_with_one_thread(story, alone):
    """With more, Gloo's collectives meet in another order. See docs/clusters.md."""
    assert (story[0] / "first" / "threads").read_text() == "1"
    assert (alone / "notes" / "threads").read_text() == "all"


def test_a_checkpoint_of_two_processes_is_resumed_by_two(story):
    _, workdir, last, story_ends = story
    assert f"resuming after iteration {last}\n" in story_ends[1][0][1]
    assert runs.steps(workdir)[-1] == last + 1


def test_two_processes_that_were_stopped_end_in_the_bits_of_two_that_were_not(
    story, tmp_path
):
    _, workdir, last, _ = story
    processes = start(tmp_path / "run", tmp_path / "notes", 2, iterations=last + 1)
    assert [runs.finish(process)[0] for process in processes] == [0, 0]
    one, other = (runs.leaves(run, last + 1) for run in (workdir, tmp_path / "run"))
    runs.assert_same_leaves(one, other)
    assert repr(runs.records(workdir)) == repr(runs.records(tmp_path / "run"))


def test_each_iteration_is_written_once_by_the_first_process(story):
    _, workdir, last, _ = story
    records = [r for r in runs.records(workdir) if "train/success" in r]
    assert [r["iteration"] for r in records] == list(range(1, last + 2))
    assert len(list((workdir / "tensorboard").iterdir())) == 2  # One a start.


def test_two_processes_sample_the_same_tokens_as_one(story, alone):
    folder = story[0]
    for iteration in (1, 2):
        two, one = (
            tokens(folder / "first", iteration),
            tokens(alone / "notes", iteration),
        )
        assert two.shape == one.shape and len(one) == 8
        np.testing.assert_array_equal(two, one)
    names = sorted(path.name for path in (folder / "first").glob("1.*.npy"))
    assert names == ["1.0.npy", "1.4.npy"]  # Four rows each, and no more.


def test_two_processes_learn_the_same_as_one(story, alone):
    two, one = runs.records(story[1]), runs.records(alone / "run")
    for iteration in (0, 1):
        a, b = two[iteration], one[iteration]
        # Read on the host, from whole rows, which no process of several holds.
        b.pop("health/thought_answer_agreement", None)
        assert a.keys() == b.keys()
        assert any(name.startswith("validation/") for name in b) == (iteration == 1)
        per_device = "rollout/utilization"  # Each device counts its own passes.
        a, b = ({k: v for k, v in r.items() if k != per_device} for r in (a, b))
        for name in b:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), name
    one = runs.leaves(alone / "run", 1)
    for name, leaf in runs.leaves(story[1], 1).items():
        np.testing.assert_allclose(leaf, one[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_after_a_rollback_all_processes_continue_at_the_same_rate(tmp_path):
    changes = dict(iterations=2, every__evaluate=0, health__on_collapse="rollback")
    processes = start(tmp_path / "run", tmp_path / "notes", 2, FALLEN, **changes)
    for code, _, errors in [runs.finish(process) for process in processes]:
        assert code == 0, errors
    first, second = (
        (tmp_path / "notes" / f"rates.{index}").read_text().split() for index in (0, 1)
    )
    assert first == ["0.001", "0.001", "0.0005"]
    assert first == second


def test_a_run_that_stops_itself_says_why_in_all_processes(tmp_path):
    """The others would take the first for lost, and SLURM would start all again."""
    changes = dict(iterations=3, every__evaluate=0)
    processes = start(tmp_path / "run", tmp_path / "notes", 2, STOPPING, **changes)
    for code, _, errors in [runs.finish(process) for process in processes]:
        assert code == 2, errors
        assert errors.splitlines()[-1] == "error: a collapse"
    assert runs.steps(tmp_path / "run") == [1]


@pytest.mark.parametrize("moment", ["early", "later"])
def test_a_signal_before_the_next_question_stops_all_processes_at_it(tmp_path, moment):
    script = tmp_path / "asking.py"
    script.write_text(ASKING)
    place = f"127.0.0.1:{runs.free_port()}"
    both = [runs.start([place, str(index), moment], script) for index in (0, 1)]
    before = "" if moment == "early" else "[False, False, False]\n"
    for code, output, errors in [runs.finish(process) for process in both]:
        assert code == 0, errors
        output = re.sub(r"\[Gloo\].*\n", "", output)
        # The question at which all stop is answered with yes once.
        assert output == f"{before}[True, False, False]\n"


def test_nothing_alarming_is_said(story):
    for ended in story[-1]:
        for _, _, errors in ended:
            assert not re.search(r"Traceback|error|fatal|warn", errors, re.I), errors
