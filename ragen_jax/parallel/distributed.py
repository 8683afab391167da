"""One program on many hosts: connecting its processes, and naming absent ones."""

import collections
import contextlib
import glob
import importlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import socket
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.errors import ProcessAbsent, UserError
from ragen_jax.parallel import heartbeat, roll_call
from ragen_jax.parallel.roll_call import Place
from ragen_jax.utils import endings

START_SECONDS = 300.0  # in which every process has to connect
# JAX's own heartbeats abort all processes with a dump, also those that were suspended
# together, as by SLURM's gang scheduling, and are well. Ours tell these apart.
_JAX_SILENT_SECONDS = 10 * 24 * 3600
_THREADS_PER_DEVICE = 4  # of a CPU device: one for each nested loop that can wait
_heartbeats: list[heartbeat.Heartbeat] = []  # at most one: this process's
_FLAGS = "--coordinator=HOST:PORT, --processes and --process"
# Part of a JAX plugin's name -> files of which a host with such devices has one.
_DEVICE_FILES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"),
    "rocm": ("/dev/kfd", "/dev/dxg"),
    "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
}


def start(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    facts: Mapping[str, str] | None = None,
    *,
    seconds: float = START_SECONDS,
) -> None:
    """Connects the processes, if there are several. Before any JAX computation.

    Args:
      coordinator: HOST:PORT of process 0; None: ask the cluster, if there is one.
      processes: how many there are.
      process: which of them this one is, from 0.
      facts: from `facts.of_run`; all processes must have the same.
      seconds: in which all of them have to connect.

    Raises:
      UserError: as `find_place`; ProcessAbsent if not every process came in time.
    """
    place = find_place(coordinator, processes, process, seconds)
    if place is None:
        return
    # First, since JAX aborts when a process is missing without saying which.
    server = roll_call.listen(0) if place.process == 0 else None
    port = roll_call.call_roll(
        place, seconds, facts, server.getsockname()[1] if server else 0
    )
    _heartbeats.append(_join(place, server, port))
    endings.before_exit(_heartbeats[-1].fail)
    import jax

    if _is_on_cpus(getattr(jax.config, "jax_platforms")):  # noqa: B009  (untyped)
        # XLA's CPU runtime may start a collective while an earlier loop, which holds
        # others, still runs on other threads. Gloo matches collectives by their order
        # alone, and the processes abort ("collective mismatch", jaxlib 0.10). With one
        # thread a process there is one order. XLA reads NPROC when the backend starts.
        os.environ.setdefault("NPROC", "1")
        # That thread also launches the programs of all devices. With two it can
        # deadlock: it waits for room in one's queue, whose programs wait for the other
        # device.
        if not cpu_devices_are_chosen():
            jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(seconds)),
        heartbeat_timeout_seconds=_JAX_SILENT_SECONDS,
    )
    check_even(jax.devices())


def check_even(devices: Sequence[Any]) -> None:
    """Refuses processes that see other numbers or kinds of devices, in all of them.

    JAX's exchanges between processes, and a mesh's axes, ask for equal ones.

    Args:
      devices: of all processes.

    Raises:
      UserError: naming the first process that differs from process 0.
    """
    counts = collections.Counter(device.process_index for device in devices)
    for process, count in sorted(counts.items()):
        if count != counts[0]:
            raise UserError(
                f"process {process} has {_devices(count)} and process 0 has"
                f" {_devices(counts[0])}: give all processes the same number of devices"
                " (on GPUs by CUDA_VISIBLE_DEVICES, on CPUs by JAX_NUM_CPU_DEVICES)"
            )
    # GPUs of one architecture may differ in memory and name.
    kinds = {
        device.process_index: getattr(device, "compute_capability", device.device_kind)
        for device in devices
    }
    for process, kind in sorted(kinds.items()):
        if kind != kinds[0]:
            raise UserError(
                f"process {process} has a device of kind {kind} and process 0 of"
                f" {kinds[0]}, which round and compile apart: give all processes"
                " devices of one kind"
            )


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def find_place(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = START_SECONDS,
) -> Place | None:
    """This process's place among several; None where it is the only one.

    Args:
      coordinator, processes, process: as for `start`.
      seconds: as for `place_in_cluster`.

    Raises:
      UserError: if the three do not fit together, or the cluster does not say them.
    """
    place: Place | None
    if coordinator is not None and processes is not None and process is not None:
        place = roll_call.checked(Place(coordinator, processes, process))
    elif (coordinator, processes, process) == (None, None, None):
        place = place_in_cluster(seconds)
    else:
        raise UserError(
            "--coordinator, --processes and --process belong together: give all three,"
            f" not {coordinator=}, {processes=}, {process=}"
        )
    return None if place is None or place.processes == 1 else place


