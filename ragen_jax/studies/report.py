"""Writes the page of a study (question, verdicts, table, figure) and its data file."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.studies import measures
from ragen_jax.studies.definition import Claim, Study, arms_at, changes_at, config_at
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.studies.statistics import Interval, interval
from ragen_jax.studies.verdicts import Verdict, corrected, judge
from ragen_jax.utils import atomic_files

_LEAST_P_SHOWN = 0.001  # A smaller p is said to be below it.


@dataclasses.dataclass(frozen=True)
class _Results:
    """What the finished runs of a study say."""

    study: Study
    scale: str
    counts: Mapping[str, int]  # finished runs of each arm
    table: Mapping[str, Mapping[str, Interval]]  # arm -> measure -> mean over seeds
    verdicts: Sequence[Verdict]
    failed: Mapping[str, str]  # label of a run -> why it failed


def write(
    study: Study,
    runs: Mapping[str, Sequence[RunRecord]],
    failed: Mapping[str, str],
    folder: Path,
    *,
    command: str,
    scale: str,
    entries: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Writes FOLDER/NAME.md, NAME.png and NAME.json, and returns the page's path.

    Args:
      study: the definition.
      runs: arm -> finished runs, an empty list for an arm without one.
      failed: label -> reason, of the runs that failed.
      folder: where pages are.
      command: the one that trains these runs and makes this page.
      scale: of the runs.
      entries: the runs as `archive.entry` makes them.
    """
    from ragen_jax.studies import figure  # With Matplotlib, which --list need not.

    folder.mkdir(parents=True, exist_ok=True)
    name = study.name if scale == "tiny" else f"{study.name}-{scale}"
    results = _Results(
        study=study,
        scale=scale,
        counts={arm: len(records) for arm, records in runs.items()},
        table={
            arm: {m: interval(records, m) for m in study.measures}
            for arm, records in runs.items()
        },
        verdicts=[judge(claim, runs) for claim in study.claims],
        failed=failed,
    )
    has_figure = figure.draw(study, runs, folder / f"{name}.png")
    atomic_files.write_text(folder / f"{name}.json", _json(_data(results), entries))
    page = folder / f"{name}.md"
    curves = []
    if has_figure:
        curves = [f"![curves]({name}.png)", "", *_missing_curves(study, runs)]
    text = _page(results, command, folder, curves, f"{name}.json")
    atomic_files.write_text(page, text)
    return page


def _said_in(file: str, what: str, folder: Path) -> str:
    """Where something is explained, as a link if that file is beside the page.

    Pages may be written to any folder (--pages); the files are beside some alone.
    """
    if (folder / file).is_file():
        return f"([{what}]({file}))"
    return f"({what}: docs/studies/{file} of ragen_jax)"


def _page(
    results: _Results, command: str, folder: Path, curves: Sequence[str], data: str
) -> str:
    """The page's text.

    Args:
      results: of the study.
      command: the one that makes them.
      folder: of the page.
      curves: lines that show the figure; none without one.
      data: name of the data file.
    """
    study, scale, counts = results.study, results.scale, results.counts
    lines = [f"# {study.name.replace('_', ' ')}", "", study.question, ""]
    lines += [f"Source: {study.source}.", "", "    " + command, ""]
    if study.notes:
        lines += [study.notes, ""]
    changed = {**study.changes, **changes_at(scale, study)}
    settings = ", ".join(f"`{k}={v}`" for k, v in changed.items()) or "as in the config"
    config = config_at(scale, study.config)
    lines += [
        f"Settings of all runs, where no arm says otherwise: `{config}` with"
        f" {settings}.",
        "",
    ]
    lines += [
        *_claims(results.verdicts, counts),
        "## Figures",
        "",
        *_table(results),
        "",
    ]
    lines += [
        "Mean over seeds with a 95 % bootstrap interval over seeds, and over test"
        " levels where the measure has them: too narrow for few seeds, for which claims"
        " give Student's t beside it"
        f" {_said_in('README.md', 'how they are judged', folder)}.",
        "",
    ]
    lines += [f"* `{m}`: {_meaning(m)}" for m in study.measures]
    if any(m.endswith("_lead") for m in study.measures):
        where = _said_in("across.md", "that", folder)
        lines += [
            "",
            "A lead is of runs that fell: it does not say how often the same sign comes"
            f" without a fall {where}.",
        ]
    lines += ["", *curves, "## Arms", ""]
    for arm, changes in arms_at(scale, study).items():
        settings = ", ".join(f"`{k}={v}`" for k, v in changes.items()) or "no change"
        runs = "1 run" if counts[arm] == 1 else f"{counts[arm]} runs"
        lines.append(f"* **{arm}**: {settings}; {runs} finished")
    if results.failed:
        lines += ["", "Failed and left out:", ""]
        lines += [f"* {label}: {reason}" for label, reason in results.failed.items()]
    return "\n".join([*lines, "", f"Data: [{data}]({data}).", ""])


