"""A run that is disturbed again and again, and must end as if nothing had happened.

  PYTHONPATH=.:tests python tests/soak.py --iterations=500 --faults=100 --seed=0

First the run undisturbed, in which some gradients are not finite; then the same with
faults drawn at random:

  kill, term, interrupt  SIGKILL, SIGTERM, SIGINT at a random moment
  stop                   SIGSTOP for 3 s, then SIGTERM
  flip                   SIGKILL, then a flipped bit in the newest checkpoint
  full                   another file fills the disk, a tmpfs; needs root on Linux
  limit                  files may not grow past 2000 bytes (RLIMIT_FSIZE)
  slow                   each call that writes takes 20 ms more; then SIGKILL; needs cc
  clock                  time.time is set back by an hour; then SIGTERM

After each the same command is started again. At the end every leaf of the last
checkpoint, every metric and the test's table must be equal bit for bit. Memory and file
handles are those of the undisturbed run, one process throughout. Not a test of the
suite: it takes as long as its iterations.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from helpers import full_disk, runs

FAULTS = Path(__file__).parent / "helpers" / "faults"
# Each ends in a signal of its own, or in what the process makes of it.
_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "flip": signal.SIGKILL,
    "slow": signal.SIGKILL,
    "clock": signal.SIGTERM,
}
_KINDS = (*_SIGNALS, "stop", "full", "limit")
_CODES = {"kill": -9, "flip": -9, "slow": -9, "full": 2, "limit": 2}  # others: 0
_SECONDS = 86400


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--iterations", type=int, default=500)
    flags.add_argument("--faults", type=int, default=100)
    flags.add_argument("--seed", type=int, default=0)
    chosen = flags.parse_args()
    os.environ.setdefault("RAGEN_JAX_TESTS", tempfile.mkdtemp(prefix="soak."))
    place = Path(os.environ["RAGEN_JAX_TESTS"])
    changes = dict(
        iterations=chosen.iterations,
        checkpoint__keep_last=3,
        every__evaluate=10,
        reward__hook=str(FAULTS / "rare_nan.py"),
        safety__max_bad_updates=0,
    )
    began = time.monotonic()
    whole = place / "whole"
    flatness = _undisturbed(runs.arguments(whole, **changes), whole)
    with _disk(place / "disk") as disk:
        disturbed = disk / "disturbed"
        kinds = _possible(place, disk)
        counted, unexpected = _disturb_all(
            runs.arguments(disturbed, **changes), disturbed, kinds, chosen
        )
        code, _, errors = runs.finish(
            runs.start(runs.arguments(disturbed, **changes)), seconds=_SECONDS
        )
        assert code == 0, errors
        _assert_same(whole, disturbed)
        scraps = [p.name for p in disturbed.iterdir() if p.name.startswith(".")]
        sizes = [_size(whole), _size(disturbed)]
    skipped = [r.get("update/skipped_nonfinite", 0) for r in runs.records(whole)]
    report = {
        "iterations": chosen.iterations,
        "not finite": max(skipped),
        "faults": dict(sorted(counted.items())),
        "not tried here": sorted(set(_KINDS) - set(kinds)),
        "unexpected": unexpected,
        **flatness,
        "disk_mib": sizes,
        "scraps": scraps,
        "seconds": round(time.monotonic() - began),
        "equal": "bit for bit",
    }
    print(json.dumps(report, indent=1))
    sys.exit(bool(unexpected or scraps))


def _undisturbed(arguments: list[str], workdir: Path) -> dict[str, list]:
    """Runs to the end; memory and handles after a fifth of the run, and at most."""
    process = runs.start(arguments)
    seen: list[tuple[int, int, int]] = []  # iteration, MiB, handles

    def watch() -> None:
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                handles = len(os.listdir(f"/proc/{process.pid}/fd"))
                seen.append((_last(workdir), _memory(process.pid), handles))
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
    code, _, errors = runs.finish(process, seconds=_SECONDS)
    assert code == 0, errors
    first, last = seen[0][0], seen[-1][0]
    early = next(s for s in seen if s[0] > first + (last - first) / 5)
    late = [s for s in seen if early[0] <= s[0] < last] or [early]
    return {
        "memory_mib": [early[1], late[-1][1]],
        "handles": [early[2], late[-1][2]],
        "from iteration": [early[0], late[-1][0]],
    }


def _disturb_all(
    arguments: list[str], workdir: Path, kinds: tuple[str, ...], chosen
) -> tuple[collections.Counter, list[str]]:
    """Starts and disturbs the run until it is nearly over; what happened."""
    draw, counted = random.Random(chosen.seed), collections.Counter()
    unexpected: list[str] = []
    # The faults are spread over the run.
    stride = max(1, chosen.iterations // (chosen.faults + 1))
    while counted.total() < chosen.faults:
        fault = draw.choice(kinds)
        until = _last(workdir) + draw.randint(1, 2 * stride - 1)
        if until >= chosen.iterations - 1:
            break
        process = runs.start(arguments, more=_environment(fault, workdir.parent.parent))
        _wait(process, workdir, until)
        time.sleep(draw.random())
        _disturb(fault, process, workdir, draw, unexpected)
        counted[fault] += 1
        print(f"{fault:10s} after iteration {_last(workdir)}", flush=True)
    return counted, unexpected


def _disturb(fault, process, workdir: Path, draw, unexpected: list[str]) -> None:
    filler = workdir.parent / "filler"
    if fault == "stop":
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
    elif fault == "limit":
        limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2000, limits[1]))
    elif fault == "full":
        full_disk.fill(filler, leave=draw.choice((0, 4096, 65536)))
    else:
        process.send_signal(_SIGNALS[fault])
    code, _, errors = runs.finish(process, seconds=600)
    is_sentence = code != 2 or (errors.count("\n") == 1 and "whole" in errors)
    if code != _CODES.get(fault, 0) or "Traceback" in errors or not is_sentence:
        unexpected.append(f"{fault}: exit code {code}: {errors[-300:]}")
    filler.unlink(missing_ok=True)
    if fault == "flip" and len(runs.steps(workdir)) > 1:
        newest = workdir / "checkpoints" / str(runs.steps(workdir)[-1]) / "state"
        path = draw.choice([p for p in newest.rglob("0*") if p.is_file()])
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def _environment(fault: str, place: Path) -> dict[str, str]:
    """Variables of a process that has to do with this fault."""
    if fault == "slow":
        return {"LD_PRELOAD": str(_library(place)), "SLOW_DISK_MS": "20"}
    if fault == "clock":
        paths = f"{FAULTS}{os.pathsep}{runs.ROOT}"
        return {"CLOCK_BACK": "3600,6", "PYTHONPATH": paths}
    return {}


def _possible(place: Path, disk: Path) -> tuple[str, ...]:
    """The faults that this machine lets one make."""
    compiler = shutil.which("cc")
    if compiler:
        built = [compiler, "-shared", "-fPIC", "-o", _library(place)]
        subprocess.run([*built, FAULTS / "slow_disk.c", "-ldl"], check=True)
    lacking = set() if compiler else {"slow"}
    if not os.path.ismount(disk):
        lacking.add("full")
    return tuple(kind for kind in _KINDS if kind not in lacking)


def _library(place: Path) -> Path:
    return place / "slow_disk.so"


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    """A small disk of its own, or a folder where none can be mounted."""
    folder.mkdir()
    if reason := full_disk.why_not():
        print(f"no disk is filled: {reason}")
        yield folder
        return
    with full_disk.small_disk(folder, mebibytes=64):
        yield folder


def _assert_same(whole: Path, disturbed: Path) -> None:
    last = runs.steps(whole)[-1]
    runs.assert_same_leaves(runs.leaves(whole, last), runs.leaves(disturbed, last))
    assert runs.records(whole) == runs.records(disturbed)
    assert (whole / "test.json").read_text() == (disturbed / "test.json").read_text()


def _wait(process, workdir: Path, iteration: int) -> None:
    while _last(workdir) < iteration and process.poll() is None:
        time.sleep(0.02)


def _last(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text().splitlines()
    return max((json.loads(x)["iteration"] for x in lines if x[-1:] == "}"), default=0)


def _memory(process: int) -> int:
    """MiB of resident memory."""
    text = Path(f"/proc/{process}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _size(workdir: Path) -> float:
    """MiB of a run's files, without what was set aside as damaged."""
    files = [p for p in workdir.rglob("*") if p.is_file() and ".damaged" not in str(p)]
    return round(sum(p.stat().st_size for p in files) / 2**20, 1)


if __name__ == "__main__":
    main()
