"""The memory of the host that this process may use."""

import contextlib
import os
from pathlib import Path


def most_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of the host's memory, or fewer where a container or a job has a limit.

    Docker, Kubernetes and SLURM limit by control groups (Linux, cgroups(7)): whichever
    this process is in, and those around it. None where the system does not say.

    Args:
      root: of the file system.
    """
    if not hasattr(os, "sysconf"):
        return None
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits(root)])


def _limits(root: Path) -> list[int]:
    """Bytes, the limits of this process's control groups; [] without any."""
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        groups = [line.split(":", 2) for line in lines]
        return [
            limit
            for _, controllers, group in groups
            for limit in _limits_along(root / "sys/fs/cgroup", controllers, group)
        ]
    return []


def _limits_along(folder: Path, controllers: str, group: str) -> list[int]:
    """Limits of a group and of all around it, up to the folder's own.

    A container may see nothing but its own group, as the folder.

    Args:
      folder: where groups are mounted.
      controllers: of the hierarchy, "" of version 2.
      group: path in the hierarchy.
    """
    name = "memory.max"
    if controllers:
        folder, name = folder / "memory", "memory.limit_in_bytes"
        if "memory" not in controllers.split(","):
            return []
    parts = Path(group.strip("/")).parts
    texts = []
    for depth in range(len(parts) + 1):
        with contextlib.suppress(OSError):
            texts.append(
                folder.joinpath(*parts[:depth], name)
                .read_text(encoding="utf-8")
                .strip()
            )
    return [int(text) for text in texts if text.isdecimal()]
