"""Compares our environments' speed with that of the same games in other libraries.

`launch/benchmark.py --env=NAME` calls it. Libraries that are missing are skipped.
"""

import dataclasses
from typing import Any

import jax

from ragen_jax import envs
from ragen_jax.benchmarks.environments import kinds, measure, table
from ragen_jax.benchmarks.other_environments import others
from ragen_jax.reporting.console import Console


def compare_environments(name: str, batch: int, console: Console) -> dict[str, Any]:
    """Measures steps/s and resets/s of environments and their peers; prints a table.

    Args:
      name: of an environment, or "all".
      batch: games played in parallel.
      console: for progress and the table.

    Returns:
      The same figures, for JSON.
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
