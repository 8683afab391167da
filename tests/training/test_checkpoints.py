"""Checkpoints: bit for bit, onto any mesh, and whole whenever the process dies."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ragen_jax.errors import UserError
from ragen_jax.training import checkpoint_scores, checkpoints
from ragen_jax.training import interrupts as interrupts_lib
from ragen_jax.training.interrupts import InterruptHandler, StoppedAtOnce

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / checkpoints.FOLDER


def test_a_save_waits_as_long_for_other_processes_as_all_else_does(
    directory, monkeypatch
):
    """Orbax would give up after 20 minutes."""
    given = []
    note = lambda _, async_options: given.append(async_options.timeout_secs)
    monkeypatch.setattr(checkpoints.ocp, "AsyncCheckpointer", note)
    checkpoints.Checkpoints(directory, keep_last=1, keep_best=0)
    assert given == [3600]


def test_a_state_comes_back_bit_for_bit(directory):
    state = _state()
    with _open(directory) as saved:
        assert saved.save(7, state, {}, score=None, wait=True)
        restored = saved.restore(7, _abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for before, after in zip(
        jax.tree.leaves(state), jax.tree.leaves(restored), strict=True
    ):
        assert isinstance(after, jax.Array) and after.dtype == before.dtype
        assert np.asarray(after).tobytes() == np.asarray(before).tobytes()


def test_a_state_moves_to_another_mesh(directory):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"kernel": jax.device_put(values, _sharding((2, 4), "data", "fsdp"))}
    with _open(directory) as saved:
        saved.save(1, state, {}, score=None)
        for target in (
            _sharding((4, 2), "fsdp", None),
            _sharding((1, 8), None, "fsdp"),
            _sharding((8, 1)),
        ):
            restored = saved.restore(1, _abstract(state, target))["kernel"]
            assert restored.sharding == target
            for shard in restored.addressable_shards:
                np.testing.assert_array_equal(shard.data, values[shard.index])


def test_donating_the_state_after_save_does_not_change_what_is_written(directory):
    overwrite = jax.jit(lambda x: x * 0 + 7, donate_argnums=0)
    array = jnp.arange(1_000_000, dtype=jnp.float32)
    with _open(directory) as saved:
        saved.save(1, {"array": array}, {}, score=None)
        for _ in range(3):
            array = overwrite(array)
        array.block_until_ready()
        restored = saved.restore(1, _abstract({"array": array}))["array"]
    np.testing.assert_array_equal(restored, np.arange(1_000_000, dtype=np.float32))


def test_the_actor_can_be_read_without_the_rest(directory):
    with _open(directory) as saved:
        saved.save(1, {"actor": jnp.ones(3), "critic": jnp.zeros(2)}, {}, score=None)
    wanted = _abstract({"actor": jnp.ones(3)})
    part = checkpoints.restore(directory, 1, wanted, partial=True)
    np.testing.assert_array_equal(part["actor"], np.ones(3))
    with pytest.raises(UserError, match="critic is there and not here"):
        checkpoints.restore(directory, 1, wanted)


def test_info_is_read_without_any_array(directory):
    info = {"settings": {"seed": 3, "env": {"name": "bandit"}}, "metrics": {"a": 0.1}}
    with _open(directory) as saved:
        saved.save(4, _small(), info, score=0.5)
    for path in (directory / "4" / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    assert checkpoints.read_info(directory, 4) == info


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "expected"),
    [
        ({1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2}, 2, 1, {1, 3, 4}),
        ({1: 0.9, 2: 0.9, 3: 0.5}, 1, 1, {2, 3}),  # ties go to the later
        ({1: None, 2: 0.1, 3: None, 4: None}, 1, 2, {2, 4}),  # no score: never best
        ({1: 0.9, 2: 0.1}, 1, 0, {2}),
        ({10: None, 9: None, 8: None}, 2, 1, {9, 10}),
        ({1: 0.5, 2: 0.9}, 1, 1, {2}),  # the best may be the last
        ({}, 1, 1, set()),
    ],
)
def test_the_last_and_the_best_are_kept(scores, keep_last, keep_best, expected):
    assert checkpoints.kept(scores, keep_last, keep_best) == expected


@pytest.mark.parametrize("between", [(), (45,), (41, 45, 46, 47)])
def test_steps_between_those_that_are_due_take_no_ones_place(between):
    scores = {10: 0.9, 20: None, 30: None, 40: 0.5} | dict.fromkeys(between)
    found = checkpoints.kept(scores, 2, 1, every=10)
    assert found == {10, 30, 40, *between[-1:]}
    # Nor do they once the next one is due.
    scores = dict.fromkeys(found) | {50: 0.6, 10: 0.9}
    assert checkpoints.kept(scores, 2, 1, every=10) == {10, 40, 50}


def test_the_best_is_the_later_of_equals_and_nothing_without_scores():
    assert checkpoints.best({1: 0.5, 2: 0.7, 3: 0.7, 4: 0.1, 5: None}) == 3
    assert checkpoints.best({0: 0.0}) == 0
    assert checkpoints.best({1: None}) is None


def test_old_steps_leave_the_disk_also_after_a_restart(directory):
    with _open(directory, keep_last=1, keep_best=1) as saved:
        for step, score in [(1, 0.9), (2, 0.1), (3, float("nan"))]:
            saved.save(step, _small(), {}, score=score)
        assert (saved.latest_step(), saved.best_step()) == (3, 1)
    assert _names(directory) == ["1", "3"]
    with _open(directory, keep_last=1, keep_best=1) as saved:
        assert (saved.latest_step(), saved.best_step()) == (3, 1)
        saved.save(4, _small(), {}, score=0.95)
        assert saved.best_step() == 4
    assert _names(directory) == ["4"]


def test_an_old_step_that_the_user_has_deleted_ends_no_run(directory):
    with _open(directory, keep_last=1) as saved:
        saved.save(1, _small(), {}, score=None, wait=True)
        shutil.rmtree(directory / "1")
        saved.save(2, _small(), {}, score=None, wait=True)
        assert saved.steps() == [2]


@pytest.mark.parametrize(
    ("scores", "until", "keep_best", "step"),
    [
        ({50: None, 57: None}, None, 0, 57),  # A run goes on from the last.
        # A signal saved 57, in another run of the same settings nothing did.
        ({50: None, 57: None, 80: None}, 70, 0, 50),
        ({50: 0.4, 57: 0.3}, 70, 1, 50),
        ({50: 0.4, 57: 0.4}, 70, 1, 57),  # It is the best: saved in any case.
        ({50: 0.4, 57: 0.9}, 70, 0, 50),  # No best is kept.
        ({57: None, 60: None}, 70, 0, 60),  # Better than none at all.
        ({50: None}, 40, 0, None),
    ],
)
def test_a_run_that_a_signal_has_saved_goes_as_far_back_as_another(
    scores, until, keep_best, step
):
    assert checkpoint_scores.latest(scores, until, keep_best, every=25) == step


def test_no_step_that_the_user_has_deleted_is_gone_back_to_or_the_best(directory):
    with _open(directory, keep_last=9) as saved:
        for step, score in ((1, 0.1), (2, 0.9), (3, None)):
            saved.save(step, _small(), {}, score=score, wait=True)
        shutil.rmtree(directory / "2")
        assert saved.latest_step(until=2) == saved.best_step() == 1
        saved.delete_after(1)
    assert _names(directory) == ["1"]


def test_a_step_that_is_saved_already_is_left_as_it_is(directory):
    with _open(directory) as saved:
        assert saved.save(1, {"x": jnp.zeros(2)}, {"first": True}, score=None)
        assert not saved.save(1, {"x": jnp.ones(2)}, {}, score=None)
        assert saved.read_info(1) == {"first": True}
        np.testing.assert_array_equal(
            saved.restore(1, _abstract({"x": jnp.zeros(2)}))["x"], [0, 0]
        )


def test_what_a_kill_left_half_done_is_ignored_and_cleared(directory):
    with _open(directory) as saved:
        saved.save(5, _small(), {}, score=None)
    for name in ("9.orbax-checkpoint-tmp", "2.deleting"):
        (directory / name / "info").mkdir(parents=True)
        (directory / name / "info" / "info.json").write_text("{}")
    assert checkpoints.find(directory.parent).step == 5
    assert len(_names(directory)) == 3  # a reader clears nothing
    with _open(directory) as saved:
        assert saved.latest_step() == 5
    assert _names(directory) == ["5"]


_KILLED = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from ragen_jax.training.checkpoints import Checkpoints
saved = Checkpoints(sys.argv[1], keep_last=2, keep_best=0)
big = jax.random.normal(jax.random.key(0), (2_000_000,))
for step in range(1, 1000):
    saved.save(step, {"step": jnp.int32(step), "big": big}, {"step": step}, score=None)
"""


