"""Time limits go by the time in which the process may run."""

import signal
import subprocess
import sys
import time

# Two limits of 0.4 s. The timer is cancelled, and the other process comes, soon after
# the process may run again.
WAITS = """
import json, socket, sys, threading, time
from ragen_jax.parallel import heartbeat
from ragen_jax.utils import awake
assert "jax" not in sys.modules
own, other = socket.socketpair()
news = []
heart = heartbeat.Heartbeat(
    "process 0", {own: "process 1"}, lambda *lost: news.append(lost), is_first=True
)
timer = awake.Timer(0.4, news.append, ["late"])
meeting = threading.Thread(target=heart.meet, args=["the end", 0.4])
timer.start(), meeting.start()
print("begun", flush=True)
input()
time.sleep(0.1)
timer.cancel()
other.send(json.dumps({"beat": "process 1", "reached": 1}).encode() + b"\\n")
timer.join(), meeting.join()
print(news)
"""


def test_the_time_of_a_suspension_counts_for_no_limit():
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    child.send_signal(signal.SIGCONT)
    said, _ = child.communicate("\n", timeout=30)
    assert said == "[]\n"
