"""Heartbeats between the processes of a run: a lost one is named, and the rest end.

JAX notices a dead process too, but after minutes, and aborts the others with a dump.
Here each process keeps a connection to process 0, and both sides send a beat every few
seconds. The connection of a killed process closes; one that is stopped, or whose host
is lost, falls silent. Process 0 then tells the others, and all end with one sentence:
the state is in the last checkpoint.

Process 0 leaves last. It runs JAX's service, without which JAX aborts the others at
once and with a dump: if process 0 is killed, they have to end faster than that.

Beats also say what a process waits for all others at, `meet`: JAX's own waits end in a
dump, after 30 s at the first exchange of CPUs and after 300 s at the end of a process.
"""

import contextlib
import json
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ragen_jax.utils import awake, endings

SILENT_SECONDS = 60.0  # without a beat; compiling and saving do not delay beats
BEAT_SECONDS = 2.0
GRACE_SECONDS = 5.0  # for a process to report its own error first
LAST_SECONDS = 15.0  # in which the others leave before process 0 does
MEETING_SECONDS = 3600.0  # for all to come to where the others wait
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: trying again may succeed
# With these a process has failed by itself, and would again. The others leave with its
# code, so that nobody starts all of them anew.
_OWN_FAULTS = (1, 2)

_REACHED = re.compile(rb'"reached": (\d+)')
_REMEDY = "the same command on all of them resumes from the last checkpoint"


def leave(sentence: str, code: int = EXIT_CODE) -> None:
    """Ends this process, whatever it is waiting for.

    Args:
      sentence: about the process that is lost.
      code: with which that one has ended, where it has failed by itself.
    """
    remedy = f"; {_REMEDY}"
    if code != EXIT_CODE:
        remedy = f" with code {code}: its output says why"
    endings.exit_at_once(code, f"error: {sentence}{remedy}", forced=True)


