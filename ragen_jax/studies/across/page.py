"""The page of the analyses across studies."""

from pathlib import Path

from ragen_jax.errors import UserError
from ragen_jax.studies.across import (
    budgets,
    claims,
    information,
    power,
    shared_draws,
    signs,
)
from ragen_jax.studies.across.pool import Pool, load
from ragen_jax.utils import atomic_files
from ragen_jax.utils.words import counted

NAME = "across.md"
COMMAND = "python launch/study.py --across"
_SECTIONS = (
    budgets.equal_updates,
    budgets.equal_episodes,
    budgets.equal_learning,
    power.section,
    signs.section,
    shared_draws.section,
    claims.section,
    information.section,
)


def write(root: Path, pages: Path) -> Path:
    """Writes PAGES/across.md from the data files of `pages`; returns its path.

    Args:
      root: the folder of `configs`.
      pages: the folder of pages and data files.

    Raises:
      UserError: where no data file has a run of a study.
    """
    page, pool = pages / NAME, load(root, pages)
    if not pool.runs:
        raise UserError(
            f"--pages={pages} has no data of a study's runs: name the folder that"
            " launch/study.py wrote them to"
        )
    atomic_files.write_text(page, text(pool))
    return page


def text(pool: Pool) -> str:
    """The page's text."""
    seeds = len({run.seed for run in pool.runs})
    studies = sum(bool(runs) for runs in pool.trained.values())
    lines = [
        "# Across the studies",
        "",
        "What the finished runs of all studies say together.",
        "",
        f"    {COMMAND}",
        "",
        f"Read from the data of {studies} studies:"
        f" {counted(len(pool.runs), 'different run')} of {counted(seeds, 'seed')}."
        " Nothing is trained, and every figure is computed by that command.",
        "",
        "**Exploratory.** These analyses were chosen after the data had been seen, and"
        " their intervals are not corrected for their number. They suggest what to ask;"
        " new seeds would have to confirm it. All intervals are 95 %.",
        "",
    ]
    for section in _SECTIONS:
        lines += section(pool)
    return "\n".join(lines)
