"""The definition of a study: arms, seeds, measures and claims, checked when loaded.

Files in configs/studies return a `Study`; study.py plans its runs by this.
"""

import dataclasses
import importlib.util
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.settings import nearest
from ragen_jax.studies import measures, study_checks

# "tiny" trains the embedded model, "smoke" is a test of minutes, and "paper" trains
# Qwen2.5-0.5B on GPUs.
SCALES = ("tiny", "smoke", "paper")
# Changes at the scale "smoke": two small iterations, to see that everything works.
SMOKE = {
    "iterations": 2,
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "optimizer.minibatch": 8,
    "optimizer.microbatch": 8,
    "evaluation.prompts": 8,
    "evaluation.test_prompts": 8,
    "evaluation.slots": 8,
    "every.evaluate": 1,
    "every.checkpoint": 1,
}
# On which side of the margin a claim puts the difference left - right.
RELATIONS = ("greater", "less")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement that the data can support or contradict.

    It says that `measure` of arm `left` is greater (less) than that of arm `right` by
    more than `margin`; without `right`, than `margin` itself.
    """

    text: str  # in words, with its source
    left: str
    right: str | None = None
    measure: str = "test_success"
    relation: str = "greater"
    margin: float = 0.0


@dataclasses.dataclass(frozen=True)
class Study:
    """A question, and the runs that are to answer it; see docs/studies/README.md."""

    name: str
    question: str
    source: str  # paper and figure or table
    config: str  # FILE or FILE:VARIANT, the base of every run's settings
    changes: Mapping[str, Any]  # of all runs' settings, by dotted key
    # label -> changes of that arm; the key "config" replaces the study's config
    arms: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...] = (0, 1, 2)
    measures: tuple[str, ...] = ("test_success", "best_validation", "last_validation")
    curves: tuple[str, ...] = ("validation/success",)  # metrics drawn by iteration
    claims: tuple[Claim, ...] = ()
    smoke: Mapping[str, Any] = dataclasses.field(default_factory=SMOKE.copy)
    # Changes of all runs at the scale "paper", whose config is FILE:paper in place of
    # FILE, or FILE:VARIANT_paper in place of FILE:VARIANT.
    paper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Further changes of some arms at that scale, by label.
    paper_arms: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    # Arguments of launch/diagnose.py, run on each finished run; (): it is not run.
    diagnose: tuple[str, ...] = ()
    notes: str = ""  # what a reader must know: departures from the original


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int
    config: str
    changes: Mapping[str, Any] = dataclasses.field(hash=False)
    diagnose: tuple[str, ...] = ()  # as in `Study`

    @property
    def label(self) -> str:
        """The name of the run's folder: letters, digits, - and _."""
        return f"{re.sub(r'[^A-Za-z0-9]+', '_', self.arm)}-seed{self.seed}"

    def arguments(self) -> list[str]:
        """The arguments of launch/train.py, without --workdir."""
        flags = [f"--config.{key}={value}" for key, value in self.changes.items()]
        return [f"--config={self.config}", *flags]


