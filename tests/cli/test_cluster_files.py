"""The files for clusters: as far as they can be tried without a cluster."""

import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml
from absl import flags
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.parallel import distributed, heartbeat

SLURM = ROOT / "launch" / "slurm" / "train.sbatch"
KUBERNETES = ROOT / "launch" / "kubernetes" / "train.yaml"


# A lost process is found by the others, 75, or was killed or has crashed itself: srun
# tells the highest code. SLURM also counts the starts after a time limit.
@pytest.mark.parametrize(
    ("code", "lost", "requeues"),
    [
        (75, 19, True),
        (75, 20, False),
        *((code, 0, True) for code in (134, 135, 137, 139)),
        *((code, 0, False) for code in (1, 2, 7, 130)),
    ],
)
def test_the_slurm_script_hands_its_arguments_on_and_requeues(
    tmp_path, code, lost, requeues
):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "7.lost").write_text("code 75\n" * lost)
    given = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "40"}
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    # Stand-ins for SLURM's own commands, which note how they were called.
    for name in ("srun", "scontrol"):
        path = tmp_path / name
        path.write_text(
            f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit {code}\n'
        )
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SLURM), "--config=a.py", "--workdir=/b c"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == code and heartbeat.EXIT_CODE == 75
    srun, *after = (tmp_path / "calls").read_text().splitlines()
    assert srun.endswith("python launch/train.py --config=a.py --workdir=/b c")
    assert after == ["scontrol requeue 7"] * requeues


# 0: it has saved; 143: there was nothing to save yet, and there would not be next time.
@pytest.mark.parametrize(("code", "requeues"), [(0, True), (143, False)])
def test_out_of_time_the_slurm_script_lets_the_run_save_and_requeues(
    tmp_path, code, requeues
):
    """SLURM announces the end of a job's time to the script alone, by SIGUSR1."""
    stand_ins = {
        # srun itself, sent SIGTERM, would kill the processes before they have saved.
        "srun": f"trap 'echo saved >> calls; exit {code}' USR2\n"
        "echo $$ > pid; mv pid running; while :; do sleep 0.05; done",
        "scancel": 'echo "$@" >> calls; kill -USR2 "$(cat running)"',
        "scontrol": '[ "$1" != requeue ] || echo "$@" >> calls',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(SLURM)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        cwd=tmp_path,
    )
    while not (tmp_path / "running").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--signal=TERM 7", "saved"] + ["requeue 7"] * requeues


# SLURM signals such a job, and requeues it itself only if it is still there when its
# time of grace is over. The second time is of an earlier start.
@pytest.mark.parametrize(
    ("code", "state", "preempted", "requeues"),
    [
        (0, "RUNNING", "2999-01-01T00:00:00", True),
        (143, "RUNNING", "2999-01-01T00:00:00", True),
        (2, "RUNNING", "2999-01-01T00:00:00", False),
        (0, "RUNNING", "2001-01-01T00:00:00", False),
        (0, "RUNNING", "None", False),
        (143, "RUNNING", "Unknown", False),
        (0, "CANCELLED", "2999-01-01T00:00:00", False),
    ],
)
def test_a_preempted_job_that_ends_in_its_time_of_grace_is_requeued(
    tmp_path, code, state, preempted, requeues
):
    shown = f"JobId=7 JobName=a JobState={state} Reason=None PreemptTime={preempted} A="
    stand_ins = {
        "srun": f"exit {code}",
        "scontrol": f'echo "$@" >> calls; [ "$2" != show ] || echo "{shown}"',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(SLURM)], env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == code
    calls = tmp_path / "calls"
    said = calls.read_text().splitlines() if calls.exists() else []
    asked = ["--oneliner show job 7"] * (code != 2)
    assert said == asked + ["requeue 7"] * requeues


