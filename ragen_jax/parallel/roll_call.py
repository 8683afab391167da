"""The roll call of a run's processes: who is missing or does not fit, by name."""

import contextlib
import dataclasses
import json
import re
import socket
import sys
import time
from collections.abc import Mapping

from ragen_jax.errors import ProcessAbsent, UserError
from ragen_jax.parallel import facts as facts_lib

_ALL_HERE = "all are here"
_ABSENT = "absent: "  # begins the verdict that not all of them came
_LATE_SECONDS = 10.0  # after a misfit, for later processes to hear of it too
_NOTICE_SECONDS = 15.0  # of waiting, before a line says for whom
_LONGEST_LINE = 1 << 20  # bytes of a line between two processes
_MOST_PROCESSES = 2**16  # A larger number is a typing error.


@dataclasses.dataclass(frozen=True)
class Place:
    """One process among those of a run."""

    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int  # from 0
    devices: tuple[int, ...] | None = None  # of its host; None: all that it sees


def host_and_port(coordinator: str) -> tuple[str, int]:
    """The two parts; port 0 where there is none. An IPv6 host loses its brackets."""
    match = re.fullmatch(r"(.+):(\d{1,5})", coordinator)
    return (match[1].strip("[]"), int(match[2])) if match else (coordinator, 0)


def checked(place: Place) -> Place:
    """The place as the flags give it. Raises UserError if it is not possible."""
    _, port = host_and_port(place.coordinator)
    if not 0 < port < 2**16:
        raise UserError(
            f"--coordinator={place.coordinator} is not HOST:PORT: give process 0's host"
            " and a free port there, such as node1:29400"
        )
    if place.processes < 1 or not 0 <= place.process < place.processes:
        raise UserError(
            f"--process={place.process} of --processes={place.processes} is not"
            " possible: number the processes from 0 to one less than their number"
        )
    if place.processes > _MOST_PROCESSES:
        raise UserError(
            f"--processes={place.processes} is more than {_MOST_PROCESSES}: give the"
            " number of processes that are started"
        )
    return place


def call_roll(
    place: Place,
    seconds: float,
    facts: Mapping[str, str] | None = None,
    heartbeat_port: int = 0,
) -> int:
    """Returns in every process once all are connected.

    Process 0 listens at the coordinator's port; the others name themselves to it and
    wait for its verdict, which is the same for all. The port is free again afterwards.

    Args:
      place: of this process.
      seconds: in which all of them have to connect.
      facts: what all processes must have in common.
      heartbeat_port: where process 0 listens for heartbeats; read of process 0 alone.

    Returns:
      The heartbeat port, in every process.

    Raises:
      ProcessAbsent: naming who did not come within `seconds`.
      UserError: what does not fit.
    """
    if place.process == 0:
        verdict = _gather(place, seconds, facts or {}, heartbeat_port)
    else:
        verdict = _report_to_first(place, seconds, facts or {})
    if not verdict.startswith(_ALL_HERE):
        if verdict.startswith(_ABSENT):
            raise ProcessAbsent(verdict.removeprefix(_ABSENT))
        raise UserError(verdict)
    return int(verdict.removeprefix(_ALL_HERE))


def _gather(
    place: Place, seconds: float, facts: Mapping[str, str], heartbeat_port: int
) -> str:
    """Process 0's part: waits for all others, and sends them the verdict."""
    port = host_and_port(place.coordinator)[1]
    deadline = time.monotonic() + seconds
    notice = min(deadline, time.monotonic() + _NOTICE_SECONDS)
    present: set[int] = set()
    callers: list[socket.socket] = []
    verdict = ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(listen(port))
        except OSError as error:
            return (
                f"port {port} of --coordinator={place.coordinator} cannot be opened by"
                f" process 0 ({error.strerror}): give all processes another port"
            )
        while len(callers) < place.processes - 1:
            until = min(notice, deadline)
            server.settimeout(max(0.001, until - time.monotonic()))
            try:
                connection = stack.enter_context(server.accept()[0])
                greeting = _read_line(connection, 5.0)
            except TimeoutError:
                if time.monotonic() < deadline:
                    if notice < deadline and not verdict:
                        _say_waiting(place, _missing(place, present), seconds)
                        notice = deadline
                    continue
                verdict = verdict or _absent(place, present, seconds)
                break
            except OSError:
                continue  # It has disconnected.
            match = re.fullmatch(r"ragen_jax (\d+) of (\d+)( \{.*\})?", greeting)
            if match is None:
                continue  # Not a process of ragen_jax.
            callers.append(connection)
            if verdict:
                continue  # It gets the same verdict as all.
            process, processes = int(match[1]), int(match[2])
            verdict = _misfit(place, present, process, processes)
            verdict = verdict or facts_lib.difference(process, _read(match[3]), facts)
            present.add(process)
            if verdict:
                deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
        verdict = verdict or f"{_ALL_HERE} {heartbeat_port}"
        for connection in callers:
            with contextlib.suppress(OSError):
                connection.sendall(f"{verdict}\n".encode())
    return verdict


