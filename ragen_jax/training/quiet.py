"""Silences messages of libraries about errors that are reported elsewhere."""

import logging
import sys
from typing import Any


def ignore_abandoned_parts() -> None:
    """Silences the reads, or writes, that are still under way when one has failed.

    Orbax starts all of them at once and closes its event loop at the first error. Each
    other one then finds the loop closed, or fails with nobody awaiting it, and prints
    that to standard error at some later time.
    """
    previous = sys.unraisablehook
    if getattr(previous, "ignores_abandoned_parts", False):
        return

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    def has_an_owner(record: logging.LogRecord) -> bool:
        # The loops of this process are Orbax's.
        return "exception was never retrieved" not in record.getMessage()

    hook.ignores_abandoned_parts = True
    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(has_an_owner)


def ignore_what_is_reported() -> None:
    """Silences Orbax's tracebacks of failed saves, and an irrelevant warning.

    A failed save is raised where it is waited for, and reported in a sentence. And at
    each save Orbax warns that there are no OCDBT files to merge, whatever the format.
    """
    logger = logging.getLogger("absl")
    if not any(is_news is _is_news for is_news in logger.filters):
        logger.addFilter(_is_news)


_OLD_NEWS = (
    "Skipping merge of OCDBT",
    "_SignalingThread.run() raised an exception",
    "Handler Commit operations or the Commit callback",
    "Failed to write metadata=",
)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is to be printed."""
    return not any(known in str(record.msg) for known in _OLD_NEWS)
