"""Writes the health report of a run: one self-contained HTML page.

  python launch/report.py --workdir=runs/frozenlake
  python launch/report.py --workdir=runs/seed0 --compare=runs/seed1 --compare=runs/other

WORKDIR/report.html holds the curves, what the alarm says, the test before and after
training, the settings that differ, and the recorded episodes. Runs that differ only in
the seed are drawn as one curve with a band.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_COMPARE = flags.DEFINE_multi_string("compare", [], "Folder of a run to compare with")


def main() -> None:
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: pass the folder of a run")
    from ragen_jax.diagnostics import report

    others = [_folder("compare", other) for other in _COMPARE.value]
    print(report.write_report(_folder("workdir", _WORKDIR.value), others))


def _folder(flag: str, path: str) -> Path:
    """The folder that a flag names. Raises UserError if there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"--{flag}={path}: there is no such folder; give the workdir of a run"
        )
    return folder


if __name__ == "__main__":
    cli.run(main)