@pytest.mark.slow
def test_a_run_killed_while_it_saves_leaves_a_checkpoint_to_resume_from(directory):
    child = subprocess.Popen([sys.executable, "-c", _KILLED, str(directory)])
    try:
        # Killed when a write is under way and at least one has ended.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and child.poll() is None:
            names = _names(directory) if directory.exists() else []
            if any(name.isdigit() for name in names) and any("tmp" in n for n in names):
                break
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    with _open(directory) as saved:
        step = saved.latest_step()
        assert _names(directory) == sorted(map(str, checkpoints.scores(directory)))
        wanted = {"step": jnp.int32(0), "big": jnp.zeros(2_000_000)}
        restored = saved.restore(step, _abstract(wanted))
        big = jax.random.normal(jax.random.key(0), (2_000_000,))
        assert int(restored["step"]) == saved.read_info(step)["step"] == step >= 1
        np.testing.assert_array_equal(restored["big"], big)
        assert saved.save(step + 1, wanted, {}, score=None)


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(directory):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"x": jax.random.normal(jax.random.key(0), (300_000,))}
    with _open(directory) as saved:
        saved.save(1, _small(), {}, score=None, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            with pytest.raises(UserError, match="Checkpoint 2 .*File too large"):
                saved.save(2, noise, {}, score=None, wait=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert saved.latest_step() == 1
        assert saved.save(2, noise, {}, score=None)
    assert checkpoints.find(directory).step == 2


def test_find_takes_the_best_step_of_a_workdir_else_the_last(directory):
    with _open(directory, keep_last=5) as saved:
        saved.save(10, _small(), {}, score=None)
        saved.save(20, _small(), {}, score=None, wait=True)
        assert checkpoints.find(directory.parent) == (directory, 20, "last")
        saved.save(30, _small(), {}, score=0.5)
        saved.save(40, _small(), {}, score=0.4)
    for path in (directory.parent, directory, f"{directory}/"):
        assert checkpoints.find(path) == (directory, 30, "best")
    assert checkpoints.find(directory / "10") == (directory, 10, "given")
    # A link to another disk is that of its run.
    run = directory.parent / "run"
    run.mkdir()
    (run / checkpoints.FOLDER).symlink_to(directory)
    found = checkpoints.find(run / checkpoints.FOLDER / "10")
    assert (found.workdir, found.step) == (run, 10)


def test_a_path_without_a_checkpoint_is_explained(directory, tmp_path):
    with pytest.raises(UserError, match="^there is no folder .*nowhere; give .*/100$"):
        checkpoints.find(tmp_path / "nowhere")
    directory.mkdir()
    with pytest.raises(UserError, match="holds no complete ragen_jax checkpoint"):
        checkpoints.find(tmp_path)
    with _open(directory) as saved:
        saved.save(3, _small(), {}, score=None)
    with pytest.raises(UserError, match="no checkpoint .*the steps in .* are 3"):
        checkpoints.restore(directory, 4, _abstract(_small()))


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"format": "other"}'])
def test_a_foreign_checkpoint_is_refused(text, directory):
    (directory / "5" / "info").mkdir(parents=True)
    (directory / "5" / "info" / "info.json").write_text(text)
    with pytest.raises(UserError, match="not a ragen_jax checkpoint"):
        checkpoints.find(directory)
    with pytest.raises(UserError, match="not a ragen_jax checkpoint"):
        checkpoints.restore(directory, 5, _abstract(_small()))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            {"a": {"b": jnp.zeros((3, 2))}},
            r"a\.b is float32\[2, 3\] there and float32\[3",
        ),
        (
            {"a": {"b": jnp.zeros((2, 3), jnp.bfloat16)}},
            r"there and bfloat16\[2, 3\] here",
        ),
        ({"a": {"c": jnp.zeros((2, 3))}}, r"a\.c is missing there"),
        ({}, r"a\.b is there and not here"),
    ],
)
def test_another_structure_is_named_by_its_first_difference(wanted, words, directory):
    with _open(directory) as saved:
        saved.save(1, {"a": {"b": jnp.zeros((2, 3))}}, {}, score=None)
        with pytest.raises(UserError, match=words):
            saved.restore(1, _abstract(wanted))


