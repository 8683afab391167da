"""Sends a run's metrics to an experiment tracker, from a process of its own.

  python docs/examples/track.py --workdir=runs/frozenlake --to=trackio

Start it beside a run, or afterwards; it ends when no run trains in the workdir any
more, or on Ctrl-C. Start it again when the run is resumed: WORKDIR/tracked_TO.json says
what was sent, and of iterations that a rollback or a resumed run repeats the first
values stay. wandb (Weights & Biases) and mlflow connect to a server unless their own
settings say otherwise; trackio writes to this machine. pip installs what --to names.
"""

import argparse
import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.utils import atomic_files, folder_lock, json_files, workdir_files

Log = Callable[[int, Mapping[str, float]], Any]  # of an iteration's metrics
Tracker = tuple[str, Log, Callable[[], Any]]  # how it finds the run again, log, close


def wandb(run: str, project: str, name: str, config: dict[str, Any]) -> Tracker:
    """Weights & Biases, with `iteration` as the horizontal axis."""
    import wandb

    run = run or uuid.uuid4().hex[:8]
    new = wandb.init(id=run, resume="allow", project=project, name=name, config=config)
    # Not `log(step=...)`, which drops what comes later for a step that is over.
    new.define_metric("*", step_metric="iteration")
    return run, lambda step, values: new.log({"iteration": step, **values}), new.finish


def mlflow(run: str, project: str, name: str, config: dict[str, Any]) -> Tracker:
    """MLflow, at MLFLOW_TRACKING_URI."""
    import mlflow

    mlflow.set_experiment(project)
    new = mlflow.start_run(run_id=run or None, run_name=None if run else name)
    mlflow.log_dict(config, workdir_files.SETTINGS)
    log = lambda step, values: mlflow.log_metrics(dict(values), step=step)
    return new.info.run_id, log, mlflow.end_run


def trackio(run: str, project: str, name: str, config: dict[str, Any]) -> Tracker:
    """trackio, which knows a run by its name."""
    import trackio

    run = run or f"{name}-{uuid.uuid4().hex[:8]}"
    trackio.init(name=run, resume="allow", project=project, config=config)
    log = lambda step, values: trackio.log(dict(values), step=step)
    return run, log, trackio.finish


def follow(workdir: Path, log: Log, path: Path, seconds: float = 10.0) -> None:
    """Logs each metric of each iteration once, until no run trains in the workdir.

    Args:
      log: takes an iteration and those of its metrics that are known.
      path: of the file that says what was logged.
      seconds: between two looks at the metrics.
    """
    saved = json_files.read_object(path) if path.exists() else {}
    sent = {"iteration": -1, "names": []} | saved
    while True:
        # Asked first, so that what a run wrote before its end is still read.
        has_ended = not folder_lock.is_held(workdir)
        for record in metrics.read(workdir):
            iteration = record.pop("iteration")
            if iteration > sent["iteration"]:
                sent |= {"iteration": iteration, "names": []}
            logged = {*sent["names"]}
            new = {k: x for k, x in record.items() if x is not None and k not in logged}
            # The last iteration may have a second line, of the test.
            if iteration == sent["iteration"] and new:
                log(iteration, new)
                sent["names"] += new
                atomic_files.write_text(path, json.dumps(sent) + "\n")
        if has_ended:
            return
        time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, required=True, help="of the run")
    trackers = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}
    parser.add_argument("--to", choices=trackers, required=True, help="the tracker")
    parser.add_argument("--project", default="ragen_jax", help="the tracker's project")
    given = parser.parse_args()
    path = given.workdir / f"tracked_{given.to}.json"
    try:
        settings = json_files.read_object(given.workdir / workdir_files.SETTINGS)
        sent = json_files.read_object(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        parser.error(f"--workdir={given.workdir} is of no run that has begun: {error}")
    name, run = given.workdir.resolve().name, sent.get("run", "")
    try:
        run, log, close = trackers[given.to](run, given.project, name, settings)
    except ImportError as error:
        parser.error(f"--to={given.to}: {error}: pip install {given.to}")
    atomic_files.write_text(path, json.dumps(sent | {"run": run}) + "\n")
    try:
        follow(given.workdir, log, path)
    except KeyboardInterrupt:
        print("ended; start it again to send the rest")
    except UserError as error:
        parser.error(str(error))
    finally:
        close()


if __name__ == "__main__":
    main()