class Heartbeat:
    """One process's side. Made by `listen` on process 0, by `join` on the others."""

    def __init__(
        self,
        own: str,
        peers: dict[socket.socket, str],
        lost: Callable[[str, int], None] = leave,
        silent_seconds: float = SILENT_SECONDS,
        *,
        is_first: bool,
    ):
        """Starts to beat.

        Args:
          own: this process's name, such as "process 1 (host a, pid 7)".
          peers: a connected socket to each process that is watched, with its name.
          is_first: whether this is process 0, which watches all others.
          lost: called once, in a thread, with what has happened and the exit code.
          silent_seconds: after which a process counts as lost.
        """
        self._own, self._lost, self._silent = own, lost, silent_seconds
        self._is_first = is_first
        self._at = 0  # meetings that this process has come to
        self._reached = dict.fromkeys(peers, 0.0)  # and each peer; inf: it has left
        self._met = 0.0  # meetings that all are known to have come to
        self._meeting = threading.Condition()
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._names = dict(peers)
        self._ended = threading.Event()
        for peer in peers:
            peer.setblocking(False)
            # Last words that wait for an earlier beat's receipt are lost when the
            # process ends with others' beats unread.
            with contextlib.suppress(OSError):  # It is no TCP socket.
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def meet(self, where: str, seconds: float = MEETING_SECONDS) -> None:
        """Returns once all processes have called it as often, or have ended as planned.

        Args:
          where: for the sentence if some do not come, such as "the end".
          seconds: after which, suspensions left out, this process calls `lost`.
        """
        self._at += 1
        self._take({})
        self._say_where()

        def have_all_come(patience: float) -> bool:
            return self._meeting.wait_for(lambda: self._met >= self._at, patience)

        with self._meeting:
            if awake.comes_true(have_all_come, seconds):
                return
        late = [name for p, name in self._names.items() if self._reached[p] < self._at]
        who = ", ".join(late) if self._is_first else "another process"
        self._lost(f"{who} did not come to {where} within {seconds:g} s", EXIT_CODE)

    def stop(self) -> None:
        """Tells the peers that this process ends as planned, and stops watching."""
        self._ended.set()
        self._thread.join(timeout=5)
        self._say({"bye": self._own})
        for peer in self._names:
            peer.close()

    def is_awaited(self) -> bool:
        """Whether others may be waiting for this process: they are not at their end."""
        return bool(self._heard) and not self._ended.is_set()

    def fail(self, code: int) -> None:
        """Says that this process ends before its end; process 0 leaves the last.

        Args:
          code: with which it ends.
        """
        self._ended.set()
        code = code if code in _OWN_FAULTS else EXIT_CODE
        self._say({"lost": f"{self._own} has ended", "code": code})
        peers, deadline = set(self._heard), time.monotonic() + LAST_SECONDS
        while self._is_first and peers and time.monotonic() < deadline:
            peers -= {peer for peer in peers if _receive(peer) == b""}
            time.sleep(0.05)

    def _watch(self) -> None:
        buffers = dict.fromkeys(self._names, b"")
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for each in self._names:
                selector.register(each, selectors.EVENT_READ)
            while self._heard and not self._ended.is_set():
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._say_where()
                began = time.monotonic()
                events = selector.select(timeout=min(0.5, BEAT_SECONDS))
                # This process itself was suspended: the others' beats are still unread.
                if time.monotonic() - began > self._silent / 2:
                    self._heard = dict.fromkeys(self._heard, time.monotonic())
                for key, _ in events:
                    peer: Any = key.fileobj
                    data = _receive(peer)
                    if data is None:
                        continue
                    buffers[peer] += data
                    *lines, buffers[peer] = buffers[peer].split(b"\n")
                    is_bye = any(b'"bye"' in line for line in lines)
                    is_over = not data or is_bye
                    if found := _lost_in(lines):
                        return self._end(*found)
                    self._take({peer: math.inf if is_bye else _reached_in(lines)})
                    if is_over:
                        selector.unregister(peer)
                        del self._heard[peer]
                        if not is_bye:
                            news = f"{self._names[peer]} has ended"
                            return self._end(news, at_once=not self._is_first)
                    else:
                        self._heard[peer] = time.monotonic()
                for peer, heard in self._heard.items():
                    if time.monotonic() - heard > self._silent:
                        return self._end(
                            f"{self._names[peer]} sent no heartbeat for"
                            f" {self._silent:g} s"
                        )

    def _take(self, reached: dict[socket.socket, float]) -> None:
        """Notes what peers have reached; process 0 tells all when all are there."""
        with self._meeting:
            for peer, number in reached.items():
                self._reached[peer] = max(self._reached[peer], number)
            met = min(self._reached.values(), default=math.inf)
            has_news = met > self._met
            self._met = max(met, self._met)
            self._meeting.notify_all()
        if has_news and self._is_first:
            self._say_where()

    def _say_where(self) -> None:
        """A beat. Process 0 says of the meetings that all have come to, itself too."""
        reached = min(self._at, self._met) if self._is_first else self._at
        self._say({"beat": self._own, "reached": reached})

    def _end(self, news: str, code: int = EXIT_CODE, *, at_once: bool = False) -> None:
        self._say({"lost": news, "code": code})
        # All processes may have met the same error, and this one be about to report it.
        waits = "has ended" in news and not at_once
        if waits and self._ended.wait(GRACE_SECONDS):
            return
        if not self._ended.is_set():
            self._lost(news, code)

    def _say(self, message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        for peer in list(self._names):
            # A peer that cannot be reached is noticed by its silence.
            with contextlib.suppress(OSError):
                peer.send(line)


def name(process: int) -> str:
    """This process as messages call it."""
    return f"process {process} (host {socket.gethostname()}, pid {os.getpid()})"


def listen(
    processes: int, server: socket.socket, seconds: float, **options: Any
) -> Heartbeat:
    """Process 0's heartbeat, once all others have come to `server`.

    Connections that do not greet as `join` does, such as port scans, are closed.
    """
    peers: dict[socket.socket, str] = {}
    deadline = time.monotonic() + seconds
    with server:
        while len(peers) < processes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(5.0)
            line = ""
            with contextlib.suppress(OSError):  # It is silent, or went away again.
                line = _read_line(connection)
            if re.match(r"process \d+ \(host ", line):
                peers[connection] = line
            else:
                connection.close()
    return Heartbeat(name(0), peers, is_first=True, **options)


def join(process: int, address: tuple[str, int], **options: Any) -> Heartbeat:
    """Another process's heartbeat. Raises OSError if process 0 is not reached."""
    connection = socket.create_connection(address, timeout=10.0)
    connection.sendall(f"{name(process)}\n".encode())
    peers = {connection: "process 0"}
    return Heartbeat(name(process), peers, is_first=False, **options)


def _receive(peer: socket.socket) -> bytes | None:
    """The bytes received; b"" if the peer is gone, None if there are none yet."""
    try:
        return peer.recv(4096)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def _lost_in(lines: list[bytes]) -> tuple[str, int] | None:
    """The news of a lost process among received lines, and its code; or None."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict) and "lost" in found:
                code = found.get("code")
                return str(found["lost"]), code if code in _OWN_FAULTS else EXIT_CODE
    return None


def _reached_in(lines: list[bytes]) -> float:
    """The last meeting that received lines say the sender has come to, from 1; or 0."""
    return max((float(n) for line in lines for n in _REACHED.findall(line)), default=0)


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n") and len(line) < 300:
        if not (piece := connection.recv(1)):
            break
        line += piece
    return line.decode(errors="replace").strip()