def _missing_curves(study: Study, runs: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """A line for each curve that finished runs lack, and an empty one after them.

    Such as runs from the data of another study, which kept other metrics.
    """
    lines = []
    for curve in study.curves:
        arms = []
        for arm, records in runs.items():
            lack = sum(not len(record.series(curve)[1]) for record in records)
            if lack:
                arms.append(f"{arm} ({lack} of {len(records)})")
        if arms:
            lines.append(f"* without a `{curve}`: {', '.join(arms)}")
    return ["Runs that lack a curve:", "", *lines, ""] if lines else []


def _claims(verdicts: Sequence[Verdict], counts: Mapping[str, int]) -> list[str]:
    """Each claim with its verdict; claims that lack runs come last, as a list."""
    lines, waiting = ["## Claims", ""], []
    for verdict in verdicts:
        claim = verdict.claim
        arms = [claim.left] if claim.right is None else [claim.left, claim.right]
        if missing := [arm for arm in arms if not counts[arm]]:
            waiting.append(f"* {claim.text} (no run of {' and '.join(missing)})")
        else:
            lines += [f"* {claim.text}", f"  **{_sentence(verdict)}**", ""]
    lines += _after_holm(verdicts)
    if waiting:
        lines += ["Not judged, for want of runs:", "", *waiting, ""]
    if not verdicts:
        lines += ["None: this study measures.", ""]
    return lines


def _after_holm(verdicts: Sequence[Verdict]) -> list[str]:
    """A line on what is left of the verdicts if a page's claims are one family."""
    count, decided, remaining = corrected(verdicts)
    if count < 2:
        return []
    said = "none holds or does not hold, even without Holm's correction"
    if decided:
        hold = "holds or does" if decided == 1 else "hold or do"
        said = (
            f"{decided} {hold} not hold, of which Holm's correction over this page"
            f" leaves {remaining}"
        )
    return [f"Of {count} claims with a t interval, {said}.", ""]


def _sentence(verdict: Verdict) -> str:
    """A verdict with the numbers that it was read from."""
    claim, quantity = verdict.claim, verdict.quantity
    if not quantity.seeds:
        where = claim.left if claim.right is None else "both arms"
        return f"not judged: no seed has a {claim.measure} in {where} (see below)"
    what, is_difference = f"{claim.measure} of {claim.left}", claim.right is not None
    if is_difference:
        what += f" minus that of {claim.right}"
    unit = _unit(claim.measure, is_difference=is_difference)
    student = dataclasses.replace(quantity, low=quantity.t_low, high=quantity.t_high)
    limits = _limits(student, claim.measure)
    by_t = f", by t {limits}" if limits else ""
    return (
        f"{verdict.verdict}: {what} is {_shown(quantity, claim.measure, unit)}"
        f"{by_t} ({_seeds(quantity)});"
        f" claimed {claim.relation} than {_margin(claim, unit)}{_p(verdict)}"
    )


def _p(verdict: Verdict) -> str:
    """As ", p = 0.04"; "" without one."""
    if math.isnan(verdict.p):
        return ""
    is_tiny = verdict.p < _LEAST_P_SHOWN
    return f", p < {_LEAST_P_SHOWN}" if is_tiny else f", p = {verdict.p:.2g}"


def _margin(claim: Claim, unit: str) -> str:
    """A claim's margin in the unit of its quantity; 0 has no unit."""
    if not claim.margin or not _is_share(claim.measure):
        return f"{claim.margin:g}"
    return f"{100 * claim.margin:g}{unit}"


def _unit(measure: str, *, is_difference: bool = False) -> str:
    """As " %", of a change or a difference of shares " points"; "" for no unit."""
    facts, _ = measures.parse(measure)
    if facts is None or not facts.is_share:
        return ""
    return " points" if is_difference or facts.is_change else " %"


def _shown(value: Interval, measure: str, unit: str | None = None) -> str:
    """Mean and interval of a measure, in its own unit or another."""
    if math.isnan(value.mean):
        return "not measured"
    unit = _unit(measure) if unit is None else unit
    limits = _limits(value, measure) or "(no interval)"
    return f"{_number(value.mean, measure)}{unit} {limits}"


def _limits(value: Interval, measure: str) -> str:
    """The interval in brackets; "" without one."""
    if math.isnan(value.low):
        return ""
    return f"[{_number(value.low, measure)}, {_number(value.high, measure)}]"


def _number(value: float, measure: str) -> str:
    factor, digits = (100, 1) if _is_share(measure) else (1, 3)
    # Adding 0 makes a rounded -0.0 a 0.0.
    return f"{round(value * factor, digits) + 0.0:.{digits}f}"


def _is_share(measure: str) -> bool:
    facts, _ = measures.parse(measure)
    return facts is not None and facts.is_share


def _meaning(measure: str) -> str:
    facts, environment = measures.parse(measure)
    assert facts is not None
    return f"{facts.meaning}, on {environment}" if environment else facts.meaning


def _table(results: _Results) -> list[str]:
    counts, names = results.counts, results.study.measures
    head = ["arm", "seeds", *names]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    if not any(counts.values()):
        return ["No run has finished yet."]
    for arm, row in results.table.items():
        if not counts[arm]:
            continue
        cells = [_cell(row[m], m) for m in names]
        lines.append("| " + " | ".join([arm, str(counts[arm]), *cells]) + " |")
    return lines


def _cell(value: Interval, measure: str) -> str:
    """As `_shown`, with the number of seeds if some lack the measure."""
    some = value.seeds and value.left_out
    return _shown(value, measure) + (f", {_seeds(value)}" if some else "")


def _seeds(value: Interval) -> str:
    """As "3 seeds", or "2 of 3 seeds" if one lacks the measure."""
    given = value.seeds + value.left_out
    measured = f"{value.seeds} of " if value.left_out else ""
    return f"{measured}{given} {'seed' if given == 1 else 'seeds'}"


def _data(results: _Results) -> dict[str, Any]:
    study, scale = results.study, results.scale

    def plain(value: Interval) -> dict[str, Any]:
        values = dataclasses.asdict(value)
        return {
            k: None if isinstance(v, float) and math.isnan(v) else v
            for k, v in values.items()
        }

    return {
        "study": study.name,
        "scale": scale,
        "arms": arms_at(scale, study),
        "failed": list(results.failed),
        "measures": {
            arm: {m: plain(v) for m, v in row.items()}
            for arm, row in results.table.items()
        },
        "claims": [
            {
                "claim": v.claim.text,
                "verdict": v.verdict,
                "measure": v.claim.measure,
                "quantity": plain(v.quantity),
                "p": None if math.isnan(v.p) else v.p,
            }
            for v in results.verdicts
        ],
    }


def _json(data: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Indented JSON, but with one line for each run."""
    runs = ",\n  ".join(json.dumps(entry) for entry in entries)
    head = json.dumps(data, indent=1).rstrip().removesuffix("}").rstrip()
    return f'{head},\n "runs": [\n  {runs}\n ]\n}}\n'