def test_a_damaged_checkpoint_is_named(directory):
    with _open(directory) as saved:
        saved.save(1, _small(), {}, score=None)
    (directory / "1" / "state" / "x" / "0").write_bytes(b"damaged")
    with pytest.raises(UserError, match="1 is damaged: x .*use another step"):
        checkpoints.restore(directory, 1, _abstract(_small()))


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"x": 1.0}, TypeError),
        ({"x": np.float32(1)}, TypeError),
        ({"x": jax.random.key(0)}, TypeError),
        ({"x": jnp.zeros((0, 4))}, ValueError),
        ({"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}, ValueError),
    ],
)
def test_leaves_that_would_not_come_back_are_refused_before_writing(
    state, error, directory
):
    with _open(directory) as saved, pytest.raises(error):
        saved.save(1, state, {}, score=None)
    assert _names(directory) == []


def test_info_that_json_cannot_hold_is_refused_before_writing(directory):
    with _open(directory) as saved, pytest.raises(TypeError, match="JSON"):
        saved.save(1, _small(), {"settings": object()}, score=None)
    assert _names(directory) == []


@pytest.fixture
def not_behind_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_asks_to_stop_and_a_second_ctrl_c_insists(
    number, not_behind_nohup, monkeypatch
):
    monkeypatch.setattr(interrupts_lib, "ONE_REQUEST", 0.0)
    handlers = [signal.getsignal(n) for n in ENDING]
    printed = []
    with InterruptHandler(printed.append) as interrupts:
        assert not interrupts.should_stop()
        os.kill(os.getpid(), number)
        assert interrupts.should_stop() and interrupts.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)  # a second SIGTERM changes nothing
        if number != signal.SIGINT:
            os.kill(os.getpid(), signal.SIGINT)  # The first: it changes nothing, too.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert printed == ["stopping after this iteration, with a saved state ..."]
    assert handlers == [signal.getsignal(n) for n in ENDING]


