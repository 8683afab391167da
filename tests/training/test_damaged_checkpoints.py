"""Damaged checkpoints: every one is noticed, named, and replaced by an older one."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.cli import verification
from ragen_jax.errors import UserError
from ragen_jax.training import checkpoint_checks, checkpoint_files, checkpoints
from ragen_jax.training.checkpoints import Checkpoints, DamagedError

ABSTRACT = {
    "actor": {"kernel": jax.ShapeDtypeStruct((40, 30), jnp.float32)},
    "step": jax.ShapeDtypeStruct((), jnp.int32),
}

LOST_DISK = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps, of which the second is the better one."""
    directory = tmp_path_factory.mktemp("whole") / checkpoints.FOLDER
    kernel = jax.random.normal(jax.random.key(0), (40, 30))
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        for step in (2, 4):
            state = {"actor": {"kernel": kernel * step}, "step": jnp.int32(step)}
            saved.save(step, state, {"validation": step / 10}, score=step / 10)
    return directory


@pytest.fixture
def directory(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / checkpoints.FOLDER)


def write_record(folder: Path, change) -> None:
    """Another record in a checkpoint that was saved without digests."""
    path = folder / "info" / "info.json"
    record = json.loads(path.read_text()) | {
        "format": "ragen_jax checkpoint, version 1"
    }
    path.write_text(json.dumps(change(record)))


def add_digest(folder: Path, name: str) -> None:
    """One more file in the list of those that were written."""
    path = folder / "digests.json"
    digests = json.loads(path.read_text())
    digests["crc32"][name] = [1, 1]
    path.write_text(json.dumps(digests))


def without(key: str):
    return lambda record: {k: v for k, v in record.items() if k != key}


def replace(path: Path, make) -> None:
    path.unlink()
    make(path)


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels else []


def first(folder: Path, pattern: str) -> Path:
    return next(path for path in sorted(folder.glob(pattern)) if path.is_file())


# Of a step's folder; then what names the damage.
DAMAGE = {
    "no metadata": (lambda f: (f / "state/_METADATA").unlink(), "state/_METADATA"),
    "empty metadata": (lambda f: (f / "state/_METADATA").write_text(""), "0 bytes"),
    "no array": (
        lambda f: shutil.rmtree(f / "state/actor.kernel"),
        "actor.kernel (state/actor.kernel/.zarray) is missing",
    ),
    "empty array": (
        lambda f: (f / "state/actor.kernel/0.0").write_bytes(b""),
        "actor.kernel (state/actor.kernel/0.0) has 0 bytes of the",
    ),
    "half an array": (
        lambda f: (f / "state/actor.kernel/0.0").write_bytes(
            (f / "state/actor.kernel/0.0").read_bytes()[:99]
        ),
        "has 99 bytes of the",
    ),
    "foreign array": (
        lambda f: shutil.copy(
            f / "../2/state/actor.kernel/0.0", f / "state/actor.kernel"
        ),
        "actor.kernel (state/actor.kernel/0.0) has",
    ),
    "no state": (lambda f: shutil.rmtree(f / "state"), "is missing"),
    "no info": (lambda f: (f / "info/info.json").unlink(), "is not a ragen_jax check"),
    "deep info": (
        lambda f: (f / "info/info.json").write_text("[" * 100_000),
        "is not a ragen_jax checkpoint",
    ),
    "info of another": (
        lambda f: shutil.copy(f / "../2/info/info.json", f / "info"),
        "was saved as step 2",
    ),
    "no digests": (lambda f: (f / "digests.json").unlink(), "digests.json is missing"),
    "digests a list": (lambda f: (f / "digests.json").write_text("[]"), "digests.json"),
    "digests of texts": (
        lambda f: (f / "digests.json").write_text('{"crc32": {"a": 3}}'),
        "digests.json",
    ),
    "digests of an impossible name": (
        lambda f: add_digest(f, "state/a\0b"),
        "is missing",
    ),
    "digests of a long name": (lambda f: add_digest(f, "x" * 999), "is missing"),
    "digests of no file": (
        lambda f: (f / "digests.json").write_text('{"crc32": {}}'),
        "digests.json lacks info/info.json",
    ),
    "a list": (lambda f: write_record(f, lambda record: [record]), "not a ragen_jax"),
    "info a list": (
        lambda f: write_record(f, lambda record: {**record, "info": [1]}),
        "info.json has no usable score or info",
    ),
    "score a text": (
        lambda f: write_record(f, lambda record: {**record, "score": "high"}),
        "info.json has no usable score or info",
    ),
    "a score of 400 digits": (
        lambda f: write_record(f, lambda record: {**record, "score": 10**400}),
        "info.json has no usable score or info",
    ),
    "no step": (lambda f: write_record(f, without("step")), "saved as step None"),
    "a pipe of a record": (
        lambda f: replace(f / "info/info.json", os.mkfifo),
        "is not a ragen_jax",
    ),
    "a pipe of digests": (
        lambda f: replace(f / "digests.json", os.mkfifo),
        "digests.json is missing or is not",
    ),
    "a device of digests": (
        lambda f: replace(f / "digests.json", lambda p: p.symlink_to("/dev/zero")),
        "digests.json is missing or is not",
    ),
    "deeper than is walked": (
        lambda f: write_record(f, lambda record: record | {"x": nested(800)}),
        "is not a ragen_jax checkpoint",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_step_is_named_and_the_one_before_it_is_resumed(directory, name):
    damage, words = DAMAGE[name]
    damage(directory / "4")
    with pytest.raises(DamagedError) as caught:
        found = checkpoints.find(directory)
        checkpoints.restore(directory, found.step, ABSTRACT)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert f"{directory / '4'}" in str(caught.value)
    told: list[str] = []
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        step, state = saved.restore_newest(ABSTRACT, told.append)
        assert (step, int(state["step"])) == (2, 2)
        assert saved.save(4, state, {}, score=None)  # Its name is free again.
    assert len(told) == 1 and words in told[0]
    assert told[0].endswith("set aside as 4.damaged")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("health", value) for value in ([], None, "x", {"rollbacks": "1"})),
        *((name, v) for name in ("settings", "code", "model") for v in ([], None, "x")),
        ("settings", {"evaluation": []}),
        ("logprob_gaps", None),
        ("logprob_gaps", [None]),
        ("validation", "0.5"),
        ("dtype", 32),
    ],
)
def test_a_part_of_the_record_of_another_type_is_damage_and_is_named(
    part, value, directory
):
    """Whoever wrote the digests: they are not signed."""
    change = lambda record: {**record, "info": {**record["info"], part: value}}
    write_record(directory / "4", change)
    with pytest.raises(DamagedError, match=f"info.json has no usable {part}; delete"):
        checkpoints.read_info(directory, 4)


