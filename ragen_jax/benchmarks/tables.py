"""Prints tables of figures as they become known."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ragen_jax.utils import endings


def show(title: str, figures: dict) -> None:
    """Prints a title and a line for each figure, which is a number or a text."""
    print(title)
    for name, value in figures.items():
        shown = value if isinstance(value, str) else f"{value:14,.3f}"
        print(f"  {name:44s} {shown}", flush=True)


def shown(measure: Callable[[Path], Iterator[tuple[str, dict]]]) -> dict[str, dict]:
    """Prints each table that `measure` yields, and returns them all by title.

    Args:
      measure: takes a scratch folder and yields (title, figures).
    """
    report = {}
    with endings.temporary_folder("benchmark.") as scratch:
        for title, figures in measure(scratch):
            report[title] = figures
            show(title, figures)
    return report
