"""Whether success on validation levels has fallen from its best.

Training success can stay high on levels that recur while the policy gets worse on new
ones; the series of training then show nothing (docs/echo_trap.md). So the alarm also
watches validation: success has declined if it lies, TIMES validations in a row, below
its best by more than MARGIN and by more than ERRORS standard errors of the difference.
All validations play the same levels, so the true error is smaller; but the best of many
validations is too high by chance, hence three errors and a second validation.
"""

import dataclasses
import math
from collections.abc import Mapping

SUCCESS = "validation/success"
ERROR = "validation/success_standard_error"
MARGIN = 0.1  # of success: a smaller fall does not matter
ERRORS = 3.0  # standard errors of the difference from the best
TIMES = 2  # validations in a row


@dataclasses.dataclass(frozen=True)
class Record:
    """What is remembered of a run's validations."""

    best: float = -1.0  # highest success; below 0: not validated yet
    best_error: float = 0.0  # its standard error
    best_at: int = 0  # iteration, the later of equals
    last: float = -1.0  # success of the newest validation
    low: int = 0  # validations in a row that lay too far below the best

    @property
    def is_decline(self) -> bool:
        """Whether success has declined, by the rule above."""
        return self.low >= TIMES

    @property
    def sentence(self) -> str:
        """The decline, for a person."""
        return (
            f"{SUCCESS} fell from {self.best:.1%} (iteration {self.best_at}) to"
            f" {self.last:.1%}, whatever training shows"
        )


def update(
    record: Record, iteration: int, metrics: Mapping[str, float | None]
) -> Record:
    """The next record; the same one in an iteration without validation.

    Args:
      record: after the iteration before; `Record()` at first.
      iteration: finished iterations.
      metrics: by name. Success without a standard error, as of a single level, is never
        too low: nothing tells its fall from chance.
    """
    success = metrics.get(SUCCESS)
    if success is None or not math.isfinite(success):
        return record
    error = metrics.get(ERROR)
    is_known = error is not None and math.isfinite(error)
    error = error if is_known else 0.0  # A checkpoint's JSON has no infinity.
    if success >= record.best:  # Of equals the later, whose checkpoint is kept.
        return Record(success, error, iteration, success)
    if not is_known:
        return dataclasses.replace(record, last=success, low=0)
    limit = max(MARGIN, ERRORS * math.hypot(error, record.best_error))
    low = record.low + 1 if record.best - success > limit else 0
    return dataclasses.replace(record, last=success, low=low)