@pytest.mark.parametrize("name", ["info/info.json", "digests.json"])
def test_what_cannot_be_read_ends_the_run_and_is_not_set_aside(
    directory, monkeypatch, name
):
    """A host that has lost its disk says nothing of what lies on it."""
    read = Path.read_bytes

    def fail(path):
        if path == directory / "4" / name:
            raise LOST_DISK
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    for look in (checkpoints.find, lambda d: checkpoints.restore(d, 4, ABSTRACT)):
        with pytest.raises(UserError, match="cannot be read .*output error") as caught:
            look(directory)
        assert not isinstance(caught.value, DamagedError)
    with pytest.raises(UserError, match=f"4/{name} cannot be read"):
        Checkpoints(directory, keep_last=9, keep_best=0)
    assert (directory / "4").is_dir()


@pytest.mark.parametrize("call", ["open", "stat"])
def test_an_array_that_cannot_be_read_is_not_called_damaged(
    directory, monkeypatch, call
):
    really = getattr(Path, call)

    def fail(path, *given, **options):
        if path.name == "0.0":
            raise LOST_DISK
        return really(path, *given, **options)

    monkeypatch.setattr(Path, call, fail)
    with pytest.raises(UserError, match=r"actor.kernel/0.0 cannot be read") as caught:
        checkpoints.restore(directory, 4, ABSTRACT)
    assert not isinstance(caught.value, DamagedError)


# What a process tells the others; or a file's number.
WHOLE, DAMAGED, UNREADABLE = 2**31 - 1, -1, -2


