"""The definition of a study: arms, seeds, measures and claims, checked at the start."""

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.studies import measures

# The scales of a study: the embedded model, minutes for a test, Qwen2.5-0.5B on GPUs.
SCALES = ("tiny", "smoke", "paper")
# Two small iterations, to see that all works.
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
# Which side of the margin the difference left - right has to lie on.
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
    """A question, and the runs that are to answer it."""

    name: str
    question: str
    source: str  # paper and figure or table
    config: str  # FILE or FILE:VARIANT that every run starts from
    changes: Mapping[str, Any]  # of all runs, by dotted key
    # label -> changes of that arm; "config" among them names another config
    arms: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...] = (0, 1, 2)
    measures: tuple[str, ...] = ("test_success", "best_validation", "last_validation")
    curves: tuple[str, ...] = ("validation/success",)  # metrics drawn by iteration
    claims: tuple[Claim, ...] = ()
    smoke: Mapping[str, Any] = dataclasses.field(default_factory=SMOKE.copy)
    # At the scale "paper" FILE becomes FILE:paper and FILE:VARIANT FILE:VARIANT_paper,
    # and all runs have these changes.
    paper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # And at that scale some arms, by label, these besides.
    paper_arms: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    # Arguments of launch/diagnose.py, which measures each finished run; (): none do.
    diagnose: tuple[str, ...] = ()
    notes: str = ""  # what a reader must know: departures from the original


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int
    config: str
    changes: Mapping[str, Any] = dataclasses.field(hash=False)
    diagnose: tuple[str, ...] = ()  # arguments of launch/diagnose.py; (): none

    @property
    def label(self) -> str:
        """A folder's name: letters, digits, - and _."""
        return f"{re.sub(r'[^A-Za-z0-9]+', '_', self.arm)}-seed{self.seed}"

    def arguments(self) -> list[str]:
        """Of launch/train.py, but for --workdir."""
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
            f"--study={path} is no file: name one of configs/studies, as in"
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
    """Raises UserError for the first part of a study that cannot be used."""
    where = f"study {study.name!r}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", study.name):
        raise UserError(f"{where}: choose a name of small letters, digits and _")
    if not study.arms or not study.seeds:
        raise UserError(f"{where} has no arm or no seed: give at least one of each")
    if len(set(study.seeds)) != len(study.seeds):
        raise UserError(f"{where}: seeds {study.seeds} repeat; give each once")
    labels = [PlannedRun(arm, 0, "", {}).label for arm in study.arms]
    if len(set(labels)) != len(labels):
        raise UserError(f"{where}: two arms have one folder name: {sorted(labels)}")
    for name in (*study.measures, *(claim.measure for claim in study.claims)):
        if measures.parse(name)[0] is None:
            known = ", ".join(measures.MEASURES)
            raise UserError(
                f"{where}: measure {name!r} is unknown: choose one of {known}; the"
                " first three also as NAME/LABEL of one of several environments"
            )
    for claim in study.claims:
        _check_one_of(claim.relation, RELATIONS, f"{where}: relation of a claim")
        for arm in filter(None, (claim.left, claim.right)):
            _check_one_of(arm, study.arms, f"{where}: arm of a claim")


def _check_one_of(name: str, known, what: str) -> None:
    if name not in known:
        raise UserError(f"{what} {name!r} is unknown: choose one of {', '.join(known)}")


def planned_runs(
    study: Study,
    *,
    scale: str = "tiny",
    seeds: tuple[int, ...] | None = None,
    only: str = "",
) -> list[PlannedRun]:
    """All runs of a study, seed by seed, so that each seed's comparison comes whole.

    Args:
      study: checked.
      scale: one of SCALES.
      seeds: instead of the study's own.
      only: a regular expression that an arm's label has to contain; "": all.

    Raises:
      UserError: if nothing is left, or scale or expression cannot be used.
    """
    _check_one_of(scale, SCALES, "--scale")
    extra = changes_at(scale, study)
    if seeds is None:
        seeds = study.seeds[:1] if scale == "smoke" else study.seeds
    try:
        arms = [arm for arm in study.arms if re.search(only, arm)]
    except re.error as error:
        raise UserError(
            f"--only={only} is no regular expression ({error}): name arms as"
            " --list shows them, and write a backslash before special characters"
        ) from None
    if not arms:
        raise UserError(
            f"--only={only} matches no arm of {study.name}: its arms are"
            f" {', '.join(study.arms)}"
        )
    return [_planned(study, arm, seed, extra, scale) for seed in seeds for arm in arms]


def _planned(
    study: Study, arm: str, seed: int, extra: Mapping[str, Any], scale: str
) -> PlannedRun:
    changes = {**study.changes, **study.arms[arm], **extra}
    if scale == "paper":
        changes |= study.paper_arms.get(arm, {})
    config = config_at(scale, changes.pop("config", study.config))
    return PlannedRun(arm, seed, config, {**changes, "seed": seed}, study.diagnose)


def config_at(scale: str, config: str) -> str:
    """FILE or FILE:VARIANT as runs of a scale start from it."""
    if scale != "paper":
        return config
    return config + ("_paper" if ":" in config else ":paper")


def arms_at(scale: str, study: Study) -> dict[str, dict[str, Any]]:
    """Each arm's own changes at a scale, by label; not what the scale sets for all."""
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
    """What a scale changes of all runs, whatever arms say."""
    return {"tiny": {}, "smoke": study.smoke, "paper": study.paper}[scale]
