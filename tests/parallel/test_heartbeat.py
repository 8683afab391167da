"""Processes that are killed, stopped or fail: the others end in time and say whose."""

import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from helpers import runs
from helpers.paths import ROOT

from ragen_jax.parallel import heartbeat

PROCESSES = 3
SILENT = 3.0  # seconds

SCRIPT = """
import os, socket, sys, time
from ragen_jax.parallel import heartbeat
heartbeat.GRACE_SECONDS = 0.5
heartbeat.BEAT_SECONDS = 0.3
process, port = int(sys.argv[1]), int(sys.argv[2])
options = dict(silent_seconds={silent})
if process == 0:
    server = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    beat = heartbeat.listen({processes}, server, 30, **options)
else:
    beat = heartbeat.join(process, ("127.0.0.1", port), **options)
print("together", flush=True)
line = sys.stdin.readline()
if line == "fail\\n":
    sys.exit(2)
if line == "leave\\n":
    beat.fail({code})
    os._exit({code})
beat.stop()
"""


@pytest.fixture
def together(request):
    """Three processes that know each other; its parameter is a failing one's code."""
    port, code = runs.free_port(), getattr(request, "param", 2)
    script = SCRIPT.format(silent=SILENT, processes=PROCESSES, code=code)
    started = []
    for process in range(PROCESSES):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(process), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(child)
        if process == 0:
            assert child.stdout.readline() == "listening\n"
    for child in started:
        assert child.stdout.readline() == "together\n"
    yield started
    for child in started:
        child.kill()
        child.wait()


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    ("number", "words", "seconds"),
    [
        (signal.SIGKILL, "has ended", 5),
        pytest.param(
            signal.SIGSTOP,
            "sent no heartbeat for 3 s",
            SILENT + 5,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lost_process_is_named_by_the_others_in_time(
    together, lost, number, words, seconds
):
    began = time.monotonic()
    together[lost].send_signal(number)
    others = [child for child in together if child is not together[lost]]
    for child in others:
        assert child.wait(timeout=60) == 75
        errors = child.stderr.read()
        assert errors.startswith(f"error: process {lost}") and words in errors
        assert errors.endswith("resumes from the last checkpoint\n")
        assert errors.count("\n") == 1
    assert time.monotonic() - began < seconds + 10  # A loaded machine is slow.


def test_a_process_that_fails_ends_the_others(together):
    together[2].stdin.write("fail\n")
    together[2].stdin.flush()
    for child in together[:2]:
        assert child.wait(timeout=60) == 75
        errors = child.stderr.read()
        assert errors.startswith("error: process 2 (host ") and "has ended" in errors


def test_a_first_process_that_fails_leaves_when_all_others_have(together):
    """JAX's service is in it: without that JAX aborts the others with a dump."""
    together[0].stdin.write("leave\n")
    together[0].stdin.flush()
    assert together[0].wait(timeout=60) == 2
    for child in together[1:]:
        assert child.wait(timeout=1) == 2
        errors = child.stderr.read()
        assert errors.startswith("error: process 0 (host ")
        assert errors.endswith(") has ended with code 2: its output says why\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("together", "code"), [(1, 1), (2, 2), (143, 75)], indirect=["together"]
)
def test_the_others_leave_with_a_faults_code_and_with_75_after_a_signal(together, code):
    """A scheduler takes the highest of all: 75 would start a fault again and again."""
    together[1].stdin.write("leave\n")
    together[1].stdin.flush()
    for child in (together[0], together[2]):
        ended, errors = child.wait(timeout=60), child.stderr.read()
        assert ended == code, errors
        assert errors.startswith("error: process 1 (host ") and errors.count("\n") == 1
        assert ("resumes" in errors) == (code == 75)


def test_a_killed_first_process_is_left_without_a_time_of_grace(monkeypatch):
    """JAX aborts the others, too: whoever waits loses."""
    monkeypatch.setattr(heartbeat, "GRACE_SECONDS", 600.0)
    is_lost, said = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        joined = heartbeat.join(
            1,
            server.getsockname(),
            lost=lambda *news: (said.append(news), is_lost.set()),
        )
        server.accept()[0].close()
        assert is_lost.wait(30)
    joined.stop()
    assert said == [("process 0 has ended", 75)]


def test_silence_counts_and_not_the_sleep_of_the_process_that_listens(monkeypatch):
    """Beats every 25 s after a suspension of 100 s, and then none."""
    ours, theirs = socket.socketpair()
    steps = iter([(100, b""), *[(25, b'{"beat": ""}\n')] * 5, *[(25, b"")] * 3])
    now, is_lost, said = [0], threading.Event(), []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            seconds, beat = next(steps)
            now[0] += seconds
            theirs.send(beat)
            return super().select(0)

    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    waiting = types.SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1)
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(heartbeat, "selectors", waiting)
    monkeypatch.setattr(heartbeat, "GRACE_SECONDS", 600.0)  # Not for the silent.
    lost = lambda news, _: (said.append((now[0], news)), is_lost.set())
    beating = heartbeat.Heartbeat("0", {ours: "process 1"}, lost, is_first=True)
    assert is_lost.wait(30)
    beating.stop()
    theirs.close()
    assert said == [(100 + 125 + 75, "process 1 sent no heartbeat for 60 s")]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n"])
def test_a_stranger_at_the_port_is_no_process_of_the_run(said):
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        lost: list[tuple[str, int]] = []
        note = lambda *news: lost.append(news)
        joined = heartbeat.join(1, address, lost=note)
        first = heartbeat.listen(2, server, 30, lost=note)
        assert list(first._names.values()) == [heartbeat.name(1)]
    assert joined.is_awaited()
    joined.stop()
    assert not joined.is_awaited()
    first.stop()
    assert lost == []


def test_last_words_do_not_wait_until_an_earlier_beat_was_received():
    """They would be lost when the process ends with beats of others unread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        joined = heartbeat.join(1, server.getsockname(), lost=lambda *_: None)
        (connection,) = joined._names
        at_once = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        joined.stop()
    assert at_once


@pytest.fixture
def hearts():
    """Three processes' hearts in this one, and what each says when one is lost."""
    said: list[list[str]] = [[] for _ in range(PROCESSES)]
    note = [lambda news, _, own=own: own.append(news) for own in said]
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    others = [heartbeat.join(i, address, lost=note[i]) for i in range(1, PROCESSES)]
    first = heartbeat.listen(PROCESSES, server, 30, lost=note[0])
    yield [first, *others], said
    for heart in (*others, first):
        heart.stop()


@pytest.mark.parametrize("last", range(PROCESSES))
def test_processes_wait_for_the_last_to_come_twice_over(hearts, last):
    hearts, said = hearts
    waiting = [heart for heart in hearts if heart is not hearts[last]]
    for _ in range(2):
        threads = [
            threading.Thread(target=heart.meet, args=["the end"]) for heart in waiting
        ]
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert all(thread.is_alive() for thread in threads)
        hearts[last].meet("the end", 30)
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert said == [[], [], []]


def test_who_does_not_come_to_where_all_wait_is_named_by_the_first_process(hearts):
    hearts, said = hearts
    thread = threading.Thread(target=hearts[1].meet, args=["the end", 0.5])
    thread.start()
    thread.join()
    hearts[0].meet("the end", 0.5)
    (own,), (other,), _ = said
    assert own.startswith("process 2 (host ")
    assert own.endswith(") did not come to the end within 0.5 s")
    assert other == "another process did not come to the end within 0.5 s"


def test_nobody_waits_for_processes_that_have_ended_as_planned(hearts):
    hearts, said = hearts
    for heart in hearts[1:]:
        heart.stop()
    hearts[0].meet("the end", 30)
    assert said == [[], [], []]


def test_processes_that_come_to_their_end_disturb_nobody(together):
    for child in together:
        child.stdin.write("end\n")
        child.stdin.flush()
        time.sleep(0.5)
    for child in together:
        assert child.wait(timeout=60) == 0
        assert child.stderr.read() == ""
