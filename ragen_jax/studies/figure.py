"""The figure of a study: a panel for each curve, in a row for each group of arms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from ragen_jax.studies.definition import Study
from ragen_jax.studies.run_record import RunRecord
from ragen_jax.utils import atomic_files

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.ticker import MaxNLocator  # noqa: E402

_MOST_IN_A_PANEL = 5  # arms; more are hard to tell apart
_MOST_IN_A_LEGEND = 3  # arms; the legend of more stands beside the panel
_MOST_TIMES = 5  # by which panels with one axis differ in their highest values
_DASHES = ("-", "--", ":", "-.")  # The next style after every ten arms (ten colours).
Runs = Mapping[str, Sequence[RunRecord]]


def mean_curve(
    series: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """(iterations, mean over the series); NaN before one has begun or after its end.

    Args:
      series: (int[n], float[n]), iterations and values of each run, n at least 1.
        Between its iterations a series is interpolated linearly.
    """
    iterations = np.unique(np.concatenate([own for own, _ in series]))
    curves = [
        np.interp(iterations, own, values, left=np.nan, right=np.nan)
        for own, values in series
    ]
    return iterations, np.mean(curves, axis=0)


def rows_of(arms: Sequence[str]) -> dict[str, list[str]]:
    """The rows of panels: title -> arms.

    More than five arms are grouped by their names up to the last comma ("Bandit, PPO"
    of "Bandit, PPO, 25 %"), or else up to the first, if that makes at least two rows of
    at least two arms each. Otherwise all are in one row without a title.
    """
    for partition in (str.rpartition, str.partition):
        rows: dict[str, list[str]] = {}
        for arm in arms:
            before, comma, _ = partition(arm, ", ")
            rows.setdefault(before if comma else "", []).append(arm)
        is_clearer = len(rows) > 1 and all(len(row) > 1 for row in rows.values())
        if len(arms) > _MOST_IN_A_PANEL and is_clearer:
            return rows
    return {"": list(arms)}


def draw(study: Study, runs: Runs, path: Path) -> bool:
    """Draws the mean over seeds and each seed's curve, by iteration, into a PNG.

    Returns whether there was anything to draw.
    """
    runs = {arm: records for arm, records in runs.items() if records}
    names = [
        name
        for name in study.curves
        if any(len(r.series(name)[0]) for records in runs.values() for r in records)
    ]
    if not names:
        return False
    # By all planned arms, trained or not: rows stay the same as runs finish, and the
    # arms at one place of each row have the same colour.
    planned = rows_of(list(study.arms))
    styles = {
        arm: (f"C{index % 10}", _DASHES[index // 10 % len(_DASHES)])
        for arms in planned.values()
        for index, arm in enumerate(arms)
    }
    rows = {
        title: drawn
        for title, arms in planned.items()
        if (drawn := [arm for arm in arms if arm in runs])
    }
    if len(rows) > 1:
        height, width = len(rows), len(names)
    else:
        width = 2 if len(names) == 4 else min(3, len(names))
        height = -(-len(names) // width)
    figure, grid = plt.subplots(
        height, width, figsize=(5.2 * width, 3.6 * height), squeeze=False
    )
    if len(rows) > 1:
        for axes, (title, arms) in zip(grid, rows.items(), strict=True):
            _draw_row(axes, names, {arm: runs[arm] for arm in arms}, styles, title)
        for column in grid.T:  # The panels of one curve are to be compared.
            _align_limits(column)
    else:
        _draw_row(grid.flat, names, runs, styles, "")
    figure.tight_layout()
    with atomic_files.new_file(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return True


def _draw_row(
    panels: Any,
    names: Sequence[str],
    runs: Runs,
    styles: Mapping[str, tuple[str, str]],
    title: str,
) -> None:
    """Draws each curve in a panel; a panel that is left over takes the legend."""
    axes, free = panels[: len(names)], panels[len(names) :]
    lines: dict[str, Any] = {}  # One line per arm for the legend, of any curve.
    for axis, name in zip(axes, names, strict=True):
        for arm, records in runs.items():
            color, dashes = styles[arm]
            series = [r.series(name) for r in records]
            series = [(x, y) for x, y in series if len(x)]
            for x, y in series:
                axis.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
            if series:
                x, y = mean_curve(series)
                lines[arm] = axis.plot(x, y, dashes, color=color, linewidth=1.8)
        axis.set_title(f"{title}: {name}" if title else name, fontsize=10)
        axis.set_xlabel("iteration")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.grid(alpha=0.3)
    shown = [arm for arm in runs if arm in lines]
    legend = [lines[arm][0] for arm in shown], shown
    if len(free):
        free[0].legend(*legend, fontsize=10, loc="center left", frameon=False)
    elif len(shown) > _MOST_IN_A_LEGEND:
        axes[-1].legend(*legend, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    else:
        axes[-1].legend(*legend, fontsize=8)
    for axis in free:
        axis.axis("off")


def _align_limits(column: Any) -> None:
    """Gives the panels of one curve the same axes, wide enough for each.

    Values more than `_MOST_TIMES` as high as another panel's would make a flat line of
    that: then each panel keeps its own y axis. Empty panels, whose axes are 0 to 1, do
    not count.
    """
    filled = [axis for axis in column if axis.lines] or column
    for side in ("xlim", "ylim"):
        limits = np.array([axis.properties()[side] for axis in filled])
        highest = np.abs(limits).max(axis=1)
        if side == "ylim" and highest.max() > _MOST_TIMES * highest.min():
            continue
        low, high = limits[:, 0].min(), limits[:, 1].max()
        # A panel with a small range has a small margin of its own.
        margin = 0.03 * (high - low) if len(filled) > 1 else 0.0
        for axis in column:
            axis.set(**{side: (low - margin, high + margin)})
