"""Silence for what libraries print about things that are already told."""

import logging
import sys
from typing import Any


def ignore_abandoned_reads() -> None:
    """Keeps the reads that a failed one leaves behind from printing tracebacks.

    Orbax starts all reads at once and closes its event loop at the first error. Each
    later one finds the loop closed, or fails with nobody to tell, and says so on
    standard error at any time after.
    """
    previous = sys.unraisablehook
    if getattr(previous, "ignores_abandoned_reads", False):
        return

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    def has_a_reader(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return "tensorstore_spec" not in str(error)

    hook.ignores_abandoned_reads = True
    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(has_a_reader)
