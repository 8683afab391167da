"""The start of a launch script: JAX, its processes, its cache, and reporting errors.

Every script ends in `run(main)`; `main` calls `start_jax` before JAX computes anything.
"""

import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from absl import app, flags, logging

from ragen_jax import settings as settings_lib
from ragen_jax.cli import compiler_options
from ragen_jax.cli.flags import one_line, parse
from ragen_jax.cli.help_text import group
from ragen_jax.errors import ProcessAbsent, RunStopped, SettingsError, UserError
from ragen_jax.parallel import distributed, heartbeat
from ragen_jax.settings import Settings
from ragen_jax.utils import endings, machine_errors, user_modules

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, at any free port."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Total number of processes.")
_PROCESS = flags.DEFINE_integer("process", None, "Number of this process, from 0.")
group(
    "Several processes, where the launcher is not recognized (docs/clusters.md)",
    "coordinator",
    "processes",
    "process",
)

# Of a device's errors, those that no lost host causes.
_NOT_OF_A_LOST_HOST = (
    "RESOURCE_EXHAUSTED",  # Its memory is full.
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
)
_GC_THRESHOLDS = (100_000, 20, 20)  # of gc.set_threshold; Python's are (700, 10, 10)


def run(main: Callable[[], None], *, computes: bool = True) -> None:
    """Parses the command line and calls `main`; does not return.

    A mistake of the user (UserError), at any time, ends the process with `error: ...`
    in one sentence and exit code 2, as does a sys.exit in the user's code; an interrupt
    with exit code 130; anything else with its traceback.

    Args:
      main: the script's.
      computes: whether this process is to compute with JAX, which takes a second to
        import; a study leaves that to the runs that it starts.
    """

    endings.open_closed_streams()
    endings.replace_unprintable_characters()
    user_modules.trust_everything()

    def parser(arguments: list[str]) -> None:
        with _ending_in_one_sentence():
            parse(arguments)

    def call(_: None) -> None:
        # Orbax and JAX log every step of a save; only their warnings are for users.
        logging.set_verbosity(logging.WARNING)
        try:
            with _ending_in_one_sentence():
                if computes:
                    enable_compilation_cache()
                with user_modules.refusing_exits():
                    main()
                distributed.finish()
        except Exception as error:
            if not _has_to_leave():
                raise
            traceback.print_exc()
            endings.exit_at_once(_code_of(error))

    app.run(call, flags_parser=parser)


def start_jax(
    settings: Settings, facts: Mapping[str, str] | None = None, *, trains: bool = True
) -> None:
    """Sets the XLA flags that the settings ask for, and connects the run's processes.

    Args:
      settings: of the run; `deterministic`, `mesh` and `model.compute_dtype` are read.
      facts: what all processes must have in common, from `facts.of_run`.
      trains: JAX takes SIGTERM of several processes for training, which asks about it
        once in every iteration. Else it ends the process, as it ends a single one.
    """
    compiler_options.set_all(settings)
    import jax

    if not trains:
        jax.config.update("jax_enable_preemption_service", False)
    distributed.start(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, facts)
    _collect_garbage_seldom()
    if jax.distributed.is_initialized():
        from ragen_jax.parallel import gloo_groups, program_cache

        gloo_groups.connect_all()
        warning = program_cache.keep_if_shared()
        if warning and jax.process_index() == 0:
            print(warning, file=sys.stderr, flush=True)
    else:
        _give_collectives_threads(settings)


def start_jax_alone(settings: Settings, what: str) -> None:
    """As `start_jax`, for what needs whole batches, which no process of several holds.

    Args:
      settings: of the run.
      what: the process is to do, such as "a diagnosis".

    Raises:
      UserError: if several processes were started, before they connect.
    """
    check_alone(what)
    compiler_options.set_all(settings)
    _collect_garbage_seldom()
    _give_collectives_threads(settings)


