"""A plot of series that the alarm watches, shaded where it said "watch" or "collapse".

  python -m ragen_jax.diagnostics.picture runs/bandit/metrics.jsonl bandit.png

See docs/echo_trap.md.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Before transformers is imported, as in ragen_jax/cli/__init__.py.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import matplotlib

from ragen_jax.diagnostics import alarm
from ragen_jax.diagnostics.report.data import spans
from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.utils import atomic_files

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

PANELS = {
    "train/success": "success (share of episodes)",
    "filter/reward_std": "in-group standard deviation",
    "rollout/entropy": "entropy (nats a token)",
    "update/actor_grad_norm": "gradient norm",
    "rollout/valid_reply_rate": "valid replies (share)",
    "health/distinct_thoughts": "different thoughts (share)",
}
FORMATS = (".png", ".svg", ".pdf")
COLORS = {alarm.WATCH: "#f2d16b", alarm.COLLAPSE: "#e58a7b"}


def draw(records: Sequence[Mapping[str, Any]], path: str | Path) -> list[dict]:
    """Writes the picture and returns what the alarm said: first, last, level, why.

    Args:
      records: of metrics.jsonl, iterations that trained alone.
      path: of the picture, in a folder that exists; the suffix is the format.
    """
    path = Path(path)
    verdicts = alarm.replay(records)
    iterations = [record["iteration"] for record in records]
    levels = [verdict.level for verdict in verdicts]
    found = spans(iterations, levels, [verdict.sentence for verdict in verdicts])
    figure, axes = plt.subplots(2, 3, figsize=(11, 5), sharex=True)
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        axis.plot(iterations, [record.get(name) for record in records], linewidth=1)
        for span in found:
            color = COLORS[span["level"]]
            axis.axvspan(
                span["first"] - 0.5, span["last"] + 0.5, color=color, alpha=0.5
            )
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    figure.tight_layout()
    with atomic_files.new_file(path, binary=True) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=110)
    plt.close(figure)
    return found


def main(arguments: Sequence[str]) -> None:
    """Draws a picture.

    Args:
      arguments: of the command line: a metrics.jsonl, and the picture to write.
    """
    if len(arguments) != 2 or not Path(arguments[0]).is_file():
        raise UserError(
            "give the path of a run's metrics.jsonl, then that of the picture to write"
        )
    path = Path(arguments[1])
    if path.suffix not in FORMATS or not path.absolute().parent.is_dir():
        raise UserError(
            f"a picture cannot be written to {path}: name a file in a folder that"
            f" exists, ending in {', '.join(FORMATS)}"
        )
    records = metrics.read_file(Path(arguments[0]))
    trained = [record for record in records if "train/success" in record]
    if not trained:
        raise UserError(
            f"{arguments[0]} holds no training iteration: give that of another run"
        )
    found = draw(trained, path)
    for span in found:
        print(f"iterations {span['first']} to {span['last']}: {span['why']}")
    if not found:
        print("the alarm stayed silent")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
