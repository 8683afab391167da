"""Files and folders appear whole or not at all."""

import pytest

from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    with atomic_files.new_file(path) as file:
        file.write("√\n")
        file.flush()
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "√\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_cut_short_leaves_the_old_one_and_no_other(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_files.new_file(path) as file:
        file.write("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_written_as_they_are(tmp_path):
    with atomic_files.new_file(tmp_path / "a.png", binary=True) as file:
        file.write(b"\x89\r\n")
    assert (tmp_path / "a.png").read_bytes() == b"\x89\r\n"


def test_a_folder_appears_when_it_is_whole_and_never_over_another(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt), atomic_files.new_folder(folder) as scratch:
        (scratch / "x").write_text("half")
        raise KeyboardInterrupt
    assert list(folder.parent.iterdir()) == []
    with atomic_files.new_folder(folder) as scratch:
        (scratch / "x").write_text("whole")
        assert not folder.exists()
    assert (folder / "x").read_text() == "whole"
    with (
        pytest.raises(UserError, match="is not empty; give a new folder"),
        atomic_files.new_folder(folder),
    ):
        pass
