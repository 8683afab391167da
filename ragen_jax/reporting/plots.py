"""Draws curves.png: six small charts of a run, raw values faint, smoothed ones bold."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ragen_jax.utils import atomic_files

REACH = 5  # iterations on either side that are averaged into a smoothed value


class Line(NamedTuple):
    """One metric in a chart."""

    metric: str
    label: str
    color: str
    error: str = ""  # the metric that holds its standard error; drawn as points


class Chart(NamedTuple):
    title: str
    lines: tuple[Line, ...]


_BLUE, _ORANGE, _GREEN = "#1f6fb4", "#d95f02", "#2a8a57"
CHARTS = (
    Chart(
        "Success",
        (
            Line("train/success", "train", _BLUE),
            Line(
                "validation/success",
                "validation",
                _ORANGE,
                "validation/success_standard_error",
            ),
        ),
    ),
    Chart(
        "Return of an episode",
        (
            Line("train/return", "task", _BLUE),
            Line("train/return_with_penalty", "with format penalty", _GREEN),
        ),
    ),
    Chart("Return std in a group", (Line("filter/reward_std", "train", _BLUE),)),
    Chart("Entropy of a reply token", (Line("rollout/entropy", "train", _BLUE),)),
    Chart("Length of a reply", (Line("rollout/reply_tokens", "train", _BLUE),)),
    Chart(
        "Gradient norm",
        (
            Line("update/actor_grad_norm", "actor", _BLUE),
            Line("update/critic_grad_norm", "critic", _GREEN),
        ),
    ),
)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Centred moving mean, without lag.

    s_t = mean of x_(t-h) to x_(t+h), h = min(reach, t, n - 1 - t): near an end the
    window narrows on both sides, so that a straight line is unchanged.

    Args:
      values: float64[n].
      reach: the most values on either side.

    Returns:
      float64[n].
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    half = np.minimum(reach, np.minimum(index, len(values) - 1 - index))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def draw(
    records: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
    units: Mapping[str, str],
) -> None:
    """Draws the charts of a run into a PNG, replacing an older one as a whole.

    Args:
      records: of metrics.jsonl, in order: `iteration` and metrics.
      path: where the picture goes.
      title: the run's name.
      units: of each metric, "1" for none.
    """
    figure = Figure(figsize=(12, 6.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    last = max((record["iteration"] for record in records), default=0)
    # A folder's name need not be UTF-8, but the figure's text must be.
    shown = title.encode(errors="replace").decode()
    text = f"{shown}, iteration {last}"
    # A name with $ is not a formula.
    figure.suptitle(text, x=0.01, ha="left", weight="bold", parse_math=False)
    axes = figure.subplots(2, 3, sharex=True)
    for axis, chart in zip(axes.flat, CHARTS, strict=True):
        drawn = [_draw_line(axis, line, records) for line in chart.lines]
        _dress(axis, chart, units[chart.lines[0].metric], any(drawn))
    axes[0, 0].set_xlim(-0.02 * max(last, 1), 1.02 * max(last, 1))
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    with atomic_files.new_file(path, binary=True) as file:
        figure.savefig(file, format="png")


def _draw_line(axis: Axes, line: Line, records: Sequence[Mapping[str, Any]]) -> bool:
    """Draws one metric, and returns whether there was anything to draw."""
    have = [record for record in records if record.get(line.metric) is not None]
    if not have:
        return False
    iterations = np.array([record["iteration"] for record in have])
    values = np.array([record[line.metric] for record in have], float)
    if line.error:
        errors = np.array([record.get(line.error) or 0.0 for record in have], float)
        axis.errorbar(
            iterations,
            values,
            yerr=errors,
            color=line.color,
            label=f"{line.label} (± standard error)",
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            zorder=3,
        )
        return True
    axis.plot(iterations, values, color=line.color, alpha=0.28, linewidth=0.9)
    axis.plot(
        iterations,
        smooth(values, REACH),
        color=line.color,
        label=line.label,
        linewidth=1.9,
        marker="" if len(values) > 1 else "o",
    )
    return True


def _dress(axis: Axes, chart: Chart, unit: str, drawn: bool) -> None:
    axis.set_title(chart.title, loc="left", fontsize=10.5)
    if unit != "1":
        axis.set_ylabel(unit)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if not drawn:
        axis.text(0.5, 0.5, "no data yet", ha="center", transform=axis.transAxes)
        return
    if chart.title == "Success":
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if len(chart.lines) > 1:
        axis.legend(frameon=False, fontsize=8.5, loc="best")
