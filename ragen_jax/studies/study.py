"""A study from its file to its page: plan, list, run, report. For launch/study.py."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.reporting.console import Console
from ragen_jax.studies import (
    archive,
    arm_settings,
    definition,
    failures,
    gpus,
    places,
    report,
    runner,
    start_record,
    study_checks,
)
from ragen_jax.studies.definition import PlannedRun, Study
from ragen_jax.studies.run_record import RunRecord, read_run
from ragen_jax.utils import workdir_files
from ragen_jax.utils.words import counted


@dataclasses.dataclass(frozen=True)
class Choice:
    """The flags of launch/study.py."""

    path: str | None  # of the study's file
    folder: Path  # of all studies' runs
    pages: Path | None  # folder of pages and data files; None: as `places` says
    scale: str = "tiny"  # one of definition.SCALES
    seeds: Sequence[str] | None = None  # None: the study's own
    only: str = ""  # regular expression of arms
    run: int | None = None  # number of the one run to do; None: all


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """A study and its chosen runs."""

    study: Study
    choice: Choice
    runs: tuple[PlannedRun, ...]  # to do now
    reported: tuple[PlannedRun, ...]  # on the page
    folder: Path  # of this study's runs
    pages: Path  # folder of its page and data file
    archived: Mapping[archive.Key, RunRecord]  # finished runs in data files

    def state_of(self, planned: PlannedRun) -> str:
        """As `runner.state_of`; a run in a data file is FINISHED too."""
        if archive.key(planned) in self.archived:
            return runner.FINISHED
        return runner.state_of(self.folder, planned)

    def record_of(self, planned: PlannedRun) -> RunRecord:
        """A finished run's record, from its workdir or else from a data file."""
        if runner.state_of(self.folder, planned) == runner.FINISHED:
            workdir = runner.workdir_of(self.folder, planned)
            record = read_run(workdir, planned.seed)
            return dataclasses.replace(record, code=start_record.code(workdir))
        return self.archived[archive.key(planned)]


def prepare(choice: Choice) -> StudyPlan:
    """Reads and checks a study, and plans its runs.

    Raises:
      UserError: for a file, folder, scale, seed, arm or number that cannot be used, or
        a run that was begun with other settings, or another version of a file of the
        user's that they name, than the study now has.
    """
    if (path := choice.path) is None:
        raise UserError("--study is missing: name a file, as in configs/studies/*.py")
    # A shell does not expand the ~ of --folder=~/runs.
    choice = dataclasses.replace(
        choice,
        folder=choice.folder.expanduser(),
        pages=choice.pages and choice.pages.expanduser(),
    )
    for flag in ("folder", "pages"):
        if (folder := getattr(choice, flag)) is None:
            continue
        place = next(p for p in (folder, *folder.parents) if p.exists())
        if not place.is_dir():
            raise UserError(f"--{flag}={folder}: {place} is a file: name a folder")
    study = definition.load(path)
    seeds = None if choice.seeds is None else _read_seeds(choice.seeds)
    planned = definition.planned_runs(
        study, scale=choice.scale, seeds=seeds, only=choice.only
    )
    runs = planned
    if choice.run is not None:
        if not 0 <= choice.run < len(planned):
            raise UserError(
                f"--run={choice.run}: {study.name} has the runs 0 to {len(planned) - 1}"
            )
        runs = [planned[choice.run]]
    scale = "" if choice.scale == "tiny" else f"-{choice.scale}"
    folder = choice.folder / f"{study.name}{scale}"
    pages = choice.pages or places.default_pages(path, folder)
    archived = archive.read(pages, folder.name)
    earlier = archive.entries(pages / f"{folder.name}.json")
    # A page shows all seeds: the study's, this command's, and the earlier page's.
    further = (*(seeds or ()), *(item["seed"] for item in earlier))
    usual = definition.usual_seeds(study, choice.scale)
    all_seeds = tuple(dict.fromkeys((*usual, *further)))
    reported = definition.planned_runs(study, scale=choice.scale, seeds=all_seeds)
    for run in reported:
        start_record.check(runner.workdir_of(folder, run), run)
    plan = StudyPlan(
        study, choice, tuple(runs), tuple(reported), folder, pages, archived
    )
    _check_code(plan)
    return plan


def _check_code(plan: StudyPlan) -> None:
    """Refuses finished runs of another version of an own file than today's.

    Results of two environments would else stand side by side on one page.
    """
    in_folders, in_data = {}, {}
    for run in plan.reported:
        workdir = runner.workdir_of(plan.folder, run)
        in_folders[run.label] = start_record.code(workdir)
        if record := plan.archived.get(archive.key(run)):
            in_data[run.label] = record.code
    remedy = (
        f"move the folders of such runs in {plan.folder} away and choose other --pages"
        f" than {plan.pages}, whose data files have them too, to make them again"
    )
    start_record.check_code(in_folders, remedy)
    start_record.check_code(in_data, remedy)


def _read_seeds(texts: Sequence[str]) -> tuple[int, ...]:
    # Python's `int` would take 1_0 and the digits of other scripts too.
    seeds = tuple(int(text) for text in texts if re.fullmatch("[0-9]{1,10}", text))
    is_of_seeds = seeds and max(seeds) <= study_checks.MOST_SEED
    if not is_of_seeds or len(set(seeds)) != len(texts):
        raise UserError(
            f"--seeds={','.join(texts)}: give different whole numbers from 0 to"
            " 2**32 - 1, as in 0,1,2"
        )
    return seeds


