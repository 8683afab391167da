"""How XLA compiles and computes a run: flags, precision, and pinned host memory.

All of it has to be set before JAX computes anything; startup.py does that.
"""

import os

from ragen_jax.settings import Settings
from ragen_jax.utils import host_memory

# Several CPU devices meet in a collective in each minibatch. On a busy machine one may
# be minutes late, and XLA would abort the process after 40 s. Here it warns after 5
# minutes, and aborts after an hour. So it would after 30 or 40 s where a process has
# several GPUs, whose first update loads programs and plans attention on each of them.
_TIMEOUTS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_gpu_executable_warn_stuck_timeout": 300,  # seconds, too
    "xla_gpu_executable_terminate_timeout": 3600,
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 3600,
}
_DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": "true"}
# CPU compiler passes that are switched off: together they take a sixth of the time of
# compiling the update, and do not make it faster (CHANGELOG.md).
_LEFT_OUT = (
    "xla_cpu_disable_loop_unrolling",
    "xla_cpu_disable_slp_vectorizer",
    "xla_cpu_disable_tiled_emitter",
)
_COMPILES_LESS = {"xla_backend_extra_options": ",".join(_LEFT_OUT)}
# Pinned memory of the host that a process with GPUs may take. XLA's default is 64, and
# saving copies all the state that a process holds there (read in Orbax and XLA).
_HOST_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def set_all(settings: Settings) -> None:
    """Sets them for this process.

    Args:
      settings: of the run; `deterministic` and `model.compute_dtype` are read.
    """
    value = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = xla_flags(value, settings.deterministic)
    if memory := host_memory.most_bytes():
        os.environ.setdefault(_HOST_MEMORY, str(max(64, memory // 2**30)))
    set_precision(settings)


def xla_flags(users: str, deterministic: bool) -> str:
    """XLA_FLAGS of a run: the user's, then ours except those that the user sets.

    Args:
      users: the variable as the user set it, or "".
      deterministic: use deterministic operations alone (has an effect on GPUs).
    """
    ours = _TIMEOUTS | _COMPILES_LESS | (_DETERMINISTIC if deterministic else {})
    more = [f"--{name}={value}" for name, value in ours.items() if name not in users]
    return " ".join([users, *more]).strip()


def set_precision(settings: Settings) -> None:
    """Lets products of float32 keep all its digits where the settings ask for float32.

    By default a GPU rounds their factors to TF32, with 10 bits of mantissa, and a TPU
    to bfloat16, with 7. JAX_DEFAULT_MATMUL_PRECISION takes precedence.

    Args:
      settings: of the run; `model.compute_dtype` is read.
    """
    import jax

    if settings.model.compute_dtype == "float32":
        if jax.config.jax_default_matmul_precision is None:
            jax.config.update("jax_default_matmul_precision", "highest")
