"""A finished run as a study sees it, read from its workdir."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.diagnostics import rollbacks as rollbacks_lib
from ragen_jax.reporting import metrics
from ragen_jax.studies import record_checks
from ragen_jax.utils import workdir_files

DIAGNOSIS = "study_diagnosis.json"  # a name that launch/diagnose.py does not default to


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What measures read of a run; `archive` keeps it in a data file."""

    seed: int
    records: Sequence[Mapping[str, Any]]  # of metrics.jsonl, rising iterations
    test: Mapping[str, Any]  # of test.json; with several environments, by label
    diagnoses: Sequence[Mapping[str, Any]] = ()  # of DIAGNOSIS, a checkpoint each
    rollbacks: Sequence[Mapping[str, Any]] = ()  # of rollbacks.json, in order
    # Digests, by `start_record`, of the own files that its settings name and the model.
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def tested(self) -> tuple[str, ...]:
        """Labels of the environments of its test; one alone has none: ("",)."""
        return ("",) if "after" in self.test else tuple(self.test)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(iterations, values) of a metric where it was written."""
        points = [
            (r["iteration"], r[name]) for r in self.records if r.get(name) is not None
        ]
        iterations, values = zip(*points, strict=True) if points else ((), ())
        return np.array(iterations, int), np.array(values, float)

    def tests(self, environment: str) -> list[Mapping[str, Any]]:
        """The test results of one environment, or of all for ""; [] if it has none."""
        if "after" in self.test:
            return [] if environment else [self.test]
        if environment:
            return [self.test[environment]] if environment in self.test else []
        return list(self.test.values())


def read_run(workdir: Path, seed: int) -> RunRecord:
    """What a finished run left in its workdir.

    Raises:
      UserError: naming the file that is damaged, or holds something else.
    """
    test = record_checks.read_json(
        workdir / workdir_files.TEST, "a run's test", record_checks.check_test
    )
    diagnoses: Sequence[Mapping[str, Any]] = ()
    if (diagnosis := workdir / DIAGNOSIS).is_file():
        diagnoses = record_checks.read_json(
            diagnosis, "a run's diagnosis", record_checks.check_diagnoses
        )
    rollbacks = rollbacks_lib.read_rollbacks(workdir)
    return RunRecord(seed, metrics.read(workdir), test, diagnoses, rollbacks)
