r"""Runs a study: a grid of training runs with seeds, a page of figures and verdicts.

  python launch/study.py --study=configs/studies/stabilized.py --jobs=2

Runs what is missing, each run in its own process; after an interruption, the same
command resumes. Then writes NAME.md with its figure and data: to docs/studies, or, of a
study of your own, beside its runs. On SLURM, an array job does one run per task:

  sbatch --array=0-11 --wrap='python launch/study.py --study=FILE --scale=paper \
      --run=$SLURM_ARRAY_TASK_ID'

With --across, and no study, it writes docs/studies/across.md from the data of all.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

import sys
from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.studies import places
from ragen_jax.studies.definition import SCALES

_STUDY = flags.DEFINE_string("study", None, "Python file that defines get_study().")
_FOLDER = flags.DEFINE_string("folder", places.RUNS, "Folder for the runs.")
_PAGES = flags.DEFINE_string(
    "pages",
    None,
    "Folder for the page, its figure and its data. Default: docs/studies; for a study"
    " outside configs/studies, that of its runs, FOLDER/NAME.",
)
_JOBS = flags.DEFINE_integer(
    "jobs", 2, "Runs at a time; at most the number of GPUs, if any.", lower_bound=1
)
_SEEDS = flags.DEFINE_list(
    "seeds", None, "Seeds to use instead of the study's, such as 0,1,2."
)
_ONLY = flags.DEFINE_string("only", "", "Regular expression for the arms to run.")
_SCALE = flags.DEFINE_enum("scale", "tiny", SCALES, "Size of the runs.")
_RUN = flags.DEFINE_integer("run", None, "Run only the run of this number in --list.")
_RETRY = flags.DEFINE_boolean("retry_failed", False, "Run failed runs again.")
_REPORT = flags.DEFINE_boolean("report", False, "Train nothing; write the page again.")
_LIST = flags.DEFINE_boolean("list", False, "Only list the runs and their states.")
_ACROSS = flags.DEFINE_boolean(
    "across", False, "Train nothing; write PAGES/across.md from all studies' data."
)
# What --across would not read.
_OF_A_STUDY = ("study", "folder", "jobs", "seeds", "only", "scale", "run")
_OF_A_STUDY += ("retry_failed", "report", "list")


def main() -> None:
    # A signal raises, so that the study first ends its runs, which save their state.
    endings.raise_instead()
    from ragen_jax.reporting.console import Console
    from ragen_jax.studies import study

    for name in ("folder", "pages"):
        cli.local_path(name, flags.FLAGS[name].value or "")  # Refuses a URL.
    if _ACROSS.value:
        cli.refuse_unread(_OF_A_STUDY, beside="across")
        from ragen_jax.studies.across import page

        root = Path(__file__).resolve().parent.parent
        with cli.user_mistakes():
            pages = Path(_PAGES.value or places.PUBLISHED)
            written = page.write(root, pages.expanduser())
        print(f"wrote {written}")
        return
    cli.refuse_unread(("run", "retry_failed", "jobs", "only"), beside="report")
    cli.refuse_unread(("report", "retry_failed", "jobs", "run"), beside="list")
    if not (_REPORT.value or _LIST.value):
        cli.check_alone("a study")  # Each run would look for those of its cluster.
    with cli.user_mistakes():
        chosen = study.Choice(
            path=_STUDY.value,
            folder=Path(_FOLDER.value),
            pages=Path(_PAGES.value) if _PAGES.value else None,
            scale=_SCALE.value,
            seeds=_SEEDS.value,
            only=_ONLY.value,
            run=_RUN.value,
        )
        plan = study.prepare(chosen)
        if not _REPORT.value:
            study.check_settings(plan)
    console = Console(sys.stdout)
    if _LIST.value:
        console.line(study.listing(plan))
        return
    failed = []
    if not _REPORT.value:
        failed = study.run(
            plan,
            jobs=_JOBS.value,
            retry_failed=_RETRY.value,
            train=Path(__file__).parent / "train.py",
            console=console,
        )
    if _RUN.value is None:
        console.line(f"wrote {study.write_page(plan)}")
    if len(failed) == len(plan.runs):
        raise UserError(
            "every run of this command failed: read the logs named above, mend the"
            " cause, and add --retry_failed"
        )


if __name__ == "__main__":
    cli.run(main, computes=False)
