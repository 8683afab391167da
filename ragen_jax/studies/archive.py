"""Finished runs as a study's data file keeps them.

A study may take more hours than one machine is to be had for, and two studies may plan
the same run. What a page needs of a run therefore stands in NAME.json beside the page:
with that file the run is finished, wherever its workdir is, and for every study that
plans a run of the same arguments.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.studies.measures import RunRecord

# Metrics that a measure reads. Curves of a study are kept besides.
KEPT = (
    "train/success",
    "train/return",
    "validation/success",
    "rollout/entropy",
    "rollout/reply_tokens",
    "rollout/valid_reply_rate",
    "rollout/grounded",
    "filter/reward_std",
    "update/actor_grad_norm",
    "health/level",
    "health/distinct_thoughts",
    "time/iteration_seconds",
)

# Configuration and changes of a run, and how it was diagnosed.
Key = tuple[tuple[str, ...], tuple[str, ...]]


def key(run: PlannedRun) -> Key:
    """What two runs have in common that are one run."""
    return tuple(sorted(run.arguments())), tuple(run.diagnose)


def key_of(item: dict[str, Any]) -> Key:
    """The key of the run that became an entry."""
    return tuple(sorted(item["arguments"])), tuple(item["diagnose"])


def entry(run: PlannedRun, record: RunRecord, curves: Iterable[str]) -> dict[str, Any]:
    """A run as JSON; numbers of series with six digits."""
    series = {}
    for name in dict.fromkeys((*KEPT, *curves)):
        iterations, values = record.series(name)
        if len(values):
            short = [float(f"{value:.6g}") for value in values]
            series[name] = [iterations.tolist(), short]
    return {
        "arm": run.arm,
        "seed": run.seed,
        "arguments": run.arguments(),
        "diagnose": list(run.diagnose),
        "series": series,
        "test": record.test,
        "diagnoses": list(record.diagnoses),
        "rollbacks": list(record.rollbacks),
    }


def read(pages: Path) -> dict[Key, RunRecord]:
    """The runs in all data files of a folder of pages.

    Raises:
      UserError: for a file that is not a study's data.
    """
    found = {}
    for path in sorted(pages.glob("*.json")):
        try:
            for item in json.loads(path.read_text()).get("runs", ()):
                found[key_of(item)] = _record(item)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is not the data of a study ({error!r}): move it away, or"
                " restore it"
            ) from error
    return found


def entries(path: Path) -> list[dict[str, Any]]:
    """The runs in one data file, as `entry` made them; none where there is no file.

    Raises:
      UserError: for a file of before runs were kept, which is all that is known of its.
    """
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    if "runs" not in data:
        raise UserError(
            f"{path} keeps no runs, so that a new page would lose what it says: move it"
            " away first, or choose another folder with --pages"
        )
    return data["runs"]


def _record(item: dict[str, Any]) -> RunRecord:
    rows: dict[int, dict[str, Any]] = {}
    for name, (iterations, values) in item["series"].items():
        for iteration, value in zip(iterations, values, strict=True):
            rows.setdefault(iteration, {"iteration": iteration})[name] = value
    records = [rows[iteration] for iteration in sorted(rows)]
    rollbacks = item.get("rollbacks", ())  # Older data files have none.
    return RunRecord(item["seed"], records, item["test"], item["diagnoses"], rollbacks)
