"""A trace of some of a run's iterations, by jax.profiler: what takes their time.

`launch/train.py --profile=FROM:TO` asks for it (docs/planning.md says how to read one).
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

FOLDER = "profile"  # of the workdir


class Profiler:
    """Marks each iteration of a run in a trace, and traces those asked for, once.

    It changes no number and no compiled program; the marks cost nothing while no trace
    is taken.
    """

    def __init__(self, iterations: range, workdir: Path, report: Callable[[str], None]):
        """Nothing is traced yet.

        Args:
          iterations: to trace, of consecutive numbers; empty: none.
          workdir: the run's, in whose FOLDER the trace is written.
          report: prints a line.
        """
        self._iterations = iterations
        self._folder = workdir / FOLDER
        self._report = report
        self._traced: list[int] = []  # iterations of the trace that is being taken

    @contextlib.contextmanager
    def after(self, iteration: int) -> Iterator[None]:
        """A context for the iterations of one start, with which a trace ends, too.

        Args:
          iteration: finished ones. The next one compiles, so that it is not traced.
        """
        asked = self._iterations
        if asked:
            left = range(max(asked.start, iteration + 2), asked.stop)
            self._iterations = left
            if not left:
                self._report(
                    f"no trace is written: of iterations {asked.start} to {asked[-1]}"
                    f" none comes after iteration {iteration + 1}, the first of this"
                    " start, which compiles"
                )
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """A context for an iteration, which is marked, and traced if that was asked.

        Args:
          iteration: its number, from 1.
        """
        if iteration in self._iterations:
            if not self._traced:
                self._begin()
            self._traced.append(iteration)
        with jax.profiler.StepTraceAnnotation("iteration", step_num=iteration):
            yield
        if self._traced and iteration == self._iterations[-1]:
            self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Each call of a Python function would be an event, and make it slower.
        options.python_tracer_level = 0
        jax.profiler.start_trace(
            self._folder, create_perfetto_trace=True, profiler_options=options
        )

    def _end(self) -> None:
        """Writes the trace, if one is being taken, and says where it is."""
        if not self._traced:
            return
        first, last = self._traced[0], self._traced[-1]
        self._traced, self._iterations = [], range(0)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            # Hours of training are worth more than a trace.
            reason = " ".join(str(error).split())
            self._report(f"{self._folder}: the trace could not be written ({reason})")
            return
        xprof = shlex.join(["xprof", "--port", "8791", str(self._folder)])
        self._report(
            f"the trace of iterations {first} to {last} is in {self._folder}: pip"
            f" install xprof, then\n  {xprof}\nor open its perfetto_trace.json.gz at"
            " https://ui.perfetto.dev"
        )
