"""Figures of studies, where they are summed up, are those of their pages and data."""

import json
import re

from helpers.paths import CONFIGS, ROOT

from ragen_jax.studies import definition

RESULTS = (ROOT / "docs" / "results.md").read_text()
STUDIES = ROOT / "docs" / "studies"
_NUMBER = r"(-?\d+\.\d)"
# As in "4.2 below to 2.7 above", but not a range of shares, which ends in " %".
_INTERVAL = re.compile(rf"{_NUMBER}(?: [a-z]+)? to {_NUMBER}\b(?! %)")


def _sizes(pairs):
    """Intervals without their signs, which depend on what is taken from what."""
    return {tuple(sorted(number.lstrip("-") for number in pair)) for pair in pairs}


def test_every_interval_of_a_studys_summary_stands_on_its_page():
    checked = 0
    for paragraph in RESULTS.split("\n\n"):
        names = re.findall(r"\[(?:page|computed)\]\(studies/(\w+)\.md", paragraph)
        pages = [STUDIES / f"{name}.md" for name in names]
        text = "".join(page.read_text() for page in pages)
        # Welch's t compares arms of different numbers of seeds, which no page does.
        summary = re.sub(r"Welch's t [\d.]+ to [\d.]+", "", " ".join(paragraph.split()))
        within = re.findall(r"\(([^()]*)\)", summary if names else "")
        found = _sizes(_INTERVAL.findall("; ".join(within)))
        assert found <= _sizes(re.findall(rf"\[{_NUMBER}, {_NUMBER}\]", text)), names
        checked += len(found)
    assert checked > 45


def test_the_table_of_studies_counts_the_runs_planned_and_trained():
    table = (STUDIES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\].* \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    expected = []
    for path in (CONFIGS / "studies").glob("*.py"):
        planned = len(definition.planned_runs(definition.load(path)))
        data = STUDIES / f"{path.stem}.json"
        trained = len(json.loads(data.read_text())["runs"]) if data.exists() else 0
        expected.append((path.stem, str(planned), str(trained)))
    assert sorted(rows) == sorted(expected)


def test_a_studys_data_hold_the_claims_of_its_config():
    for path in (CONFIGS / "studies").glob("*.py"):
        data = json.loads((STUDIES / f"{path.stem}.json").read_text())
        claims = [claim.text for claim in definition.load(path).claims]
        assert [held["claim"] for held in data["claims"]] == claims, path.stem