def load(path: str | Path) -> Study:
    """The study that a file's `get_study()` returns.

    Raises:
      UserError: if there is no such file, or it defines no sound study.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(
            f"--study={path} is not a file: name one of configs/studies, as in"
            " configs/studies/stabilized.py"
        )
    spec = importlib.util.spec_from_file_location("study_config", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--study={path}: choose a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        study = module.get_study()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"--study={path} fails with {type(error).__name__}: {error}; fix the file"
        ) from error
    if not isinstance(study, Study):
        raise UserError(
            f"--study={path}: get_study() returns {type(study).__name__}; let it return"
            " a ragen_jax.studies.definition.Study"
        )
    check(study)
    return study


def check(study: Study) -> None:
    """Raises UserError for the first mistake in a study."""
    where = f"study {reprlib.repr(study.name)}"
    _check_types(study, where)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", study.name):
        raise UserError(f"{where}: choose a name of small letters, digits and _")
    if study.name in study_checks.RESERVED_NAMES:
        raise UserError(
            f"{where}: {study.name}.md is another page: choose another name"
        )
    if not study.arms or not study.seeds:
        raise UserError(f"{where} has no arm or no seed: give at least one of each")
    if len(set(study.seeds)) != len(study.seeds):
        raise UserError(f"{where}: seeds {study.seeds} repeat; give each once")
    labels = [PlannedRun(arm, 0, "", {}).label for arm in study.arms]
    if len(set(labels)) != len(labels):
        raise UserError(f"{where}: two arms have one folder name: {sorted(labels)}")
    for arm in study.paper_arms:
        _check_one_of(arm, study.arms, f"{where}: arm of paper_arms")
    for name in (*study.measures, *(claim.measure for claim in study.claims)):
        if measures.parse(name)[0] is None:
            raise UserError(f"{where}: {_unknown_measure(name)}")
    for claim in study.claims:
        _check_one_of(claim.relation, RELATIONS, f"{where}: relation of a claim")
        for arm in filter(None, (claim.left, claim.right)):
            _check_one_of(arm, study.arms, f"{where}: arm of a claim")


def _unknown_measure(name: str) -> str:
    base, slash, _ = name.partition("/")
    remedy = nearest(base, measures.MEASURES)
    if not slash:
        return f"measure {name!r} is unknown: {remedy}"
    several = [key for key, one in measures.MEASURES.items() if one.by_environment]
    return (
        f"measure {name!r} is unknown (with /LABEL, that of one of several"
        f" environments, there are {', '.join(several)}): {remedy}"
    )


def _check_types(study: Study, where: str) -> None:
    study_checks.check_fields(study, study_checks.STUDY, where)
    for field in ("changes", "smoke", "paper"):
        study_checks.check_changes(getattr(study, field), f"{where}: {field}")
    for field in ("arms", "paper_arms"):
        for arm, changes in getattr(study, field).items():
            study_checks.check_changes(changes, f"{where}: {field}[{arm!r}]")
    for number, claim in enumerate(study.claims):
        if not isinstance(claim, Claim):
            raise UserError(
                f"{where}: claims[{number}] is {reprlib.repr(claim)}: give a"
                " Claim(text=..., left=..., right=...)"
            )
        one = f"{where}, claims[{number}]"
        study_checks.check_fields(claim, study_checks.CLAIM, one)


def _check_one_of(name: str, choices, what: str) -> None:
    if name not in choices:
        raise UserError(
            f"{what} {name!r} is unknown: choose one of {', '.join(choices)}"
        )


def planned_runs(
    study: Study,
    *,
    scale: str = "tiny",
    seeds: tuple[int, ...] | None = None,
    only: str = "",
) -> list[PlannedRun]:
    """The chosen runs, seed by seed, so that all arms of a seed finish before the next.

    Args:
      study: checked.
      scale: one of SCALES.
      seeds: in place of the study's own.
      only: a regular expression to be found in an arm's label; "": all arms.

    Raises:
      UserError: if nothing is left, or scale or expression cannot be used.
    """
    _check_one_of(scale, SCALES, "--scale")
    extra = changes_at(scale, study)
    seeds = usual_seeds(study, scale) if seeds is None else seeds
    try:
        arms = [arm for arm in study.arms if re.search(only, arm)]
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"--only={only} is not a regular expression ({error}): name arms as"
            " --list shows them, and write a backslash before special characters"
        ) from None
    if not arms:
        raise UserError(
            f"--only={only} matches no arm of {study.name}: its arms are"
            f" {', '.join(study.arms)}"
        )
    return [_planned(study, arm, seed, extra, scale) for seed in seeds for arm in arms]


def usual_seeds(study: Study, scale: str) -> tuple[int, ...]:
    """The seeds that are trained at a scale where the command names none."""
    return study.seeds[:1] if scale == "smoke" else study.seeds


def _planned(
    study: Study, arm: str, seed: int, extra: Mapping[str, Any], scale: str
) -> PlannedRun:
    changes = {**study.changes, **study.arms[arm], **extra}
    if scale == "paper":
        changes |= study.paper_arms.get(arm, {})
    config = config_at(scale, changes.pop("config", study.config))
    changes["seed"] = seed
    return PlannedRun(arm, seed, config, changes, tuple(study.diagnose))


def config_at(scale: str, config: str) -> str:
    """The config of runs at a scale: `config`, or its variant for "paper"."""
    if scale != "paper":
        return config
    return config + ("_paper" if ":" in config else ":paper")


def arms_at(scale: str, study: Study) -> dict[str, dict[str, Any]]:
    """Each arm's own changes at a scale, by label, without those of the scale."""
    common = changes_at(scale, study)
    arms = {}
    for arm, own in study.arms.items():
        arms[arm] = {k: v for k, v in own.items() if k not in common}
        if "config" in own:
            arms[arm]["config"] = config_at(scale, own["config"])
        if scale == "paper":
            arms[arm] |= study.paper_arms.get(arm, {})
    return arms


def changes_at(scale: str, study: Study) -> Mapping[str, Any]:
    """The changes of all runs at a scale, which override those of arms."""
    return {"tiny": {}, "smoke": study.smoke, "paper": study.paper}[scale]
