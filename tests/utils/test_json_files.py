"""JSON of unknown origin is read, or refused at once."""

import os

import pytest

from ragen_jax.utils import json_files
from ragen_jax.utils.finite import finite


@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_what_is_nested_more_deeply_than_can_be_walked_is_refused(ends):
    begin, end = ends
    nest = lambda levels: (begin * levels + "1" + end * levels).encode()
    assert finite(json_files.parse(nest(json_files.MOST_LEVELS - 1)))
    for levels in (json_files.MOST_LEVELS, 700, 980, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            json_files.parse(nest(levels))


def test_neither_pipes_nor_devices_nor_endless_files_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "long").write_text("[" + "1," * 999 + "1]")
    monkeypatch.setattr(json_files, "MOST_BYTES", 1000)
    for name, words in (("pipe", "a pipe"), ("device", "a pipe"), ("long", "bytes, ")):
        with pytest.raises(ValueError, match=words):
            json_files.read(tmp_path / name)