def test_a_task_of_the_slurm_script_sees_its_hosts_gpus_and_has_its_cpus(tmp_path):
    """NCCL cannot reach GPUs that are hidden; srun inherits no CPUs of a task."""
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/call\n')
    (tmp_path / "srun").chmod(0o755)
    for cpus in ("8", None):
        given = {"SLURM_CPUS_PER_TASK": cpus} if cpus else {}
        subprocess.run(
            ["bash", str(SLURM)],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given},
            cwd=tmp_path,
            check=True,
        )
        words = (tmp_path / "call").read_text().split()
        assert "--gpu-bind=none" in words
        assert f"--cpus-per-task={cpus or 1}" in words
    asked = re.findall(r"^#SBATCH (\S+)", SLURM.read_text(), re.MULTILINE)
    assert {"--gpus-per-task=1", "--cpus-per-task=8"} <= set(asked)


def test_the_manifest_is_a_jobset_whose_processes_fit_together():
    manifest = yaml.safe_load(KUBERNETES.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    (container,) = job["template"]["spec"]["containers"]
    command = container["command"][-1]
    assert f"--processes={job['completions']}" in command
    host = re.search(r"--coordinator=([\w.-]+):(\d+)", command)
    name = manifest["metadata"]["name"]
    # JobSet's name of a pod: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN.
    assert host[1] == f"{name}-{replicated['name']}-0-0.{name}"
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert heartbeat.EXIT_CODE not in rule["onExitCodes"]["values"]
    # A pod that is placed a day after the other finds the JobSet still there.
    restarts = manifest["spec"]["failurePolicy"]["maxRestarts"]
    assert restarts * distributed.START_SECONDS > 24 * 3600


# 0: it has saved; 143: there was nothing to save yet; 2: it stopped itself.
@pytest.mark.parametrize(
    ("code", "is_asked", "told"),
    [(0, True, 75), (2, True, 2), (143, True, 143), (0, False, 0), (2, False, 2)],
)
def test_a_pod_that_is_asked_to_end_saves_and_ends_with_a_code_that_restarts_the_run(
    tmp_path, code, is_asked, told
):
    saves = f"""trap 'sleep 0.1; echo saved >> calls; exit {code}' TERM
echo "$@" > pid; mv pid running; while :; do sleep 0.05; done"""
    (tmp_path / "python").write_text(
        f"#!/bin/sh\n{saves if is_asked else f'exit {code}'}\n"
    )
    (tmp_path / "python").chmod(0o755)
    manifest = yaml.safe_load(KUBERNETES.read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = subprocess.Popen(
        job["template"]["spec"]["containers"][0]["command"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "1"},
        cwd=tmp_path,
    )
    if is_asked:
        while not (tmp_path / "running").exists():
            assert pod.poll() is None
            time.sleep(0.02)
        assert (tmp_path / "running").read_text().endswith(" --process=1\n")
        pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=30) == told
    assert (tmp_path / "calls").exists() == is_asked  # It was waited for.


def _sbatch(text):
    """The words of the one sbatch command of a text, comment signs left out."""
    text = re.sub(r"\\\n#? *", "", text)
    (line,) = re.findall(r"^(?:# +)?(sbatch .*)$", text, re.MULTILINE)
    return shlex.split(line)


def _example(name):
    """An example's devices and its command."""
    if name == "train.yaml":
        manifest = yaml.safe_load(KUBERNETES.read_text())
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        each = container["resources"]["limits"]["nvidia.com/gpu"]
        return job["completions"] * each, shlex.split(container["command"][-1])
    path = SLURM if name == SLURM.name else ROOT / "docs" / name
    words = _sbatch(path.read_text())
    sizes = dict(word.split("=", 1) for word in words if "=" in word)
    return int(sizes["--nodes"]) * int(sizes["--gpus-per-node"]), words


@pytest.mark.parametrize("name", ["train.sbatch", "train.yaml", "clusters.md"])
def test_an_examples_settings_can_be_shared_by_the_devices_it_asks_for(
    name, monkeypatch
):
    monkeypatch.chdir(ROOT)
    devices, words = _example(name)
    flag_values = flags.FlagValues()
    cli.define_config(None, flag_values)
    own = [word for word in words if word.startswith("--config")]
    cli.parse(["train.py", *own], flag_values)
    settings = cli.read_settings(flag_values["config"].value)
    assert devices == 16
    assert settings_lib.check_devices(settings, devices)["data"] == devices