def _absent(place: Place, present: set[int], seconds: float) -> str:
    """Who is missing, once the time is over."""
    return (
        f"{_ABSENT}{_missing(place, present)} of {place.processes} did not come to"
        f" {place.coordinator} within {seconds:g} s: look at the output there, and"
        " start all of them with the same --coordinator and --processes"
    )


def _missing(place: Place, present: set[int]) -> str:
    """The processes that have not come, by their numbers."""
    missing = [str(i) for i in range(1, place.processes) if i not in present]
    return f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing)}"


def _say_waiting(place: Place, whom: str, seconds: float, why: str = "") -> None:
    """Prints for whom this process waits, since nothing else is printed meanwhile."""
    print(
        f"waiting for {whom} of {place.processes} at {place.coordinator}{why},"
        f" {seconds:g} s at most",
        file=sys.stderr,
        flush=True,
    )


def _misfit(place: Place, present: set[int], process: int, processes: int) -> str:
    """What is wrong with a process that came; "" if nothing is."""
    if processes != place.processes:
        return (
            f"process {process} was started with --processes={processes}, process 0"
            f" with --processes={place.processes}: give all of them the same"
        )
    if process in present:
        return (
            f"two processes were started with --process={process}: number them from 0"
            f" to {place.processes - 1}"
        )
    return ""


def _read(text: str | None) -> dict[str, str]:
    """The facts that a process has sent."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text or "{}")
    return {}


def _report_to_first(place: Place, seconds: float, facts: Mapping[str, str]) -> str:
    """Every other process's part: connects to process 0, and returns its verdict."""
    address, deadline = host_and_port(place.coordinator), time.monotonic() + seconds
    notice = time.monotonic() + _NOTICE_SECONDS
    while True:
        left = max(0.1, min(_NOTICE_SECONDS, deadline - time.monotonic()))
        try:
            connection = socket.create_connection(address, timeout=left)
            break
        except OSError as error:
            if notice < min(time.monotonic(), deadline):
                _say_waiting(place, "process 0", seconds, f" ({error})")
                notice = deadline
            if time.monotonic() + 0.2 > deadline:
                return (
                    f"{_ABSENT}process 0 of {place.processes} was not reached at"
                    f" {place.coordinator} within {seconds:g} s ({error}): look at its"
                    " output, and check host and port of --coordinator"
                )
            time.sleep(0.2)
    with connection:
        try:
            own_facts = f" {json.dumps(facts)}" if facts else ""
            greeting = f"ragen_jax {place.process} of {place.processes}{own_facts}\n"
            connection.sendall(greeting.encode())
            # Process 0 may have started later, and waits as long from then.
            verdict = _read_line(connection, seconds + 10)
        except OSError:
            verdict = ""
    return verdict or (
        f"{_ABSENT}process 0 at {place.coordinator} ended before all processes were"
        " there: look at its output, and start all of them again"
    )


def listen(port: int) -> socket.socket:
    """A socket that others reach by IPv4 and IPv6; port 0: a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _read_line(connection: socket.socket, seconds: float) -> str:
    connection.settimeout(seconds)
    with connection.makefile("r", encoding="utf-8", errors="replace") as file:
        return file.readline(_LONGEST_LINE).rstrip("\n")
