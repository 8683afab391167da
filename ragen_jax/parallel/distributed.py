"""One program on many hosts: connecting its processes, and naming absent ones."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import time
import types
import warnings
from collections.abc import Mapping

from ragen_jax.errors import UserError
from ragen_jax.parallel import facts as facts_lib
from ragen_jax.parallel import heartbeat

START_SECONDS = 300.0  # in which every process has to come
_ALL_HERE = "all are here"
_LONGEST_LINE = 1 << 20  # bytes of what two processes say to each other
_hearts: list[heartbeat.Heartbeat] = []  # this process's, once it has joined
_FLAGS = "--coordinator=HOST:PORT, --processes and --process"


@dataclasses.dataclass(frozen=True)
class Place:
    """One process among those of a run."""

    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int  # from 0
    devices: tuple[int, ...] | None = None  # of its host; None: all that it sees


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
      facts: of `facts.of_run`, in which all of them have to agree.
      seconds: in which all of them have to come.

    Raises:
      UserError: if the three do not fit together, the cluster does not say them, or
        not every process came in time.
    """
    place: Place | None
    if coordinator is not None and processes is not None and process is not None:
        place = _checked(Place(coordinator, processes, process))
    elif (coordinator, processes, process) == (None, None, None):
        place = place_in_cluster(seconds)
    else:
        raise UserError(
            "--coordinator, --processes and --process belong together: give all three,"
            f" not {coordinator=}, {processes=}, {process=}"
        )
    if place is None or place.processes == 1:
        return
    # JAX aborts the process when somebody stays away, and does not say who.
    heart = _listen(0) if place.process == 0 else None
    port = call_roll(place, seconds, facts, heart.getsockname()[1] if heart else 0)
    _hearts.append(_join(place, heart, port))
    import jax

    if _is_on_cpus(getattr(jax.config, "jax_platforms")):  # noqa: B009  (untyped)
        # XLA's CPU runtime starts a collective while a loop in front of it, which holds
        # others, still runs on other threads. Gloo tells them apart by their order
        # alone, and the processes abort ("collective mismatch", jaxlib 0.10). With one
        # thread a process there is one order. Read when the backend starts.
        os.environ.setdefault("NPROC", "1")
        # That thread also begins the programs of each device. With two devices it waits
        # for room in one's queue, whose programs wait for the other's: for ever.
        if not cpu_devices_are_chosen():
            jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(seconds)),
    )


def cpu_devices_are_chosen() -> bool:
    """Whether the user says how many devices a process has on a CPU."""
    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return forced or "JAX_NUM_CPU_DEVICES" in os.environ


def _is_on_cpus(platforms: str | None) -> bool:
    """Whether JAX will compute on CPUs, as far as can be told before it starts."""
    if platforms:
        return platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None


def finish() -> None:
    """Says that this process has come to its end, where there are several."""
    while _hearts:
        _hearts.pop().stop()


def wait_for_verdict() -> None:
    """Before an error is raised that may come from another process's end.

    A collective with a process that is gone fails at once; that it is gone is known,
    and said in a sentence that ends this process, a few seconds later.
    """
    if _hearts:
        time.sleep(heartbeat.GRACE_SECONDS + heartbeat.BEAT_SECONDS)


def _join(place: Place, server: socket.socket | None, port: int) -> heartbeat.Heartbeat:
    """This process's heartbeat. See there."""
    try:
        if server is not None:
            return heartbeat.listen(place.processes, server, 60.0)
        address = _host_and_port(place.coordinator)[0], port
        return heartbeat.join(place.process, address)
    except OSError as error:
        raise UserError(
            f"the processes cannot hear of each other at port {port} of process 0's"
            f" host ({error}): let their hosts connect to one another at any port"
        ) from error


def _checked(place: Place) -> Place:
    _, port = _host_and_port(place.coordinator)
    if not 0 < port < 2**16:
        raise UserError(
            f"--coordinator={place.coordinator} is no HOST:PORT: give process 0's host"
            " and a free port there, such as node1:29400"
        )
    if place.processes < 1 or not 0 <= place.process < place.processes:
        raise UserError(
            f"--process={place.process} of --processes={place.processes} cannot be:"
            " number the processes from 0 to one less than their number"
        )
    return place


