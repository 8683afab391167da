"""Every metric that a run may write, and the files that it is written to.

WORKDIR/metrics.jsonl is the record, one JSON object an iteration; TensorBoard's events
(WORKDIR/tensorboard) and the picture (WORKDIR/curves.png) are views of the same
numbers.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from ragen_jax.errors import UserError
from ragen_jax.reporting import tensorboard
from ragen_jax.utils import atomic_files, json_files

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PICTURE = "curves.png"
# Raised for a line that is not a record.
_NO_RECORD = (ValueError, KeyError, TypeError, RecursionError, OverflowError)
_PICTURE_SECONDS = 30.0  # least time between two drawings
_PICTURE_SHARE = 0.01  # most of the run's time that drawing may take


class Metric(NamedTuple):
    unit: str  # "1" for a fraction or a pure number
    meaning: str


METRICS: dict[str, Metric] = {
    # The five of RAGEN, arXiv:2504.20073, section 3.
    "train/success": Metric(
        "1", "share of sampled episodes that their environment counts as solved"
    ),
    "rollout/entropy": Metric("nats", "mean entropy of a reply token when sampled"),
    "filter/reward_std": Metric(
        "reward",
        "mean over groups of the sample std of the return, before the filter; with the"
        " format penalty if filter.with_penalty",
    ),
    "rollout/reply_tokens": Metric("tokens", "mean length of a reply"),
    "update/actor_grad_norm": Metric(
        "1", "mean global norm of the actor's gradient before clipping"
    ),
    # Episodes.
    "train/return": Metric("reward", "mean task return of an episode"),
    "train/return_with_penalty": Metric(
        "reward", "mean return of an episode after the format penalty"
    ),
    "train/return_shaped": Metric(
        "reward",
        "that with reward.length_bonus, grounding and hook, before reward.normalize;"
        " with one of the three",
    ),
    "rollout/thought_tokens": Metric(
        "tokens", "mean length of a reply up to the text of its answer"
    ),
    "rollout/grounded": Metric(
        "1", "share of landmarks named correctly in thoughts; with reward.grounding > 0"
    ),
    "rollout/valid_reply_rate": Metric("1", "share of replies that are well formed"),
    "rollout/cut_replies": Metric("1", "share of replies cut at rollout.reply_tokens"),
    "rollout/turns": Metric("turns", "mean turns of an episode"),
    "rollout/actions": Metric("actions", "mean actions of an episode"),
    "rollout/episode_tokens": Metric(
        "tokens", "mean tokens over all rows of an episode; windows overlap"
    ),
    "rollout/utilization": Metric("1", "sampled tokens / (slots x passes)"),
    "rollout/tokens_per_second": Metric(
        "tokens/s", "reply tokens sampled, over all devices"
    ),
    "filter/kept_fraction": Metric(
        "1", "share of groups that the filter kept; within_group: of episodes"
    ),
    # Update: means over its tokens and gradient steps unless said otherwise; null in an
    # iteration that made none.
    "update/policy_loss": Metric("1", "policy loss, without entropy and KL terms"),
    "update/value_loss": Metric("reward^2", "loss of the critic"),
    "update/kl": Metric(
        "nats", "estimated KL from the frozen reference; with a KL term"
    ),
    "update/entropy": Metric("nats", "entropy of the policy being updated"),
    "update/clip_fraction": Metric("1", "share of tokens whose ratio was clipped"),
    "update/approx_kl": Metric("nats", "estimated KL from the policy that sampled"),
    "update/explained_variance": Metric(
        "1", "1 - var(return - value) / var(return), before the update"
    ),
    "update/logprob_gap": Metric(
        "nats",
        "mean |log p of the sampler - log p of the update|, same token and weights",
    ),
    "update/logprob_gap_max": Metric("nats", "largest of those gaps"),
    "update/ratio": Metric(
        "1", "mean ratio to the policy that sampled; with epochs * reuse > 1"
    ),
    "update/ratio_max": Metric("1", "largest of those ratios"),
    "update/policy_lag": Metric(
        "updates", "updates between sampling and the last update on those episodes"
    ),
    "update/critic_grad_norm": Metric(
        "1", "mean global norm of the critic's gradient before clipping"
    ),
    "update/actor_lr": Metric(
        "1", "learning rate of the actor at its last step; 0 before any"
    ),
    "update/count": Metric(
        "updates", "gradient steps made since the start, skipped ones excluded"
    ),
    "update/skipped_nonfinite": Metric(
        "updates", "gradient steps skipped since the start: gradient or step not finite"
    ),
    "update/skipped_empty": Metric(
        "iterations", "iterations without an update since the start: no group was kept"
    ),
    # Health: of the sampled batch before the filter. See docs/diagnostics.md.
    "health/zero_spread_groups": Metric(
        "1",
        "share of groups whose episodes all earned the same; with the format penalty"
        " if filter.with_penalty",
    ),
    "health/distinct_thoughts": Metric("1", "distinct thoughts / thoughts"),
    "health/top_thought_share": Metric("1", "share of the most frequent thought"),
    "health/distinct_bigrams": Metric("1", "distinct bigrams of thoughts / bigrams"),
    "health/overlap_within": Metric(
        "1", "share of thought 4-grams also in another episode of the group"
    ),
    "health/overlap_across": Metric(
        "1", "share of thought 4-grams also in an episode of another group"
    ),
    "health/first_action_entropy": Metric(
        "nats", "entropy of the episodes' first actions"
    ),
    "health/first_action_entropy_in_group": Metric(
        "nats", "mean entropy of the first actions within a group"
    ),
    "health/thought_answer_agreement": Metric(
        "1", "share of thoughts that name the first action of their answer"
    ),
    "health/level": Metric("1", "the alarm: 0 healthy, 1 watch, 2 collapse"),
    "health/signs": Metric("1", "number of series by which the alarm judges so"),
    # Machine.
    "time/rollout_seconds": Metric("s", "wall time of the rollout"),
    "time/update_seconds": Metric("s", "wall time of filter, advantages and update"),
    "time/validation_seconds": Metric("s", "wall time of the validation"),
    "time/iteration_seconds": Metric(
        "s", "wall time of the iteration, evaluation included"
    ),
    "memory/peak_gib": Metric("GiB", "peak memory in use so far, of one device"),
}

EVALUATION: dict[str, Metric] = {
    "success": Metric("1", "share of the fixed episodes that were solved"),
    "success_standard_error": Metric(
        "1", "standard error of success over the fixed prompts"
    ),
    "pass_at_<k>": Metric("1", "share of prompts solved by at least one of k episodes"),
    "pass_at_<k>_standard_error": Metric(
        "1", "standard error of pass@k over the fixed prompts"
    ),
    "return": Metric("reward", "mean task return of an episode"),
    "return_standard_error": Metric(
        "reward", "standard error of return over the fixed prompts"
    ),
    "valid_reply_rate": Metric("1", "share of replies that are well formed"),
    "turns": Metric("turns", "mean turns of an episode"),
    "actions": Metric("actions", "mean actions of an episode"),
    "reply_tokens": Metric("tokens", "mean length of a reply"),
}

# With several environments, `validation/success` is their mean, and each also has its
# own metrics, by its label.
METRICS |= {
    f"{split}/{env}{suffix}": metric
    for split in ("validation", "test")
    for env in ("", "<environment>/")
    for suffix, metric in EVALUATION.items()
}
METRICS |= {
    f"train/<environment>/{suffix}": METRICS.get(f"train/{suffix}")
    or EVALUATION[suffix]
    for suffix in ("success", "return", "valid_reply_rate", "reply_tokens", "turns")
}


def describe(name: str) -> Metric:
    """Unit and meaning of a metric; `pass_at_4` is an instance of `pass_at_<k>`.

    Raises:
      KeyError: when METRICS does not know the name.
    """
    # First, as an environment may be called pass_at_4, too.
    general = re.sub(r"^(train|validation|test)/[\w-]+/", r"\1/<environment>/", name)
    general = re.sub(r"(?<=/pass_at_)[1-9][0-9]*(?=$|_)", "<k>", general)
    if general not in METRICS or "<" in name:
        raise KeyError(
            f"{name!r} is not a documented metric: add it to METRICS in metrics.py"
        )
    return METRICS[general]


class MetricsWriter:
    """Writes a run's metrics; on every process but the writer it does nothing."""

    def __init__(self, workdir: str | Path, *, is_writer: bool, first_iteration: int):
        """Opens the files and drops what they hold from `first_iteration` on.

        Args:
          workdir: folder of the run, made if needed.
          is_writer: whether this process writes: process 0.
          first_iteration: the first that this process may write, one past the
            checkpoint's when a run is resumed.
        """
        self._workdir, self._is_writer = Path(workdir), is_writer
        # A resumed run may still write the test's record, of the iteration before.
        self._last = first_iteration - 1
        if not is_writer:
            return
        self._workdir.mkdir(parents=True, exist_ok=True)
        trim(workdir, first_iteration - 1)
        self._file = self._open()
        events = self._workdir / TENSORBOARD
        self._events = tensorboard.open_events(events, first_iteration)
        self._draw_after = 0.0  # seconds of time.monotonic

    def write(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record: in the file, as a whole line, when this returns.

        Args:
          iteration: finished iterations; 0 is before training. Never falls; results
            that come later for the same iteration make a second line.
          metrics: documented names with numbers (or arrays of one number). A value
            that is not finite is written as null.
        """
        if iteration < self._last:
            raise ValueError(f"{iteration=} comes after {self._last}")
        for name in metrics:
            describe(name)
        self._last = iteration
        if not self._is_writer:
            return
        record = {name: _number(name, value) for name, value in metrics.items()}
        line = json.dumps({"iteration": iteration, **record}, allow_nan=False) + "\n"
        self._reopen_if_replaced()
        _write_all(self._file, line.encode())
        tensorboard.write(self._events, iteration, record)
        if time.monotonic() >= self._draw_after:
            self.draw()

    def sync(self) -> None:
        """Has the disk hold all records so far, also if power is lost."""
        if self._is_writer:
            os.fsync(self._file)

    def _open(self) -> int:
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.open(self._workdir / FILE, append, 0o644)

    def _reopen_if_replaced(self) -> None:
        """What is written to a file that was deleted or replaced would be lost."""
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self._workdir / FILE)
            if os.path.samestat(now, os.fstat(self._file)):
                return
        replaced, self._file = self._file, self._open()
        os.close(replaced)

    def draw(self) -> None:
        """Draws the picture again from the whole record."""
        if not self._is_writer:
            return
        # With Matplotlib, which readers need not.
        from ragen_jax.reporting import plots

        start = time.monotonic()
        units = {name: metric.unit for name, metric in METRICS.items()}
        plots.draw(
            read(self._workdir),
            self._workdir / PICTURE,
            title=self._workdir.resolve().name,
            units=units,
        )
        end = time.monotonic()
        pause = max(_PICTURE_SECONDS, (end - start) / _PICTURE_SHARE)
        self._draw_after = end + pause

    def close(self) -> None:
        """Draws the last picture and closes the files."""
        if not self._is_writer:
            return
        try:
            self.draw()
        finally:
            self._is_writer = False
            os.close(self._file)
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # What ended the block says why.
            self.close()


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """The records of a run in order, as `read_file`; [] where it has written none."""
    path = Path(workdir) / FILE
    return read_file(path) if path.exists() else []


def read_file(path: Path) -> list[dict[str, Any]]:
    """The records in a file; a last line cut short by a kill is left out.

    Raises:
      UserError: when an earlier line is not a record, or it is no regular file.
    """
    try:
        *lines, last = json_files.read_bytes(path).split(b"\n")
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; move it away") from error
    with contextlib.suppress(*_NO_RECORD):  # A whole line without its line feed.
        _record(last)
        lines.append(last)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except _NO_RECORD as error:
            raise UserError(
                f"Line {number} of {path} is not a record of numbers with an"
                " iteration; delete that line."
            ) from error
    return records


def _record(line: bytes) -> dict[str, Any]:
    """The record in a line; raises one of _NO_RECORD if there is none."""
    record = json.loads(line)
    iteration = record["iteration"]
    if type(iteration) is not int or not 0 <= iteration < 2**31:
        raise TypeError("an iteration is a whole number from 0, below 2**31")
    if not all(
        value is None or (type(value) in (int, float) and math.isfinite(value))
        for value in record.values()
    ):
        raise TypeError("a metric is a finite number, or null where it is not known")
    return record


def lacking(workdir: str | Path, iteration: int) -> str:
    """A warning if the file lacks records of iterations up to `iteration`; else ""."""
    there = {record["iteration"] for record in read(workdir)}
    missing = [number for number in range(1, iteration + 1) if number not in there]
    if not missing:
        return ""
    return (
        f"warning: {Path(workdir) / FILE} lacks {len(missing)} of the {iteration}"
        f" finished iterations, the first of them {missing[0]}, as after a loss of"
        " power: curves and reports do without them"
    )


def trim(workdir: str | Path, iteration: int) -> None:
    """Drops the records past `iteration`, which a resumed run will write again.

    The file is replaced as a whole, so that a kill leaves the old one or the new one.
    """
    path = Path(workdir) / FILE
    if not path.exists():
        return
    keep = [record for record in read(workdir) if record["iteration"] <= iteration]
    lines = "".join(json.dumps(record) + "\n" for record in keep)
    if path.read_bytes() == lines.encode():
        return
    with atomic_files.new_file(path) as file:
        file.write(lines)


def _number(name: str, value: Any) -> int | float | None:
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return number if math.isfinite(number) else None


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes in one system call if possible, so that no reader sees half a line."""
    while data:
        data = data[os.write(descriptor, data) :]