@pytest.mark.parametrize("number", ENDING)
def test_signals_that_come_together_are_one_request(number, not_behind_nohup):
    with InterruptHandler(lambda line: None) as interrupts:
        for following in (number, signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), following)
            time.sleep(0.02)
        assert interrupts.should_stop()


def test_a_ctrl_c_that_also_ends_the_reader_of_the_output_insists_on_nothing():
    with InterruptHandler(lambda line: None) as interrupts:
        interrupts.ask()  # `tee` ended first.
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.should_stop()


def test_one_process_asks_itself_to_stop_without_a_signal(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    with InterruptHandler(print) as interrupts:
        interrupts.ask()
        assert interrupts.should_stop()
    with InterruptHandler(print) as interrupts, pytest.raises(StoppedAtOnce):
        with interrupts.nothing_to_save("words"):
            interrupts.ask()
    assert sent == []


def test_a_signal_that_cannot_be_confirmed_is_heeded_all_the_same():
    def report(line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with InterruptHandler(report) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.should_stop()


def test_a_lost_terminal_stops_no_run_that_nohup_has_started():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptHandler(print) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.should_stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _open(directory, keep_last=3, keep_best=1):
    return checkpoints.Checkpoints(directory, keep_last=keep_last, keep_best=keep_best)


def _small():
    return {"x": jnp.arange(3, dtype=jnp.float32)}


def _state():
    """Nested dicts, optax's named and empty states, and every kind of leaf."""
    actor = {
        "embed": jax.random.normal(jax.random.key(1), (5, 3)),
        "layers": {"a/b": jnp.full((2, 2), 1.1, jnp.bfloat16), "none": {}},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "actor": actor,
        "actor_optimizer": optimizer.init(actor),
        "count": jnp.int32(-3),
        "key": jax.random.key_data(jax.random.key(5)),
        "list": [jnp.int8([1, -1]), None, jnp.array([True, False])],
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
    }


def _abstract(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )


def _sharding(shape, *spec):
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _names(directory):
    return sorted(path.name for path in directory.iterdir())
