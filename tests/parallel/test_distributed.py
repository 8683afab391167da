"""Processes of a run: named by flags or by the cluster, and missed by name."""

import os
import re
import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest
import tokenizers
from helpers import runs

from ragen_jax.errors import ProcessAbsent, UserError
from ragen_jax.parallel import agreement, distributed, heartbeat, roll_call
from ragen_jax.parallel import facts as facts_lib
from ragen_jax.parallel.roll_call import Place

STEP = {  # What srun sets in the third of four tasks on two hosts.
    "SLURM_JOB_ID": "12345",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
MPIRUN = {  # What mpirun of Open MPI 4 sets.
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def cluster(monkeypatch):
    """Sets the environment of a cluster, and none beside it."""
    for name in (*STEP, *MPIRUN, *POD, "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)

    def enter(*variables: dict, **more: str):
        for name, value in {
            k: v for part in variables for k, v in part.items()
        }.items():
            monkeypatch.setenv(name, value)
        for name, value in more.items():
            monkeypatch.setenv(name, value)

    return enter


# Clusters ----------------------------------------------------------------------------


def test_where_jax_has_moved_its_modules_the_flags_are_asked_for(cluster, monkeypatch):
    """Without them nothing is recognized as a TPU, and a cluster asks for the flags."""

    def absent(name: str):
        raise ImportError(name)

    monkeypatch.setattr(distributed.importlib, "import_module", absent)
    cluster()
    assert distributed.place_in_cluster(1) is None
    cluster(STEP)
    with pytest.raises(UserError, match="give --coordinator=HOST:PORT"):
        distributed.place_in_cluster(1)


def test_a_process_without_a_cluster_is_alone(cluster):
    assert distributed.place_in_cluster(1) is None
    distributed.start(None, None, None)
    assert not jax.distributed.is_initialized()


def test_a_slurm_task_finds_its_place(cluster):
    cluster(STEP)
    # JAX takes the port from the job's number: 61440 + 12345 % 4096.
    assert distributed.place_in_cluster(1) == Place("gpu07:61497", 4, 2, (0,))


@pytest.mark.parametrize(
    ("tasks", "devices"), [("3,1", None), ("1(x2)", None), ("1,3", (0,)), ("", (0,))]
)
def test_only_a_slurm_task_that_is_alone_on_its_host_takes_all_gpus(
    cluster, tasks, devices
):
    """The second host's; of one that is not said to be alone JAX's word is taken."""
    cluster(STEP, SLURM_STEP_TASKS_PER_NODE=tasks)
    assert distributed.place_in_cluster(1).devices == devices


def test_a_slurm_task_that_sees_one_gpu_takes_it_whatever_its_number(cluster):
    cluster(STEP, SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="1")
    assert distributed.place_in_cluster(1).devices is None
    cluster(CUDA_VISIBLE_DEVICES="0,1")
    assert distributed.place_in_cluster(1).devices == (1,)
    cluster(JAX_LOCAL_DEVICE_IDS="0")
    assert distributed.place_in_cluster(1).devices is None


@pytest.mark.parametrize(
    "variables",
    [
        # A batch script, or the shell of an allocation: srun was not used.
        {k: v for k, v in STEP.items() if "_STEP_" not in k},
        # A shell that is itself a step of one task in an allocation for four.
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        # srun --ntasks=1
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        # mpirun -n 1 within a step of four tasks.
        {**STEP, **MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"},
        {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"},
        # A pod that belongs to no indexed job.
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_a_single_task_of_a_cluster_is_alone(cluster, variables):
    cluster(variables)
    assert distributed.place_in_cluster(1) is None
    distributed.start(None, None, None)
    assert not jax.distributed.is_initialized()


def test_an_open_mpi_process_finds_its_place(cluster):
    cluster(MPIRUN)
    # 61440 + 1531576320 / 4096 % 4096 = 61440 + 373920 % 4096 = 61440 + 1184
    assert distributed.place_in_cluster(1) == Place("10.96.0.1:62624", 2, 1, (1,))
    cluster(OMPI_COMM_WORLD_LOCAL_SIZE="1")
    assert distributed.place_in_cluster(1).devices is None


def test_open_mpi_5_is_refused_with_a_remedy(cluster):
    """JAX 0.10 does not know it, 0.11 knows it by mpi4py, which is not here."""
    cluster({k: v for k, v in MPIRUN.items() if "orte" not in k})
    with pytest.raises(UserError) as caught:
        distributed.start(None, None, None)
    reason, remedy = str(caught.value).rsplit(": ", 1)
    assert remedy == "give --coordinator=HOST:PORT, --processes and --process"
    assert reason in (
        "Open MPI started 2 processes, but not in a way in which JAX finds process 0",
        "Open MPI does not say who takes part (Open MPI 5 or newer requires mpi4py for"
        " distributed initialization.)",
    )


def test_a_pod_of_an_indexed_job_does_not_start_alone_by_mistake(cluster):
    cluster(POD)
    with pytest.raises(UserError, match="^Kubernetes .*give --coordinator=HOST:PORT"):
        distributed.start(None, None, None)


# Flags -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        (("a:1", 2, None), ["belong together", "give all three", "process=None"]),
        ((None, None, 1), ["belong together", "coordinator=None"]),
        (("node1", 2, 0), ["--coordinator=node1 is not HOST:PORT", "node1:29400"]),
        (("node1:65536", 2, 0), ["--coordinator=node1:65536 is not HOST:PORT"]),
        (("a:1", 2, 2), ["--process=2 of --processes=2", "from 0 to one less"]),
        (("a:1", 0, 0), ["--process=0 of --processes=0"]),
        (("a:1", 2, -1), ["--process=-1 of --processes=2"]),
        (("a:1", 10**12, 0), ["--processes=1000000000000 is more than 65536"]),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(place, parts):
    with pytest.raises(UserError) as caught:
        distributed.start(*place)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_one_process_of_one_needs_no_connection():
    distributed.start("127.0.0.1:1", 1, 0)
    assert not jax.distributed.is_initialized()


def test_jax_leaves_processes_alone_that_were_suspended_together(monkeypatch):
    """Its own heartbeats would abort them after 100 s, with a dump."""
    given = {}
    monkeypatch.setattr(roll_call, "call_roll", lambda *_: 1)
    monkeypatch.setattr(distributed, "_join", lambda *_: heartbeat.Heartbeat)
    monkeypatch.setattr(distributed, "_heartbeats", [])
    monkeypatch.setattr(distributed.endings, "before_exit", lambda _: None)
    monkeypatch.setattr(distributed, "_is_on_cpus", lambda _: False)
    monkeypatch.setattr(distributed, "check_even", lambda _: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **all: given.update(all))
    distributed.start("a:1", 2, 1)
    assert given["heartbeat_timeout_seconds"] >= 24 * 3600


def test_a_process_that_is_alone_agrees_with_itself():
    """Step 0 is a step."""
    assert [agreement.agreed_step(step) for step in (None, 0, 7)] == [None, 0, 7]


def test_processes_with_different_devices_are_refused_in_a_sentence():
    """JAX would fail in the first exchange between them, with a reshape's error."""
    one = SimpleNamespace(process_index=0, device_kind="old")
    two = SimpleNamespace(process_index=1, device_kind="old")
    distributed.check_even([one, two, one, two])
    with pytest.raises(UserError, match="^process 1 has 2 devices and process 0 has 1"):
        distributed.check_even([one, two, two])
    with pytest.raises(UserError, match="^process 1 has 1 device and process 0 has 2"):
        distributed.check_even([one, two, one])
    two.device_kind = "new"
    with pytest.raises(UserError, match="^process 1 has a device of kind new and pro"):
        distributed.check_even([one, two])
    # One architecture with more memory has another name.
    one.compute_capability = two.compute_capability = "8.0"
    distributed.check_even([one, two])


# Roll call ---------------------------------------------------------------------------


def call(places: list[Place], seconds: float, facts=None) -> list[str]:
    """The error of each process, "" when it may continue; all call at the same time."""
    errors = [None] * len(places)

    def one(index: int):
        try:
            own = facts[index] if facts else None
            roll_call.call_roll(places[index], seconds, own)
            errors[index] = ""
        except UserError as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.fixture
def address():
    return f"127.0.0.1:{runs.free_port()}"


def test_all_go_on_once_all_are_there_and_the_port_is_free_again(address):
    places = [Place(address, 3, i) for i in range(3)]
    assert call(places, 30) == ["", "", ""]
    assert call(places, 30) == ["", "", ""]


def test_processes_of_different_runs_are_told_which_setting_differs(address):
    facts = [{"seed": "0", "iterations": "9"}, {"seed": "1", "iterations": "9"}]
    assert call([Place(address, 2, i) for i in range(2)], 30, facts) == 2 * [
        "process 1 was started for another run than process 0: seed is 1 there and 0"
        " here: start all of them with the same settings, code and model"
    ]
    facts = [{"seed": "0"}, {}]
    first, _ = call([Place(address, 2, i) for i in range(2)], 30, facts)
    assert "seed is absent there and 0 here" in first


def test_the_facts_of_a_run_name_settings_code_and_libraries():
    found = facts_lib.of_run(runs.settings(seed=3))
    assert found["seed"] == "3" and found["rollout.prompts"] == "2"
    assert found["the version of jax"] == jax.__version__
    assert found["the version of tokenizers"] == tokenizers.__version__
    assert "the version of transformers" in found
    assert "model.path" not in found  # Its digest is compared instead.
    assert found == facts_lib.of_run(runs.settings(seed=3))
    other = facts_lib.of_run(runs.settings(seed=4, iterations=7))
    told = facts_lib.difference(2, other, found)
    assert "process 2 " in told and "seed is 4 there and 3 here" in told
    assert "iterations is 7 there and 4 here" in told
    for keys, more in (("abc", ""), ("abcd", " and 1 more")):
        told = facts_lib.difference(1, dict.fromkeys(keys, "0"), {})
        assert f"c is 0 there and absent here{more}: start all" in told


def test_environment_variables_that_change_numbers_are_among_a_runs_facts(monkeypatch):
    settings = runs.settings()
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
        monkeypatch.delenv(name)
    plain = facts_lib.of_run(settings)
    of_a_host = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": "cache",
        "JAX_CUDA_VISIBLE_DEVICES": "1",
        "JAX_PROCESS_ID": "1",
        "JAX_PLUGIN": "/opt/plugin",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_dump_to=/tmp/a",
    }
    for name, value in of_a_host.items():
        monkeypatch.setenv(name, value)
    assert facts_lib.of_run(settings) == plain
    flags = of_a_host["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_gpu_deterministic_ops=true")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    found = facts_lib.of_run(settings)
    assert {key: found[key] for key in found.keys() - plain.keys()} == {
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "the environment variable JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }


def test_whoever_comes_after_a_misfit_is_told_the_same(address):
    facts, errors = ({"seed": "0"}, {"seed": "1"}, {"seed": "0"}), {}

    def come(index: int):
        try:
            roll_call.call_roll(Place(address, 3, index), 20, facts[index])
        except UserError as error:
            errors[index] = str(error)

    early = [threading.Thread(target=come, args=(i,)) for i in (0, 1)]
    for thread in early:
        thread.start()
    early[1].join(1)  # Its connection is taken by then.
    late = threading.Thread(target=come, args=(2,))
    late.start()
    for thread in (*early, late):
        thread.join(60)
    assert "seed is 1 there and 0 here" in errors[2]
    assert errors[0] == errors[1] == errors[2]


def test_a_python_file_of_the_users_is_compared_by_its_content(tmp_path):
    file = tmp_path / "hook.py"
    settings = runs.settings(reward__hook=str(file))
    without = facts_lib.of_run(settings)  # `prepare` reports that there is none.
    file.write_text("SCALE = 1\n")
    one = facts_lib.of_run(settings)
    file.write_text("SCALE = 2\n")
    told = facts_lib.difference(1, facts_lib.of_run(settings), one)
    name = f"the file {file}"
    assert f"process 1 was started for another run than process 0: {name} is " in told
    assert f"{name} is absent there" in facts_lib.difference(1, without, one)


def test_whoever_is_absent_is_named_to_all_the_others(address):
    started = time.monotonic()
    errors = call([Place(address, 5, i) for i in (0, 2, 4)], 0.5)
    assert errors == 3 * [
        f"processes 1, 3 of 5 did not come to {address} within 0.5 s: look at the"
        " output there, and start all of them with the same --coordinator and"
        " --processes"
    ]
    assert time.monotonic() - started < 20


def test_start_names_an_absent_process_before_it_asks_jax(address):
    absent = "^process 1 of 2 did not come .* within 0.2 s"
    with pytest.raises(ProcessAbsent, match=absent):
        distributed.start(address, 2, 0, seconds=0.2)
    assert not jax.distributed.is_initialized()


def test_an_absent_first_process_is_named(address):
    errors = call([Place(address, 3, i) for i in (1, 2)], 0.5)
    for text in errors:
        assert f"process 0 of 3 was not reached at {address} within 0.5 s" in text


def test_a_host_that_does_not_exist_is_reported_like_an_absent_process():
    (error,) = call([Place("no-such-host.invalid:1234", 2, 1)], 0.3)
    assert "process 0 of 2 was not reached at no-such-host.invalid:1234" in error


def test_processes_that_count_differently_are_refused(address):
    errors = call([Place(address, 2, 0), Place(address, 3, 1)], 20)
    assert (
        errors[0]
        == errors[1]
        == (
            "process 1 was started with --processes=3, process 0 with --processes=2:"
            " give all of them the same"
        )
    )


def test_a_misfit_is_told_soon_though_others_are_absent(address, monkeypatch):
    monkeypatch.setattr(roll_call, "_LATE_SECONDS", 0.1)
    began = time.monotonic()
    first, other = call([Place(address, 3, 0), Place(address, 4, 1)], 30)
    assert first == other and first.startswith("process 1 was started with --proc")
    assert time.monotonic() - began < 20


def test_a_misfit_is_told_as_soon_when_it_comes_behind_the_notice(
    address, monkeypatch, capsys
):
    monkeypatch.setattr(roll_call, "_LATE_SECONDS", 0.1)
    monkeypatch.setattr(roll_call, "_NOTICE_SECONDS", 0.1)
    first = threading.Thread(target=call, args=([Place(address, 3, 0)], 30))
    began = time.monotonic()
    first.start()
    while "waiting for processes 1, 2 of 3" not in capsys.readouterr().err:
        assert time.monotonic() - began < 20
        time.sleep(0.02)
    (said,) = call([Place(address, 4, 1)], 30)
    first.join(60)
    assert said.startswith("process 1 was started with --proc")
    assert time.monotonic() - began < 20


def test_an_address_of_ipv6_is_read_without_its_brackets():
    assert roll_call.host_and_port("[::1]:29400") == ("::1", 29400)


def test_two_processes_of_one_number_are_refused(address):
    errors = call([Place(address, 3, i) for i in (0, 1, 1)], 20)
    assert errors == 3 * [
        "two processes were started with --process=1: number them from 0 to 2"
    ]


def test_a_port_in_use_is_refused():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        (error,) = call([Place(f"127.0.0.1:{port}", 2, 0)], 1)
    assert f"port {port} of --coordinator=127.0.0.1:{port} cannot be opened" in error
    assert "give all processes another port" in error


def test_strangers_at_the_port_are_ignored(address):
    host, port = address.split(":")

    def knock():
        for _ in range(200):
            try:
                with socket.create_connection((host, int(port)), timeout=5) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\n")
                    return
            except OSError:
                time.sleep(0.01)

    stranger = threading.Thread(target=knock)
    first = threading.Thread(
        target=roll_call.call_roll, args=(Place(address, 2, 0), 20)
    )
    stranger.start()
    first.start()
    stranger.join()
    assert call([Place(address, 2, 1)], 20) == [""]
    first.join()


def test_a_process_that_waits_long_says_for_whom(address, monkeypatch, capsys):
    monkeypatch.setattr(roll_call, "_NOTICE_SECONDS", 1.0)  # Threads start before it.
    assert all(call([Place(address, 3, 0), Place(address, 3, 2)], 1.5))
    assert capsys.readouterr().err == (
        f"waiting for process 1 of 3 at {address}, 1.5 s at most\n"
    )
    monkeypatch.setattr(roll_call, "_NOTICE_SECONDS", 0.1)
    assert all(call([Place(address, 2, 1)], 0.5))
    assert re.fullmatch(
        rf"waiting for process 0 of 2 at {address} \(.*refused\), 0.5 s at most\n",
        capsys.readouterr().err,
    )


def test_a_first_process_that_ends_while_others_wait_is_reported(monkeypatch):
    """They wait longer than it does, since it may have started later than they."""
    read_line, waits = roll_call._read_line, []
    monkeypatch.setattr(
        roll_call,
        "_read_line",
        lambda connection, seconds: waits.append(seconds) or read_line(connection, 20),
    )
    with socket.create_server(("127.0.0.1", 0)) as first:
        place = Place(f"127.0.0.1:{first.getsockname()[1]}", 2, 1)
        hangs_up = threading.Thread(target=lambda: first.accept()[0].close())
        hangs_up.start()
        (error,) = call([place], 20)
        hangs_up.join()
    assert "ended before all processes were there" in error
    assert waits == [30]
