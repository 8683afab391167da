"""The metrics of a run as TensorBoard reads them."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2


def open_events(folder: Path, first_iteration: int) -> EventsWriter:
    """A new events file, which hides what earlier ones hold from an iteration on.

    It is written in the caller's thread. tensorboardX's `SummaryWriter` has a thread of
    its own, which dies if the disk is full, and then `add` blocks for ever.
    """
    folder.mkdir(exist_ok=True)
    # The name's end keeps two processes that start within one second apart.
    name_end = f".{os.getpid()}.{first_iteration}"
    events = EventsWriter(str(folder / "events"), name_end)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    events.write_event(
        event_pb2.Event(wall_time=time.time(), step=first_iteration, session_log=start)
    )
    return events


def write(
    events: EventsWriter, iteration: int, record: Mapping[str, float | None]
) -> None:
    """Adds an iteration's numbers, without those that are not known."""
    values = [
        summary_pb2.Summary.Value(tag=name, simple_value=value)
        for name, value in record.items()
        if value is not None
    ]
    summary = summary_pb2.Summary(value=values)
    events.write_event(
        event_pb2.Event(wall_time=time.time(), step=iteration, summary=summary)
    )
    events.flush()