def check_settings(plan: StudyPlan) -> None:
    """Reads the settings of each arm that has a run to train, as the run would.

    Raises:
      UserError: for a config, or a change of it, that cannot be used.
    """

    def is_new(run: PlannedRun) -> bool:
        workdir = runner.workdir_of(plan.folder, run)
        return not (workdir / workdir_files.SETTINGS).exists()

    missing = [run for run in plan.runs if plan.state_of(run) == runner.MISSING]
    # Of an arm's runs one will do: a new one, if there is any.
    for run in {run.arm: run for run in sorted(missing, key=is_new)}.values():
        try:
            arm_settings.read(run, is_new=is_new(run))
        except UserError as error:
            raise UserError(f"study {plan.study.name!r}, {error}") from error


def _make_folder(flag: str, folder: Path) -> None:
    """Makes the folder of a flag. Raises UserError if it cannot be written to."""
    try:
        cli.make_workdir(str(folder))
    except UserError as error:
        raise UserError(
            f"--{flag}={folder} cannot be written to ({error.__cause__}): choose a"
            " folder that is writable, on a disk with free space"
        ) from error


def listing(plan: StudyPlan) -> str:
    """A line per run: number, state, label, arguments; then a command for SLURM."""

    def shown(run: PlannedRun) -> str:
        state = plan.state_of(run)
        begun = start_record.has_begun(runner.workdir_of(plan.folder, run))
        return "begun" if begun and state == runner.MISSING else state

    lines = [
        f"{number:3d}  {shown(run):8s}  {run.label:40s}  {' '.join(run.arguments())}"
        for number, run in enumerate(plan.runs)
    ]
    choice = plan.choice
    command = ["python", "launch/study.py", f"--study={choice.path}"]
    if choice.scale != Choice.scale:
        command.append(f"--scale={choice.scale}")
    command.append(f"--folder={choice.folder}")
    if choice.pages is not None:
        command.append(f"--pages={choice.pages}")
    if choice.seeds is not None:
        command.append(f"--seeds={','.join(choice.seeds)}")
    if choice.only:
        command.append(f"--only={choice.only}")
    array_task = shlex.quote(f"{shlex.join(command)} --run=$SLURM_ARRAY_TASK_ID")
    slurm_line = f"on SLURM: sbatch --array=0-{len(plan.runs) - 1} --wrap={array_task}"
    return "\n".join([*lines, slurm_line])


def run(
    plan: StudyPlan, *, jobs: int, retry_failed: bool, train: Path, console: Console
) -> list[PlannedRun]:
    """Trains the missing runs of a plan, and returns those that failed.

    See `runner.run_missing`.

    Raises:
      UserError: if the runs, or the page that is to follow, could not be written.
    """
    if any(plan.state_of(run) != runner.FINISHED for run in plan.runs):
        _make_folder("folder", plan.choice.folder)
    if plan.choice.run is None:
        _make_folder("pages", plan.pages)
    console.line(f"{plan.study.name}: {plan.study.question}")
    remaining = [run for run in plan.runs if archive.key(run) not in plan.archived]
    if len(remaining) < len(plan.runs):
        count = len(plan.runs) - len(remaining)
        console.line(f"{count} runs are in the data files of {plan.pages}")
    failed = runner.run_missing(
        remaining,
        plan.folder,
        jobs=jobs,
        train=train,
        console=console,
        retry_failed=retry_failed,
        # XLA compiles for a GPU with many threads.
        one_core=plan.choice.scale != "paper" and not gpus.found(),
    )
    if failed:
        names = ", ".join(run.label for run in failed)
        console.line(
            f"{counted(len(failed), 'run')} failed ({names}): the log of one that began"
            f" is {plan.folder}/RUN/study.log; --retry_failed runs them again"
        )
    return failed


def write_page(plan: StudyPlan) -> Path:
    """Writes the page of all finished runs of the study at its scale.

    Data files are read again: others may have been added while the runs trained.

    Raises:
      UserError: if it cannot be written, or a file of a run is damaged.
    """
    _make_folder("pages", plan.pages)
    archived = {**plan.archived, **archive.read(plan.pages, plan.folder.name)}
    plan = dataclasses.replace(plan, archived=archived)
    _check_code(plan)  # A file may have been edited while the runs trained.
    runs: dict[str, list[RunRecord]] = {arm: [] for arm in plan.study.arms}
    failed: dict[str, str] = {}
    entries = []
    for planned in plan.reported:
        state = plan.state_of(planned)
        if state == runner.FINISHED:
            record = plan.record_of(planned)
            runs[planned.arm].append(record)
            entries.append(archive.entry(planned, record, plan.study.curves))
        elif state == runner.FAILED:
            workdir = runner.workdir_of(plan.folder, planned)
            failed[planned.label] = failures.why(workdir)
    # Entries of the earlier file that this page does not report, as of former arms.
    reported = {archive.key(planned) for planned in plan.reported}
    earlier = archive.entries(plan.pages / f"{plan.folder.name}.json")
    entries += [item for item in earlier if archive.key_of(item) not in reported]
    return report.write(
        plan.study,
        runs,
        failed,
        plan.pages,
        command=_command(plan),
        scale=plan.choice.scale,
        entries=entries,
    )


def _command(plan: StudyPlan) -> str:
    """The command that trains the reported runs and writes this page."""
    choice = plan.choice
    assert choice.path is not None  # Or there were no plan.
    command = ["python", "launch/study.py", f"--study={choice.path}"]
    command += places.flags(choice.path, choice.folder, plan.folder, plan.pages)
    if choice.scale != "tiny":
        command.append(f"--scale={choice.scale}")
    seeds = tuple(dict.fromkeys(planned.seed for planned in plan.reported))
    if seeds != tuple(definition.usual_seeds(plan.study, choice.scale)):
        command.append(f"--seeds={','.join(map(str, seeds))}")
    return shlex.join(command)
