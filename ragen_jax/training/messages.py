"""Messages of a run for the console: the banner, an example, the last table."""

import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ragen_jax.learning.shaping import bonuses
from ragen_jax.models import parameters
from ragen_jax.models.presets import TAUGHT
from ragen_jax.parallel import mesh as meshes
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.rollout.rollout import Rollout
from ragen_jax.settings import Settings, described, main_task
from ragen_jax.training import checkpoints, profiling
from ragen_jax.training.run import Run
from ragen_jax.utils.words import listed

# Rows of the table before and after training: title, metric.
_COMPARED = (
    ("success", "success"),
    ("valid replies", "valid_reply_rate"),
    ("turns", "turns"),
    ("actions", "actions"),
    ("reply tokens", "reply_tokens"),
)


def banner(run: Run, workdir: Path) -> str:
    """What the run is about to do."""
    s, rollout = run.settings, run.settings.rollout
    count = parameters.count(run.model.declared)
    episodes = rollout.prompts * rollout.group_size
    critic = "a critic of the same size" if s.has_critic else "no critic"
    if run.model.adapters is not None:
        own = parameters.count(run.model.trained)
        critic += f"; only adapters are trained: rank {s.lora.rank}, {own / 1e6:.2f} M"
    window = run.plan.window
    held = f", one for each turn, of {window} turns at most" if window else ""
    paid = [f"{name} = {value}" for name, value in bonuses(s.reward).items()]
    rows = [
        ("model", f"{s.model.path}, {count / 1e6:.2f} M parameters; {critic}"),
        ("mesh", f"{meshes.describe(run.model.mesh)}, {run.model.dtype} computation"),
        *(("environment", env) for env in environments(s)),
        ("algorithm", algorithm(s)),
        *([("reward", f"the environment's, {listed(paid)}")] if paid else []),
        (
            "iteration",
            f"{rollout.prompts} prompts x {rollout.group_size} = {episodes} episodes of"
            f" up to {run.plan.turns} turns; rows of {run.plan.context} tokens{held};"
            f" updates on {s.optimizer.minibatch} rows",
        ),
        ("run", f"{s.iterations} iterations in {workdir}"),
        ("time", "the first iteration compiles; then the time left is shown"),
        *(("note", note) for note in notes(s, jax.process_count())),
    ]
    return console_lib.banner("ragen_jax", rows) + "\n"


def notes(settings: Settings, processes: int) -> list[str]:
    """The lines of the banner on what a user may expect of the run in vain.

    Args:
      settings: of the run.
      processes: how many train.
    """
    said, model = [], settings.model.path
    names = dict.fromkeys(env.name for env in settings.tasks())
    new = [name for name in names if name not in TAUGHT.get(model, names)]
    if new:
        others = [other for other, taught in TAUGHT.items() if {*names} <= {*taught}]
        kind, other = ("one that was", others[0]) if others else (None, "FOLDER")
        said.append(
            f"{model} was not taught {listed(new)}: to see learning, choose"
            f" {kind or 'a model that can read'} (--config.model.path={other})"
        )
    if processes > 1 and settings.health.record_every:
        said.append(
            f"{processes} processes train: no episodes are recorded to be read later"
        )
    return said


def environments(settings: Settings) -> list[str]:
    """The lines of the banner on what is trained in; of a mix with their shares."""
    if not settings.env.mix:
        return [f"{env.name}: {described(env)}" for env in settings.tasks()]
    return [
        f"{env.prompts} of {settings.rollout.prompts} prompts of {env.label}"
        f"{'' if env.label == env.name else f' ({env.name})'}: {described(env)}"
        for env in settings.tasks()
    ]


def algorithm(settings: Settings) -> str:
    """The line of the banner that says how a run learns."""
    loss = settings.loss
    return (
        f"{settings.algorithm} with {settings.estimator}: {_kept(settings)}, clip"
        f" {loss.clip_low:g} / {loss.clip_high:g}, KL {_moving(loss.kl, loss.kl_end)},"
        f" entropy {_moving(loss.entropy, loss.entropy_end)}"
    )


def _moving(first: float, end: float) -> str:
    """A coefficient, and where it moves to in the run: "0 to 0.1"."""
    return f"{first:g}" if end in (-1, first) else f"{first:g} to {end:g}"


def _kept(settings: Settings) -> str:
    """What the filter keeps: the numbers that its strategy reads."""
    options = settings.filter
    if options.strategy == "none":
        return "keeps every group"
    amount = {
        "top_count": str(options.count),
        "percentile_range": f"ranks {options.low:g} to {options.high:g}",
    }.get(options.strategy, _moving(options.fraction, options.fraction_end))
    whole = "the prompts"
    if options.strategy == "within_group":
        whole = "each group"
    elif len(settings.tasks()) > 1 and options.scope == "environment":
        whole = "each environment's prompts"
    return f"keeps {options.strategy} {amount} of {whole} by {options.metric}"


