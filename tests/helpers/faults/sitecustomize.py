"""A clock that is set back while the process runs; Python imports this at its start.

On PYTHONPATH and with CLOCK_BACK=SECONDS,AFTER: from AFTER seconds of the process on,
`time.time` and `time.time_ns` are SECONDS earlier. Libraries in C and the file system
see the machine's own clock.
"""

import os
import time

if "CLOCK_BACK" in os.environ:
    _BACK, _AFTER = map(float, os.environ["CLOCK_BACK"].split(","))
    _began, _time, _time_ns = time.monotonic(), time.time, time.time_ns

    def _is_back() -> bool:
        return time.monotonic() - _began > _AFTER

    time.time = lambda: _time() - (_BACK if _is_back() else 0)
    time.time_ns = lambda: _time_ns() - (int(_BACK * 10**9) if _is_back() else 0)
