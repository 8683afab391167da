"""Figures of docs/scaling.md that other places repeat or that its tables decide."""

import re

import pytest
from helpers.paths import ROOT

SCALING, PLANNING, README = (
    (ROOT / name).read_text()
    for name in ("docs/scaling.md", "docs/planning.md", "README.md")
)
# Cells of the table of 0.5 B on one GPU to 64, and of that of larger models.
_LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\|.* \+ .*\|$", SCALING, re.MULTILINE)
]
BY_GPUS = {
    tuple(line[:3]): line[3:] for line in _LINES if re.fullmatch(r"[\d,]+", line[1])
}
BY_MODEL = {tuple(line[:2]): line[2:] for line in _LINES if " B" in line[0]}
ONE, EIGHT = ("1", "128", "8"), ("8", "1,024", "64")


def _seconds(cell):
    """Of rollout and update, as in "2.29 + 1.08"."""
    return sum(map(float, cell.split(" + ")))


def test_the_tables_are_found():
    assert len(BY_GPUS) == 6 and len(BY_MODEL) == 5
    assert BY_GPUS[EIGHT] == BY_MODEL["0.5 B", "copies"]


def test_the_plan_that_is_shown_is_the_tables_first_line():
    shown = re.findall(
        r"^ +\d+ +\d+ +\d+ +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)", PLANNING, re.MULTILINE
    )
    assert [" + ".join(each) for each in shown] == BY_GPUS[ONE][:3]
    (worst,) = re.findall(
        r"peak, with the largest addition +([\d,.]+)$", PLANNING, re.MULTILINE
    )
    mebibytes = float(worst.replace(",", ""))
    assert float(BY_GPUS[ONE][-1]) == pytest.approx(mebibytes / 1024, abs=0.05)


def test_the_readme_has_the_time_and_memory_of_its_command():
    seconds, gibibytes = re.search(
        r"takes at least ([\d.]+) s with replies of 150 tokens, and ([\d.]+) GiB",
        " ".join(README.split()),
    ).groups()
    cells = BY_GPUS[EIGHT]
    assert float(seconds) == pytest.approx(_seconds(cells[1]), abs=0.06)
    assert gibibytes == cells[-1]


def test_the_costs_are_those_of_the_tables():
    text = " ".join(SCALING.split("## Cost")[1].split("##")[0].split())
    price = float(re.search(r"At ([\d.]+) USD", text)[1])
    cells = [BY_GPUS[ONE], BY_GPUS["8", "128", "8"]]
    models = [BY_MODEL[size, "sharded"] for size in ("1.5 B", "3 B", "7 B")]
    cells += [BY_GPUS[EIGHT], *models]
    gpus = [1, 8, 8, 8, 8, 8]
    cents = [
        100 * price * count * _seconds(each[1]) / 3600
        for count, each in zip(gpus, cells, strict=True)
    ]
    said = re.search(
        r"costs ([\d.]+) cents on one GPU.*GPUs cost ([\d.]+) cents.* cost ([\d.]+)"
        r" cents at 0.5 B, ([\d.]+) at 1.5 B, ([\d.]+) at 3 B and ([\d.]+) at 7 B",
        text,
    ).groups()
    assert [float(each) for each in said] == pytest.approx(cents, rel=0.03)