def example(run: Run, rollout: Rollout) -> str:
    """The first prompt of the batch and the reply that was sampled to it."""
    rows = rollout.rows
    tokens, turn, is_reply = (
        np.asarray(field.addressable_shards[0].data[0])
        for field in (rows.tokens, rows.turn, rows.is_reply)
    )
    prompt = run.model.tokenizer.decode(tokens[(turn == 0) & ~is_reply])
    reply = run.model.tokenizer.decode(tokens[(turn == 0) & is_reply])
    text = f"--- an example prompt\n{prompt}\n--- its reply\n{reply}"
    return text.replace("\n", "\n  ") + "\n"


def before_after(run: Run, record: dict[str, Any], label: str = "") -> str:
    """The table of test success before and after training, in one environment.

    Args:
      run: whose settings say how it was evaluated.
      record: "before" and "after", metrics by name; "gain", "gain_standard_error".
        A standard error that is not known is None.
      label: of the environment, where there are several.
    """
    evaluation = run.settings.evaluation
    table = console_lib.before_after(record["before"], record["after"], _COMPARED)
    episodes = evaluation.test_prompts * evaluation.test_rollouts
    error = record["gain_standard_error"]
    known = "unknown" if error is None else format(error, ".1%")
    return (
        f"\n{label}{': ' if label else ''}{episodes} episodes on"
        f" {evaluation.test_prompts} test levels,"
        f" temperature {evaluation.temperature:g},"
        f" before and after training\n{table}\n"
        f"gain on the same levels: {record['gain']:+.1%} ± {known} (standard error)\n"
    )


def saved(iteration: int, command: str) -> str:
    """After a signal: where the run stopped, and the command that resumes it."""
    return (
        f"saved after iteration {iteration}; the same command continues from"
        f" there:\n  {command}"
    )


def changed_schedule(settings: Settings, saved_iterations: int | None) -> str:
    """What another number of iterations changes besides the end; "" if nothing.

    Args:
      settings: of the run as it is resumed.
      saved_iterations: `iterations` when the checkpoint was saved; None: not known.
    """
    if saved_iterations in (None, settings.iterations):
        return ""
    optimizer, loss, filtered = settings.optimizer, settings.loss, settings.filter
    # Of a given number of updates the critic's warm-up takes a share from the actor.
    critic_stays = optimizer.schedule_updates > 0
    actor_stays = critic_stays and not optimizer.critic_warmup
    moving = [
        f"{key} = {value!r}"
        for key, value, stays in (
            ("optimizer.schedule", "" if actor_stays else optimizer.schedule, ""),
            (
                "optimizer.critic_schedule",
                "same" if critic_stays else optimizer.critic_schedule,
                "same",
            ),
            ("loss.entropy_end", loss.entropy_end, loss.entropy),
            ("loss.kl_end", loss.kl_end, loss.kl),
            ("filter.fraction_end", filtered.fraction_end, filtered.fraction),
        )
        if value not in (stays, "constant", -1)
    ]
    if not moving:
        return ""
    return (
        f"warning: iterations was {saved_iterations} and is {settings.iterations},"
        f" which moves the end of {', '.join(moving)}: the result will differ from a"
        " run that was started with the new number"
    )


def beyond(done: int, total: int) -> str:
    """When a run is resumed with fewer iterations than are done."""
    return (
        f"{done} iterations are done already, more than iterations = {total}: nothing"
        " is left to train, and the test plays the saved state"
    )


def last_saved(workdir: Path) -> str:
    """After a fault of the machine: what is safe."""
    folder = workdir / checkpoints.FOLDER
    for place in (workdir, folder):
        if not place.exists() and (place == workdir or place.is_symlink()):
            return f"bring back {place}, then start the same command again"
    steps = checkpoints.scores(folder)
    if not steps:
        return "no checkpoint was saved yet: start the same command again"
    return (
        f"the last whole checkpoint is {max(steps)}, from which the same command"
        " resumes"
    )


def evaluation(*flags: str, settings: Settings) -> list[str]:
    """The words of the command that evaluates a run, or a model made of it.

    Args:
      flags: of the command.
      settings: of the run; code of the user's is run only where the command says so.
    """
    trusted = ["--trust-code"] if settings.files() else []
    return ["python", "launch/evaluate.py", *flags, *trusted]


def finished(workdir: Path, settings: Settings) -> str:
    """Where everything lies, and what to do next.

    Args:
      workdir: of the run.
      settings: of the run; of several evaluated environments the command names one.
    """
    words = evaluation(f"--checkpoint={workdir}", "--show=3", settings=settings)
    folder = workdir / profiling.FOLDER
    traces = f"traces       {folder}\n" if folder.exists() else ""
    labels = [task.label for task in settings.evaluated_tasks()]
    others = ""
    if len(labels) > 1:
        main = main_task(settings).label
        words.append(f"--env={main}")
        flags = ", ".join(f"--env={label}" for label in labels if label != main)
        others = f"\nof the other environments: {flags}"
    return (
        f"checkpoints  {workdir / checkpoints.FOLDER}\n"
        f"metrics      {workdir / metrics.FILE}\n"
        f"curves       {workdir / metrics.PICTURE}\n"
        f"{traces}\n"
        f"next: {shlex.join(words)}{others}"
    )
