"""The runs of all studies, each once, with the settings that they trained with."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax import cli
from ragen_jax.settings import flatten
from ragen_jax.studies import archive, definition
from ragen_jax.studies.definition import PlannedRun, Study
from ragen_jax.studies.run_record import RunRecord

# Titles of environments by the name of their settings.
_TITLES = {"bandit": "Bandit", "sokoban": "Sokoban", "frozen_lake": "FrozenLake"}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run, with what it was trained to be."""

    planned: PlannedRun
    record: RunRecord
    settings: Mapping[str, Any]  # by dotted key: its config with its changes

    @property
    def seed(self) -> int:
        return self.record.seed

    @property
    def environment(self) -> str:
        """As "Bandit", or "BanditRev" where names mislead."""
        name = str(self.settings["env.name"])
        title = _TITLES.get(name, name)
        return f"{title}Rev" if self.settings.get("env.reverse") else title

    @property
    def rewinds(self) -> bool:
        """Whether the run may go back to an earlier checkpoint."""
        return self.settings["health.on_collapse"] == "rollback"

    @property
    def arm(self) -> tuple[str, ...]:
        """Its arguments but for the seed: equal for runs that differ in it alone."""
        arguments, _ = archive.key(self.planned)
        return tuple(a for a in arguments if not a.startswith("--config.seed="))


@dataclasses.dataclass(frozen=True)
class Pool:
    """What the data files of a folder of pages hold."""

    studies: Mapping[str, Study]
    trained: Mapping[str, Sequence[Trained]]  # study -> its finished runs

    def arms(self, study: str) -> dict[str, dict[int, Trained]]:
        """Arm -> seed -> run of one study; {} where none has finished."""
        found: dict[str, dict[int, Trained]] = {}
        for run in self.trained.get(study, ()):
            found.setdefault(run.planned.arm, {})[run.seed] = run
        return found

    @functools.cached_property
    def runs(self) -> list[Trained]:
        """Every run once, also where several studies plan it or trained its like.

        Settings that are equal under two spellings train the same run twice.
        """
        runs: dict[tuple, Trained] = {}
        for run in (r for study in self.trained.values() for r in study):
            runs.setdefault(_trained_as(run), run)
        return list(runs.values())

    def diagnosed_by(self, run: Trained) -> tuple[str, ...]:
        """The flags of a run's diagnosis, whichever study asked for it; () of none."""
        like = _trained_as(run)
        return next(
            (
                tuple(each.planned.diagnose)
                for trained in self.trained.values()
                for each in trained
                if each.planned.diagnose and _trained_as(each) == like
            ),
            (),
        )

    def study_of(self, run: Trained) -> str:
        """The first study that holds one of `runs`."""
        return next(
            name
            for name, trained in self.trained.items()
            if any(each is run for each in trained)
        )


def _trained_as(run: Trained) -> tuple:
    """Equal for two runs of the same training."""
    test, name = run.record.test, run.environment
    _, success = run.record.series("train/success")
    return name, run.seed, repr(test.get("after", test)), tuple(success)


def load(root: Path, pages: Path) -> Pool:
    """The studies of ROOT/configs/studies and their finished runs in `pages`.

    Runs of arms that no study has any more are left out: what they were is unknown.
    """
    studies = [definition.load(p) for p in sorted(root.glob("configs/studies/*.py"))]
    records = archive.read(pages)
    seeds = tuple(sorted({record.seed for record in records.values()}))
    trained = {}
    for study in studies:
        planned = definition.planned_runs(study, seeds=seeds) if seeds else []
        found = [run for run in planned if archive.key(run) in records]
        trained[study.name] = [
            Trained(run, records[archive.key(run)], _settings(root, run))
            for run in found
        ]
    return Pool({study.name: study for study in studies}, trained)


def _settings(root: Path, run: PlannedRun) -> dict[str, Any]:
    return {**_config(root, run.config), **run.changes}


@functools.lru_cache
def _config(root: Path, config: str) -> dict[str, Any]:
    return flatten(cli.load_config(str(root / config)).to_dict())
