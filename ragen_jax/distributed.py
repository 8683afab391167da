"""One program on many hosts: who is there, and what to say if somebody is not."""

import os

from ragen_jax.settings import UserError

START_SECONDS = 300


def start(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Connects the processes, if there are several. Before any JAX computation.

    Args:
      coordinator: HOST:PORT of process 0; None: ask the cluster, if there is one.
      processes: how many there are.
      process: which of them this one is, from 0.

    Raises:
      UserError: if some of the three are missing, or not every process came in time.
    """
    import jax

    given = [coordinator is not None, processes is not None, process is not None]
    if any(given) and not all(given):
        raise UserError(
            "--coordinator, --processes and --process belong together: give all three,"
            f" not {coordinator=}, {processes=}, {process=}"
        )
    if not any(given) and not _cluster_has_tasks():
        return
    options = {}
    if all(given):
        options = dict(
            coordinator_address=coordinator, num_processes=processes, process_id=process
        )
    try:
        jax.distributed.initialize(initialization_timeout=START_SECONDS, **options)
    except (RuntimeError, ValueError) as error:
        # The coordination service's own message lists the tasks that never came.
        first = " ".join(str(error).split())
        raise UserError(
            f"not every process came within {START_SECONDS} s: {first}; start all of"
            " them with the same --coordinator and --processes"
        ) from None


def _cluster_has_tasks() -> bool:
    """Whether SLURM or an indexed Kubernetes job started more than one of us."""
    slurm = int(os.environ.get("SLURM_NTASKS", "1"))
    in_step = "SLURM_STEP_NODELIST" in os.environ  # not a bare allocation shell
    kubernetes = int(os.environ.get("JAX_KUBERNETES_TASKS", "1"))
    return (slurm > 1 and in_step) or kubernetes > 1
