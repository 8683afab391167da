"""Our environments beside the same games of others, where those are installed."""

import dataclasses
from typing import Any

import jax

from ragen_jax import envs
from ragen_jax.benchmarks.environments import kinds, measure, table
from ragen_jax.benchmarks.other_environments import others
from ragen_jax.reporting.console import Console


def compare_environments(name: str, batch: int, console: Console) -> dict[str, Any]:
    """Steps and resets a second of environments and of their peers, shown in a table.

    Args:
      name: of an environment, or "all".
      batch: games side by side.
      console: for progress and the table.

    Returns:
      The same for JSON.
    """
    rows = []
    for kind, options in kinds(name):
        env = envs.make(kind, options.items())
        label = " ".join([kind, *(f"{key}={value}" for key, value in options.items())])
        console.status(f"measuring {label} ...")
        ours = measure(env, batch, label)
        rows.append((ours, list(others(kind, options, batch))))
    device_kind = jax.devices()[0].device_kind
    console.line(f"{device_kind}, jax {jax.__version__}, batches of {batch}")
    console.line(table(rows))
    speeds = [speed for ours, others in rows for speed in (ours, *others)]
    record = {"device": device_kind, "jax": jax.__version__, "batch": batch}
    record["environments"] = [dataclasses.asdict(speed) for speed in speeds]
    return record