def cpu_devices_are_chosen() -> bool:
    """Whether the user says how many devices a process has on a CPU."""
    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return forced or "JAX_NUM_CPU_DEVICES" in os.environ


def give_collectives_threads() -> None:
    """Makes room for the CPU devices of one process to wait for each other in loops.

    XLA may start a collective while an earlier loop, which holds others, still runs on
    other threads of its pool (jaxlib 0.10). Each collective blocks a thread; with as
    many threads as devices all can block, for ever. XLA reads NPROC when the backend
    starts; a value of the user's own is kept.
    """
    import jax

    if not _is_on_cpus(getattr(jax.config, "jax_platforms")):  # noqa: B009  (untyped)
        return
    cores = os.cpu_count() or 1
    forced = re.search(
        r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    chosen = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009  (untyped)
    devices = int(forced[1]) if forced else chosen
    threads = cores + _THREADS_PER_DEVICE * max(devices, 1)
    os.environ.setdefault("NPROC", str(threads))


def _is_on_cpus(platforms: str | None) -> bool:
    """Whether JAX will compute on CPUs, guessed before its backend starts."""
    if platforms:
        return platforms == "cpu"
    entries = importlib.metadata.entry_points(group="jax_plugins")
    plugins = [entry.name for entry in entries]
    if importlib.util.find_spec("libtpu") is not None:
        plugins.append("libtpu")
    return not any(_has_device(plugin) for plugin in plugins)


def _has_device(plugin: str) -> bool:
    """Whether this host seems to have a device for the plugin; True if unknown.

    That the plugin is installed says little: the extra `plan-gpu` installs CUDA's
      anywhere.
    """
    if "cuda" in plugin and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False  # As users hide the GPUs of a host.
    kinds = [files for kind, files in _DEVICE_FILES.items() if kind in plugin]
    return not kinds or any(glob.glob(file) for files in kinds for file in files)


def finish() -> None:
    """Ends this process's part as planned, once all processes have come so far.

    Without the wait JAX would wait for them when Python exits, and end in a dump if one
    fails by then or takes longer than 300 s. And JAX is left here, while hearts beat,
    since Python may exit at once: without process 0, which serves JAX, the others would
    be aborted. A signal ends the wait: nobody asks JAX any more for a SIGTERM.
    """
    endings.take_signals_back()
    with contextlib.ExitStack() as stack:
        if _heartbeats:
            stack.enter_context(endings.listening(_leave_on_signal))
        meet("the end")
    if _heartbeats:
        import jax

        jax.distributed.shutdown()
    while _heartbeats:
        _heartbeats.pop().stop()


def _leave_on_signal(number: int) -> None:
    """The policy while others are awaited, which may have something to save.

    They are cut short, too: where a job's time is over it has to be tried again. But
    srun sends SIGTERM also when another process has failed, whose code then counts.
    """
    if number == signal.SIGTERM:
        wait_for_verdict()
        heartbeat.leave("terminated at the end, while other processes still worked")
    endings.exit_on_signal(number)


def meet(where: str) -> None:
    """Waits for all processes, if there are several, without a collective.

    Args:
      where: for the sentence if some do not come, such as "the end".
    """
    for heart in _heartbeats:
        heart.meet(where)


def is_awaited() -> bool:
    """Whether other processes may be waiting for this one.

    A process that fails then has to end by `endings.exit_at_once`. Python's normal exit
    waits, in JAX's, for all processes to come to theirs, while this one's heart still
    beats.
    """
    return any(heart.is_awaited() for heart in _heartbeats)


def wait_for_verdict() -> None:
    """Waits before an error is raised that another process's end may have caused.

    A collective with a lost process fails at once. The heartbeat notices the loss a few
    seconds later, and ends this process with a sentence about it.
    """
    if _heartbeats:
        time.sleep(heartbeat.GRACE_SECONDS + heartbeat.BEAT_SECONDS)


def _join(place: Place, server: socket.socket | None, port: int) -> heartbeat.Heartbeat:
    """This process's heartbeat; process 0 has the `server`, at `port`."""
    try:
        if server is not None:
            return heartbeat.listen(place.processes, server, 60.0)
        address = roll_call.host_and_port(place.coordinator)[0], port
        return heartbeat.join(place.process, address)
    except OSError as error:
        raise ProcessAbsent(
            f"the processes cannot hear of each other at port {port} of process 0's"
            f" host ({error}): let their hosts connect to one another at any port"
        ) from error


# Clusters ----------------------------------------------------------------------------


def place_in_cluster(seconds: float) -> Place | None:
    """This process's place as the cluster reports it; None where it runs alone.

    Known are what JAX knows: Open MPI up to version 4 (by JAX 0.11 and mpi4py 5 too),
    SLURM steps, indexed Kubernetes jobs and Cloud TPU.

    Args:
      seconds: how long to wait for the name of process 0's host to be known.

    Raises:
      UserError: if several processes were started but do not know of each other.
    """
    launcher, tasks = _launcher()
    if launcher is None or tasks == 1:
        return None
    # JAX has no public way to ask without connecting, and connects a single task too.
    clusters = _private_module("clusters")
    address = count = process = devices = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About packages; reported below.
            if clusters is not None:
                address, count, process, devices = (
                    clusters.ClusterEnv.auto_detect_unset_distributed_params(
                        None, tasks, None, None, None, round(seconds)
                    )
                )
    except Exception as error:  # Whatever the cluster's own client raises.
        reason = " ".join(str(error).split())
        raise UserError(
            f"{launcher} does not say who takes part ({reason}): give {_FLAGS}"
        ) from error
    if address is None or count is None or process is None:
        known = "" if tasks is None else f" {tasks}"
        needs = " (or pip install kubernetes)" if launcher == "Kubernetes" else ""
        raise UserError(
            f"{launcher} started{known or ' maybe several'} processes, but not in a way"
            f" in which JAX finds process 0: give {_FLAGS}{needs}"
        )
    return Place(address, count, process, _own_devices(devices))


def _launcher() -> tuple[str | None, int | None]:
    """What started this process, and how many with it; None where it is not said."""
    variables = os.environ
    if "OMPI_COMM_WORLD_SIZE" in variables:  # mpirun, within SLURM too
        return "Open MPI", int(variables["OMPI_COMM_WORLD_SIZE"])
    # Without a step this is a batch script or the shell of an allocation: one process,
    # though SLURM_NTASKS counts what srun would start.
    if "SLURM_STEP_NODELIST" in variables:
        tasks = variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", 1))
        return "SLURM", int(tasks)
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= variables.keys():
        return "Kubernetes", None
    cloud_tpu = _private_module("cloud_tpu_init")
    is_tpu = getattr(cloud_tpu, "running_in_cloud_tpu_vm", False)
    return ("Cloud TPU" if is_tpu else None), None


def _private_module(name: str) -> types.ModuleType | None:
    """A module of JAX that it may move or take away at any time; None if it has.

    Without it a cluster is not recognized: --coordinator and the other two flags are.
    """
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None


def _own_devices(suggested) -> tuple[int, ...] | None:
    """The local devices of this process; None: all that it sees.

    JAX suggests one GPU a process, by the process's number on its host. That leaves
    GPUs idle under one process a host, and names none where each process sees its own.
    """
    seen = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if suggested is None or _tasks_on_this_host() == 1 or len(seen) == 1:
        return None
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:  # The user's word, which JAX reads itself.
        return None
    return tuple(suggested)


def _tasks_on_this_host() -> int | None:
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    counts = []  # of each host, from a text such as 2(x3),1
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    index = int(os.environ.get("SLURM_NODEID", "0"))
    return counts[index] if index < len(counts) else None
