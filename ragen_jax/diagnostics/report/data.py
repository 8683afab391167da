"""What the health report shows, gathered from the files of one or several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax import settings as settings_lib
from ragen_jax.diagnostics import alarm, episode_log, rollbacks
from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.utils import json_files, workdir_files
from ragen_jax.utils.finite import finite

# (title, metric) of the charts in order; one that no run has is left out.
CHARTS = (
    ("Success, sampled", "train/success"),
    ("Success, validation", "validation/success"),
    ("Return with penalty", "train/return_with_penalty"),
    ("Return std in a group", "filter/reward_std"),
    ("Entropy of a reply token", "rollout/entropy"),
    ("Length of a reply", "rollout/reply_tokens"),
    ("Length of a thought", "rollout/thought_tokens"),
    ("Gradient norm, actor", "update/actor_grad_norm"),
    ("Valid replies", "rollout/valid_reply_rate"),
    ("Groups without spread", "health/zero_spread_groups"),
    ("Distinct thoughts", "health/distinct_thoughts"),
    ("Most frequent thought", "health/top_thought_share"),
    ("Distinct bigrams of thoughts", "health/distinct_bigrams"),
    ("Overlap within groups", "health/overlap_within"),
    ("Overlap across groups", "health/overlap_across"),
    ("Entropy of the first action", "health/first_action_entropy"),
    ("Thoughts that name the answer", "health/thought_answer_agreement"),
    ("Clip fraction", "update/clip_fraction"),
    ("Explained variance", "update/explained_variance"),
)
# The setting that may differ between the runs of one series.
_SEED = "seed"


def gather(workdirs: Sequence[Path]) -> dict[str, Any]:
    """Everything the page needs, ready for JSON.

    Runs whose settings differ in the seed alone form one series, drawn with a band. A
    folder that is given twice is one run.

    Args:
      workdirs: of the runs; the first is the report's own.

    Raises:
      UserError: if one of them holds no metrics.
    """
    # By their real paths: the same run twice would look like two seeds that agree.
    workdirs = list({path.resolve(): path for path in workdirs}.values())
    runs = [read_run(workdir) for workdir in workdirs]
    for run, name in zip(runs, names_of(workdirs), strict=True):
        run["name"] = name
    series: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        leaves = {k: v for k, v in run["settings"].items() if k != _SEED}
        for one in series:
            if one["settings"] == leaves and leaves:
                one["runs"].append(index)
                break
        else:
            series.append({"settings": leaves, "runs": [index], "name": run["name"]})
    known = {name for run in runs for record in run["records"] for name in record}
    charts = [
        {"title": title, "metric": name, "unit": _unit(name)}
        for title, name in CHARTS
        if name in known
    ]
    return {
        "title": runs[0]["name"],
        "charts": charts,
        "runs": [_shown(run) for run in runs],
        "series": [{"name": s["name"], "runs": s["runs"]} for s in series],
        "differences": differences([run["settings"] for run in runs]),
        "tests": [{"run": run["name"], **row} for run in runs for row in run["tests"]],
        "warnings": [
            f"{run['name']}: {sentence}" for run in runs for sentence in _warnings(run)
        ],
        "episodes": [
            {"run": index, **episode}
            for index, run in enumerate(runs)
            for episode in run["episodes"]
        ],
    }


def names_of(workdirs: Sequence[Path]) -> list[str]:
    """The shortest end of each folder's path that no other folder shares."""
    paths = [workdir.resolve().parts for workdir in workdirs]
    names = []
    for own in paths:
        ends = ("/".join(own[-n:]) for n in range(1, len(own)))
        short = (end for end in ends if sum(_ends_in(p, end) for p in paths) == 1)
        names.append(next(short, "/".join(own)))
    return names


def _ends_in(path: Sequence[str], end: str) -> bool:
    return f"/{'/'.join(path)}".endswith(f"/{end}")


