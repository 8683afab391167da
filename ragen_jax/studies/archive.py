"""Finished runs, archived in a study's data file.

A study may take longer than one machine is available, and two studies may plan the same
run. So NAME.json, beside the page, holds all that a page needs of each run: a run in
such a file counts as finished wherever its workdir is, and in every study that plans a
run with the same arguments.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.studies import record_checks
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.utils import json_files

# Metrics that measures read, and curves of any study: another one than the study that
# trained a run may show it. What else a study's own curves name is archived too.
ARCHIVED_METRICS = (
    "train/success",
    "train/return",
    "validation/success",
    "rollout/entropy",
    "rollout/reply_tokens",
    "rollout/valid_reply_rate",
    "rollout/grounded",
    "filter/reward_std",
    "filter/kept_fraction",
    "update/actor_grad_norm",
    "update/clip_fraction",
    "update/ratio_max",
    "health/level",
    "health/distinct_thoughts",
    "time/iteration_seconds",
)

# The identity of a run: sorted arguments of launch/train.py that its figures depend on,
# those of its diagnosis.
Key = tuple[tuple[str, ...], tuple[str, ...]]


# When checkpoints are written, and how many stay, changes none of a run's figures,
# except where it returns to one of them, or they are measured.
_SAVING = ("--config.every.checkpoint=", "--config.checkpoint.")
_ON_COLLAPSE = "--config.health.on_collapse="
_ROLLBACK = f"{_ON_COLLAPSE}rollback"


def key(run: PlannedRun) -> Key:
    """A run's identity: equal for runs of different studies that are the same run."""
    return _key(run.arguments(), run.diagnose, _rolls_back(run))


def key_of(item: dict[str, Any]) -> Key:
    """The key of an entry's run. No config that only a data file names is executed."""
    rolls_back = _ROLLBACK in item["arguments"] or "rolls_back" in item
    return _key(item["arguments"], item["diagnose"], rolls_back)


def _key(arguments: Sequence[str], diagnose: Sequence[str], rolls_back: bool) -> Key:
    if not (rolls_back or diagnose):
        arguments = [a for a in arguments if not a.startswith(_SAVING)]
    return tuple(sorted(arguments)), tuple(diagnose)


def _rolls_back(run: PlannedRun) -> bool:
    """Whether a run may return to a checkpoint, by its arguments or its config."""
    given = [a for a in run.arguments() if a.startswith(_ON_COLLAPSE)]
    return _ROLLBACK in given or (not given and _on_collapse(run.config) == "rollback")


@functools.cache
def _on_collapse(config: str) -> str:
    """What a config says of a collapse; "" where it cannot be read."""
    with contextlib.suppress(UserError, AttributeError, OSError):
        return str(cli.load_config(config).health.on_collapse)
    return ""


def entry(run: PlannedRun, record: RunRecord, curves: Iterable[str]) -> dict[str, Any]:
    """A run, ready for JSON; values of series have six digits."""
    series = {}
    for name in dict.fromkeys((*ARCHIVED_METRICS, *curves)):
        iterations, values = record.series(name)
        if len(values):
            short = [float(f"{value:.6g}") for value in values]
            series[name] = [iterations.tolist(), short]
    item = {
        "arm": run.arm,
        "seed": run.seed,
        "arguments": run.arguments(),
        "diagnose": list(run.diagnose),
        "series": series,
        "test": record.test,
        "diagnoses": list(record.diagnoses),
        "rollbacks": list(record.rollbacks),
    }
    if record.code:
        item["code"] = dict(record.code)
    if _rolls_back(run) and _ROLLBACK not in run.arguments():
        item["rolls_back"] = True  # As the config says.
    return item


def read(pages: Path, own: str = "") -> dict[Key, RunRecord]:
    """The runs in all data files of a folder of pages.

    A run may be in several files. Where it was trained once, its record has the curves
    of all of them; where it was trained twice, it is that of the study's own file, or
    else of the last file by name.

    Args:
      pages: the folder.
      own: name, without its ending, of the data file of the study that asks.

    Raises:
      UserError: for a file that is not a study's data.
    """
    items: dict[Key, dict[str, Any]] = {}
    for path in sorted(pages.glob("*.json"), key=lambda path: (path.stem == own, path)):
        try:
            json_files.check_regular(path)
            data = json.loads(path.read_text(encoding="utf-8"))
            runs = data.get("runs", []) if isinstance(data, dict) else None
            if not isinstance(runs, list):
                raise ValueError("it has no list of runs")
            for number, item in enumerate(runs):
                _check(number, item)
                run_key = key_of(item)
                items[run_key] = _merged(item, items.get(run_key))
                if item["diagnose"]:  # It serves a study that diagnoses nothing, too.
                    plain = key_of({**item, "diagnose": []})
                    items[plain] = _merged(items.get(plain, item), item)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path} is not the data of a study ({record_checks.why(error)}):"
                " move it away, or restore it"
            ) from error
    return {run_key: _record(item) for run_key, item in items.items()}


def _merged(item: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """An entry, with the curves that only another entry of the same training has."""
    if other is None or other["test"] != item["test"]:
        return item
    return {**item, "series": {**other["series"], **item["series"]}}


def entries(path: Path) -> list[dict[str, Any]]:
    """The runs in one data file, as `entry` made them; [] if there is no file.

    Raises:
      UserError: for a file of an older version, which keeps results but no runs.
    """
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    if "runs" not in data:
        raise UserError(
            f"{path} keeps no runs, so a new page would lose its results: move it away"
            " first, or choose another folder with --pages"
        )
    return data["runs"]


_CHECKS: dict[str, Callable[[Any], None]] = {
    "arm": record_checks.check_text,
    "seed": record_checks.check_seed,
    "arguments": record_checks.check_words,
    "diagnose": record_checks.check_words,
    "series": record_checks.check_series,
    "test": record_checks.check_test,
    "diagnoses": record_checks.check_diagnoses,
    "rollbacks": record_checks.check_rollbacks,
    "code": record_checks.check_code,
    "rolls_back": record_checks.check_true,
}
# Older data files have no rollbacks; embedded models without own files no code.
_OPTIONAL = ("rollbacks", "code", "rolls_back")


def _check(number: int, item: Any) -> None:
    """Raises ValueError unless `entry` made the item, whose number it names."""
    if not isinstance(item, dict):
        raise ValueError(f"run {number} is no object")
    for name, check in _CHECKS.items():
        if name in _OPTIONAL and name not in item:
            continue
        try:
            check(item.get(name))
        except ValueError as error:
            raise ValueError(f"{name} of run {number}: {error}") from None


def _record(item: dict[str, Any]) -> RunRecord:
    """The record that `entry` was made from, with the kept metrics alone."""
    rows: dict[int, dict[str, Any]] = {}
    for name, (iterations, values) in item["series"].items():
        for iteration, value in zip(iterations, values, strict=True):
            rows.setdefault(iteration, {"iteration": iteration})[name] = value
    records = [rows[iteration] for iteration in sorted(rows)]
    return RunRecord(
        seed=item["seed"],
        records=records,
        test=item["test"],
        diagnoses=item["diagnoses"],
        rollbacks=item.get("rollbacks", ()),
        code=item.get("code", {}),
    )