@pytest.mark.parametrize(
    ("breaks", "others", "is_damage", "words"),
    [
        ("nothing", UNREADABLE, False, "process 1 cannot read checkpoint"),
        ("nothing", DAMAGED, True, "is damaged, as process 1 sees it; delete"),
        ("nothing", 0, True, "damaged: info/info.json is not as it was written"),
        ("digests", UNREADABLE, False, "process 1 cannot read checkpoint"),
        ("digests", WHOLE, True, "digests.json is missing"),
        ("an array", WHOLE, True, "actor.kernel/0.0) is missing"),
        ("an array", 0, True, "damaged: info/info.json is not as it was written"),
    ],
)
def test_all_processes_come_to_one_verdict_on_a_checkpoint(
    directory, monkeypatch, breaks, others, is_damage, words
):
    """Here of two processes the first, whatever it finds itself."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = lambda number: np.array([number, others])
    monkeypatch.setattr(checkpoint_checks.multihost_utils, "process_allgather", told)
    # The first reads files of even numbers.
    names = sorted(checkpoint_files.read_digests(directory / "4"))
    assert names.index("state/actor.kernel/0.0") % 2 == 0
    lost = {"digests": "digests.json", "an array": "state/actor.kernel/0.0"}
    if breaks in lost:
        (directory / "4" / lost[breaks]).unlink()
    with pytest.raises(UserError) as caught:
        checkpoint_checks.verify(directory / "4", None)
    assert words in str(caught.value)
    assert isinstance(caught.value, DamagedError) == is_damage


def test_a_checkpoint_that_all_processes_find_whole_is_read(directory, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = lambda number: np.array([number, number])
    monkeypatch.setattr(checkpoint_checks.multihost_utils, "process_allgather", told)
    assert checkpoint_checks.verify(directory / "4", None)


def test_a_step_saved_again_after_damage_stays_when_a_rollback_asks_for_it(directory):
    (directory / "4" / "digests.json").unlink()
    told: list[str] = []
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        _, state = saved.restore_newest(ABSTRACT, told.append)
        state = state | {"step": jnp.int32(4)}
        assert saved.save(4, state, {}, score=None)
        step, state = saved.restore_newest(ABSTRACT, told.append)
        assert (step, int(state["step"])) == (4, 4)
        saved.delete_after(0)  # To the beginning, which damage does not forbid.
        assert saved.restore_newest(ABSTRACT, told.append) is None
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        assert saved.restore_newest(ABSTRACT, told.append) is None
    assert len(told) == 1


def test_a_rollback_leaves_what_was_set_aside_before_its_target(directory):
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        _, state = saved.restore_newest(ABSTRACT, print)
        for step in (6, 8):
            saved.save(step, state, {}, score=None)
    for step in ("2", "6"):
        (directory / step / "digests.json").unlink()
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        saved.restore_newest(ABSTRACT, lambda line: None)
        saved.delete_after(4)
    assert sorted(p.name for p in directory.iterdir()) == ["2.damaged", "4"]


def test_a_rollback_to_the_beginning_that_was_killed_deletes_what_is_damaged_too(
    directory,
):
    (directory / "4" / "digests.json").unlink()
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        saved.delete_after(0)  # Before anything was read, as a resumed run ends one.
        assert saved.restore_newest(ABSTRACT, print) is None
    assert list(directory.iterdir()) == []


def test_every_flipped_bit_within_the_arrays_is_noticed(directory):
    draw = random.Random(0)
    paths = [p for p in (directory / "4" / "state").rglob("*") if p.is_file()]
    paths = [p for p in paths if p.name != "commit_success.txt"]
    for _ in range(60):
        path = draw.choice(paths)
        content = path.read_bytes()
        place = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match="has another content than was written"):
            checkpoints.restore(directory, 4, ABSTRACT)
        path.write_bytes(content)
    assert int(checkpoints.restore(directory, 4, ABSTRACT)["step"]) == 4


def test_who_reads_some_leaves_does_not_ask_for_the_others(directory):
    (directory / "4" / "state" / "step" / "0").write_bytes(b"x")
    wanted = {"actor": ABSTRACT["actor"]}
    part = checkpoints.restore(directory, 4, wanted, partial=True)
    assert part["actor"]["kernel"].shape == (40, 30)
    with pytest.raises(DamagedError, match=r"damaged: step \(state/step/0\)"):
        checkpoints.restore(directory, 4, ABSTRACT)


def test_folders_with_other_names_are_no_steps(directory):
    for name in ("007", "٧", "²", "4 ", "-1", "99999999999", "4.5"):
        shutil.copytree(directory / "2", directory / name)
    told: list[str] = []
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        assert saved.restore_newest(ABSTRACT, told.append)[0] == 4
    assert len(told) == 7 and all("is not a step's folder" in line for line in told)
    assert checkpoints.find(directory) == (directory, 4, "best")


@pytest.mark.parametrize("make", [Path.touch, lambda p: p.symlink_to("nowhere")])
def test_a_file_or_a_dangling_link_with_a_steps_name_is_no_step(make, directory):
    make(directory / "9")
    assert checkpoints.find(directory) == (directory, 4, "best")
    with pytest.raises(UserError, match=r"There is no checkpoint .*/9; the steps in"):
        checkpoints.restore(directory, 9, ABSTRACT)
    said = "/9 is no folder but has the name of a step, .*: move it away, then"
    with pytest.raises(UserError, match=said):  # Not only when 9 is to be saved.
        Checkpoints(directory, keep_last=9, keep_best=0)


@pytest.mark.parametrize("make", [Path.touch, lambda p: p.symlink_to("nowhere")])
def test_what_takes_the_name_of_a_folder_that_is_deleted_or_set_aside_gives_way(
    make, directory
):
    for name in ("4.damaged", "2.deleting", "7.orbax-checkpoint-tmp"):
        make(directory / name)
    (directory / "4" / "state" / "_METADATA").unlink()
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        assert saved.restore_newest(ABSTRACT, lambda line: None)[0] == 2
        make(directory / "2.deleting")
        saved.delete_after(1)
    assert list(directory.iterdir()) == []


def test_a_step_that_a_run_deletes_while_it_is_looked_for_is_passed_over(
    directory, monkeypatch
):
    def read_record(folder):
        shutil.rmtree(directory / "2", ignore_errors=True)
        return read(folder)

    read = checkpoint_files.read_record
    monkeypatch.setattr(checkpoint_files, "read_record", read_record)
    assert checkpoint_files.survey(directory) == ({4: 0.4}, {}, [])


def test_a_renamed_folder_is_told(directory):
    (directory / "4").rename(directory / "9")
    with pytest.raises(UserError, match="checkpoints/9 was saved as step 4: give"):
        checkpoints.find(directory)
    with pytest.raises(UserError, match="whole are .*checkpoints/2$"):
        checkpoints.find(directory)
    told: list[str] = []
    with Checkpoints(directory, keep_last=9, keep_best=0) as saved:
        assert saved.restore_newest(ABSTRACT, told.append)[0] == 2
    assert told[0].endswith("checkpoints/9 was saved as step 4; set aside as 9.damaged")
    (directory / "9.damaged").rename(directory / "4")
    assert checkpoints.find(directory) == (directory, 4, "best")


def test_without_any_whole_step_nothing_is_begun_anew(directory):
    for step in ("2", "4"):
        (directory / step / "state" / "step" / "0").write_bytes(b"x")
    for _ in range(2):  # The same command again finds them set aside.
        with (
            Checkpoints(directory, keep_last=9, keep_best=0) as saved,
            pytest.raises(UserError, match="no whole checkpoint: restore one from a"),
        ):
            saved.restore_newest(ABSTRACT, lambda line: None)
    assert sorted(p.name for p in directory.iterdir()) == ["2.damaged", "4.damaged"]


def test_a_step_of_before_there_were_digests_is_still_read(directory):
    write_record(directory / "4", lambda record: record)
    (directory / "4" / "digests.json").unlink()
    restored = checkpoints.restore(directory, 4, ABSTRACT)
    expected = jax.random.normal(jax.random.key(0), (40, 30)) * 4
    np.testing.assert_array_equal(restored["actor"]["kernel"], expected)
    assert not checkpoint_files.has_digests(directory / "4")


def test_verify_tells_each_step_and_refuses_a_damaged_one(directory, capsys):
    verification.verify(str(directory.parent))
    out = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in out] == ["2  whole", "4  whole"]
    (directory / "2" / "state" / "step" / "0").write_bytes(b"x")
    with pytest.raises(
        UserError,
        match="^1 of 2 checkpoints in .* are damaged or cannot be read: 2; re",
    ):
        verification.verify(str(directory.parent))
    out = capsys.readouterr().out.splitlines()
    assert "2  damaged: " in out[0] and "step (state/step/0) has 1 bytes" in out[0]
    verification.verify(str(directory / "4"))


def test_a_step_that_cannot_be_read_is_not_called_damaged(
    directory, monkeypatch, capsys
):
    def cannot(folder):
        raise checkpoint_files.UnreadableError("it cannot be read")

    monkeypatch.setattr(checkpoint_files, "damaged_file", cannot)
    with pytest.raises(UserError, match="let this host read the others$"):
        verification.verify(str(directory / "4"))
    assert capsys.readouterr().out == "4  not known: it cannot be read\n"


@pytest.mark.parametrize("name", ["0", "17"])
def test_a_workdir_that_is_called_as_a_step_is_verified_as_a_workdir(
    whole, tmp_path, name, capsys
):
    workdir = tmp_path / name
    shutil.copytree(whole, workdir / checkpoints.FOLDER)
    verification.verify(str(workdir))
    out = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in out] == ["2  whole", "4  whole"]
    shutil.rmtree(workdir / checkpoints.FOLDER)
    with pytest.raises(UserError, match="holds no step's folder"):
        verification.verify(str(workdir))


def test_a_step_without_its_record_is_still_verified_as_a_step(directory):
    shutil.rmtree(directory / "2" / "info")
    with pytest.raises(
        UserError,
        match="^1 of 1 checkpoints in .* are damaged or cannot be read: 2; re",
    ):
        verification.verify(str(directory / "2"))


def test_a_step_that_a_run_deletes_meanwhile_is_not_called_damaged(
    directory, monkeypatch, capsys
):
    read = checkpoint_files.damaged_file

    def delete_first(folder):
        if folder.name == "2":
            checkpoint_files.delete(folder)
        return read(folder)

    monkeypatch.setattr(checkpoint_files, "damaged_file", delete_first)
    verification.verify(str(directory.parent))
    assert capsys.readouterr().out.startswith("4  whole")