def check_alone(what: str) -> None:
    """Refuses several processes, before they connect, for what each would do by itself.

    Args:
      what: the process is to do, such as "a diagnosis".

    Raises:
      UserError: if several processes were started.
    """
    place = distributed.find_place(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    if place is not None:
        raise UserError(
            f"{what} runs in one process, but {place.processes} were started: start"
            " one, without --coordinator, --processes and --process, or outside of the"
            " cluster's launcher"
        )


def _give_collectives_threads(settings: Settings) -> None:
    if settings.mesh.fsdp != 1 or settings.mesh.tensor != 1:
        distributed.give_collectives_threads()


def _collect_garbage_seldom() -> None:
    """Lets Python's garbage collector run seldom, and leave out what the imports made.

    Tracing makes a million short-lived objects. By default the collector would run
    every few thousand and also search all that the imports left: a sixth of tracing's
    time.
    """
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def use_every_core(settings: Settings) -> None:
    """Makes each CPU core a device, or as many as can share the batch evenly.

    A rollout's many small operations keep one core busy for each shard. No effect on
    GPUs and TPUs; XLA_FLAGS and JAX_NUM_CPU_DEVICES take precedence.
    """
    import jax

    from ragen_jax.parallel import backend

    if distributed.cpu_devices_are_chosen() or _COORDINATOR.value:
        return
    for count in range(backend.cpu_cores(), 0, -1):
        with contextlib.suppress(SettingsError):
            settings_lib.check_devices(settings, count)
            jax.config.update("jax_num_cpu_devices", count)
            return
    # No count fits: `check_devices` says so for the one that JAX finds.


def use_cpu() -> None:
    """Computes on the CPU, unless JAX_PLATFORMS says otherwise.

    For small jobs, as a GPU may be busy training. To be called before any JAX
    computation. It sets JAX's config because an imported JAX no longer reads the
    variable.
    """
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def silence() -> TextIO:
    """A stream that nobody reads: for all processes but the first."""
    return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Within it a ValueError or an OSError is reported as the user's mistake.

    For checks of settings and for opening files before training starts. Not for
    training itself, where such an error is a fault whose traceback is wanted.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        sentence = machine_errors.sentence(error)
        if isinstance(error, RuntimeError) and not sentence:
            raise
        if not sentence:  # It may be of an exchange with a process that is lost.
            distributed.wait_for_verdict()
        raise UserError(sentence or one_line(error)) from error


def local_path(flag: str, path: str) -> Path:
    """The absolute path that a flag's value names, without its "..".

    Links stay as they are; a ".." after a link leads from where that points to, so
    that the path is then left as it was given.

    Raises:
      UserError: for a URL.
    """
    if re.match(r"[A-Za-z][\w+.-]*://", path):
        raise UserError(
            f"--{flag}={path} is a URL: give a path here, such as one in the folder"
            " where the bucket is mounted"
        )
    with user_mistakes():
        given = Path(path).expanduser().absolute()
        plain = Path(os.path.normpath(given))
        is_same = os.path.realpath(plain) == os.path.realpath(given)
        return plain if is_same else given


def make_workdir(path: str | None) -> Path:
    """Makes the run's folder if it is not there, and checks that it can be written to.

    Raises:
      UserError: if no path was given, or nothing can be written there.
    """
    if not path:
        raise UserError("--workdir is missing: pass --workdir=runs/NAME")
    workdir = local_path("workdir", path)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # A random name: containers that share a disk may share process numbers.
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(
            f"--workdir={path} cannot be written to ({error.strerror}): choose a folder"
            " that is writable, on a disk with free space"
        ) from error
    return workdir


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next run starts at once.

    In ~/.cache/ragen_jax/jax, unless JAX_COMPILATION_CACHE_DIR names another folder or
    the user has no home; JAX_ENABLE_COMPILATION_CACHE=false switches it off. What JAX's
    own variables say wins.
    """
    import jax  # Slow to import, and the first errors should not wait for it.

    if not jax.config.jax_compilation_cache_dir:
        with contextlib.suppress(RuntimeError):  # There is no home: each run compiles.
            folder = Path.home() / ".cache" / "ragen_jax" / "jax"
            jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def _ending_in_one_sentence() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # Fails here, not at exit, if it cannot be written.
    except UserError as error:
        code = heartbeat.EXIT_CODE if isinstance(error, ProcessAbsent) else 2
        _end_with(str(error), code, together=isinstance(error, RunStopped))
    except endings.Terminated:
        endings.exit_on_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        endings.exit_on_signal(signal.SIGINT)
    except BrokenPipeError:  # Nobody listens: `train.py | head` ends as `cat | head`.
        endings.exit_at_once(128 + signal.SIGPIPE)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        # An error of writing to a stream has no file's name.
        is_output = isinstance(error, OSError) and not error.filename
        if is_output and error.errno in machine_errors.FULL:
            line = f"error: the output cannot be written ({error.strerror})"
            endings.exit_at_once(2, f"{line}: send it to a place with room")
        if not (sentence := machine_errors.sentence(error)):
            distributed.wait_for_verdict()
            raise
        _end_with(sentence)


def _end_with(sentence: str, code: int = 2, *, together: bool = False) -> NoReturn:
    """Prints the error on one line, whatever its paths contain, and exits.

    Args:
      sentence: to print.
      code: to exit with.
      together: whether all processes of the run end so. They wait for one another: the
        first may still be drawing the run's picture.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
    try:
        print(f"error: {line}", file=sys.stderr, flush=True)
    except OSError:  # Nobody is left to read it.
        # What is still in the buffer would fail again at the end, with another code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if together:
        distributed.finish()
    # A lost process's code asks for another try, and must not become that of a SIGTERM
    # which a launcher sends as soon as one of the processes has ended.
    if code == heartbeat.EXIT_CODE or _has_to_leave():
        endings.exit_at_once(code)
    sys.exit(code)


def _code_of(error: Exception) -> int:
    """The exit code for an error with a traceback, which the other processes take over.

    What a device says may be of an exchange with a host that was lost in silence, which
    the heartbeat notices later: then the same command resumes.
    """
    import jax

    is_of_device = isinstance(error, jax.errors.JaxRuntimeError)
    is_own = str(error).startswith(_NOT_OF_A_LOST_HOST)
    if is_of_device and not is_own and distributed.is_awaited():
        return heartbeat.EXIT_CODE
    return 1


def _has_to_leave() -> bool:
    """Whether Python's own end would not come, or would abort the process."""
    return endings.has_unawaited() or distributed.is_awaited()