def _host_and_port(coordinator: str) -> tuple[str, int]:
    """The two parts; port 0 where there is none. An IPv6 host loses its brackets."""
    match = re.fullmatch(r"(.+):(\d{1,5})", coordinator)
    return (match[1].strip("[]"), int(match[2])) if match else (coordinator, 0)


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


# Roll call ---------------------------------------------------------------------------


def call_roll(
    place: Place,
    seconds: float,
    facts: Mapping[str, str] | None = None,
    heart: int = 0,
) -> int:
    """Returns when all processes are there, in every process.

    Process 0 listens at the coordinator's port; the others name themselves to it and
    wait for its verdict, which is the same for all. The port is free again afterwards.

    Args:
      place: of this process.
      seconds: in which all of them have to come.
      facts: in which all have to agree.
      heart: of process 0: the port that the others are to beat at.

    Returns:
      That port, in every process.

    Raises:
      UserError: naming who did not come within `seconds`, or what does not fit.
    """
    if place.process == 0:
        verdict = _gather(place, seconds, facts or {}, heart)
    else:
        verdict = _report_to_first(place, seconds, facts or {})
    if not verdict.startswith(_ALL_HERE):
        raise UserError(verdict)
    return int(verdict.removeprefix(_ALL_HERE))


def _gather(place: Place, seconds: float, facts: Mapping[str, str], heart: int) -> str:
    port = _host_and_port(place.coordinator)[1]
    deadline = time.monotonic() + seconds
    present: set[int] = set()
    callers: list[socket.socket] = []
    verdict = ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            return (
                f"port {port} of --coordinator={place.coordinator} cannot be opened by"
                f" process 0 ({error.strerror}): give all processes another port"
            )
        while not verdict and len(present) < place.processes - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(server.accept()[0])
                said = _read_line(connection, 5.0)
            except TimeoutError:
                verdict = _absent(place, present, seconds, deadline)
                continue
            except OSError:
                continue  # It went away again.
            match = re.fullmatch(r"ragen_jax (\d+) of (\d+)( \{.*\})?", said)
            if match is None:
                continue  # Not one of us.
            process, processes = int(match[1]), int(match[2])
            verdict = _misfit(place, present, process, processes)
            verdict = verdict or facts_lib.difference(process, _read(match[3]), facts)
            present.add(process)
            callers.append(connection)
        verdict = verdict or f"{_ALL_HERE} {heart}"
        for connection in callers:
            with contextlib.suppress(OSError):
                connection.sendall(f"{verdict}\n".encode())
    return verdict


def _absent(place: Place, present: set[int], seconds: float, deadline: float) -> str:
    """Who is missing, once the time is over; "" before."""
    if time.monotonic() < deadline:
        return ""
    missing = [str(i) for i in range(1, place.processes) if i not in present]
    noun = "process" if len(missing) == 1 else "processes"
    return (
        f"{noun} {', '.join(missing)} of {place.processes} did not come to"
        f" {place.coordinator} within {seconds:g} s: look at the output there, and"
        " start all of them with the same --coordinator and --processes"
    )


def _misfit(place: Place, present: set[int], process: int, processes: int) -> str:
    """What is wrong with a process that came; "" if nothing is."""
    if processes != place.processes:
        return (
            f"process {process} was started with --processes={processes}, process 0"
            f" with --processes={place.processes}: give all of them the same"
        )
    if process in present or process == 0:
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
    address, deadline = _host_and_port(place.coordinator), time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            connection = socket.create_connection(address, timeout=left)
            break
        except OSError as error:
            if time.monotonic() + 0.2 > deadline:
                return (
                    f"process 0 of {place.processes} was not reached at"
                    f" {place.coordinator} within {seconds:g} s ({error}): look at its"
                    " output, and check host and port of --coordinator"
                )
            time.sleep(0.2)
    with connection:
        try:
            own = f" {json.dumps(facts)}" if facts else ""
            greeting = f"ragen_jax {place.process} of {place.processes}{own}\n"
            connection.sendall(greeting.encode())
            # Process 0 may have started later, and waits as long from then.
            said = _read_line(connection, seconds + 10)
        except OSError:
            said = ""
    return said or (
        f"process 0 at {place.coordinator} ended before all processes were there: look"
        " at its output, and start all of them again"
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _read_line(connection: socket.socket, seconds: float) -> str:
    connection.settimeout(seconds)
    with connection.makefile("r", encoding="utf-8", errors="replace") as file:
        return file.readline(_LONGEST_LINE).rstrip("\n")
