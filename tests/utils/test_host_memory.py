"""How much memory a process may use, by its host and its control groups."""

import os

import pytest

from ragen_jax.utils import host_memory

_HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "limits", "most"),
    [
        # Version 2: the process's own group, then one around it, then none.
        ("0::/job/step", {"job/step/memory.max": _GIB}, _GIB),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": 7}, 7),
        ("0::/job", {"job/memory.max": "max"}, _HOST),
        # A container sees its own group as the folder.
        ("0::/", {"memory.max": _GIB}, _GIB),
        # Version 1, whose unlimited is a number; another controller does not count.
        (
            "4:memory:/docker/a\n3:cpuset:/",
            {"memory/memory.limit_in_bytes": 5, "memory.max": 3},
            5,
        ),
        ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": 2**63 - 4096}, _HOST),
        # No control groups, and a file that is none.
        ("", {}, _HOST),
        ("nonsense", {"memory.max": 5}, _HOST),
    ],
)
def test_the_smallest_limit_of_host_and_control_groups_counts(
    tmp_path, groups, limits, most
):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, limit in limits.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    assert host_memory.most_bytes(tmp_path) == most
    assert 0 < host_memory.most_bytes() <= _HOST