def read_run(workdir: Path) -> dict[str, Any]:
    """One run's records, settings, test table and episodes.

    Raises:
      UserError: if there is no such folder, no metrics in it, or a damaged file.
    """
    records = metrics.read(workdir)
    if not records:
        raise UserError(
            f"{workdir} holds no {metrics.FILE} with an iteration in it: give the"
            " workdir of a run that has finished at least one"
        )
    return {
        "name": workdir.resolve().name,
        "records": records,
        "settings": settings_lib.flatten(_read_json(workdir / workdir_files.SETTINGS)),
        "tests": _tests(workdir / workdir_files.TEST, records),
        # Older logs may hold a reward of NaN, which is not valid JSON.
        "episodes": finite(episode_log.read(workdir)),
        "rollbacks": rollbacks.read_rollbacks(workdir),
    }


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    """A run's columns for the charts, its alarms and its rollbacks.

    The iterations that a rollback discarded, and the alarm in them, are no longer in
    the records; the list of rollbacks is all that tells of them.
    """
    # The record of the final test has no training metrics, and would end a mark.
    trained = [record for record in run["records"] if "train/success" in record]
    records = trained or run["records"]
    names = [name for _, name in CHARTS]
    verdicts = alarm.replay(records)
    levels = [verdict.level for verdict in verdicts]
    sentences = [verdict.sentence for verdict in verdicts]
    return {
        "name": run["name"],
        "iterations": [record["iteration"] for record in records],
        "values": {
            name: [record.get(name) for record in records]
            for name in names
            if any(name in record for record in records)
        },
        "marks": spans([r["iteration"] for r in records], levels, sentences),
        "rollbacks": run["rollbacks"],
    }


def _warnings(run: dict[str, Any]) -> list[str]:
    """What the last table of a run was followed by, unless the run was continued."""
    said = [row.get("warning") for row in run["tests"] if row["iteration"] is not None]
    return [*dict.fromkeys(text for text in said if isinstance(text, str))]


def spans(
    iterations: Sequence[int], levels: Sequence[str], sentences: Sequence[str]
) -> list[dict[str, Any]]:
    """Stretches of iterations at one unhealthy level: first, last, level, why."""
    found: list[dict[str, Any]] = []
    before = alarm.HEALTHY
    for iteration, level, sentence in zip(iterations, levels, sentences, strict=True):
        if level != alarm.HEALTHY and level == before:
            found[-1]["last"] = iteration
        elif level != alarm.HEALTHY:
            found.append(
                {"first": iteration, "last": iteration, "level": level, "why": sentence}
            )
        before = level
    return found


def differences(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings in which runs differ: {"key", "values": one text a run}."""
    keys = sorted({key for one in settings for key in one})
    rows = []
    for key in keys:
        values = [json.dumps(one[key]) if key in one else "-" for one in settings]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


def _tests(path: Path, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of test.json: one for each environment.

    Each says after which iteration it was made. That is None if `records` hold no test:
    a finished run is being continued, and test.json is from its former end.
    """
    record = _read_json(path)
    at = max((r["iteration"] for r in records if "test/success" in r), default=None)
    by_label = {"": record} if {"before", "after"} & record.keys() else record
    for own in by_label.values():
        sides = [
            own.get(x) if isinstance(own, dict) else 0 for x in ("before", "after")
        ]
        if not all(isinstance(side, dict) for side in sides):
            raise _unusable(path, "a result lacks what was before or after training")
    return [{"environment": k, "iteration": at, **own} for k, own in by_label.items()]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is no file.

    Older test.json files may hold NaN, which is not valid JSON, for unknown numbers.
    """
    if not path.exists():
        return {}
    try:
        parsed = json_files.read(path)
    except ValueError:
        raise _unusable(path, "it is no JSON, or was cut off") from None
    if not isinstance(parsed, dict):
        raise _unusable(path, "it is no object")
    return finite(parsed)


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not as a run writes it ({why}): restore it from a copy, or move it"
        " away for a report without it"
    )


def _unit(name: str) -> str:
    try:
        return metrics.describe(name).unit
    except KeyError:
        return "1"
