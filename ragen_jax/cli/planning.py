"""`launch/train.py --plan --target=...`: planning for devices that are not here."""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence

from ragen_jax.cli.startup import user_mistakes
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """The flags of launch/train.py that concern an absent device."""

    plan: bool
    target: str | None  # of planning/device_data
    devices: int  # of all hosts
    hosts: int | None  # None: one, and as many as a slice of TPUs has
    replies: tuple[str, ...]  # mean tokens of a reply
    shape: str | None  # of models/presets.py


def plan_for_target(settings: Settings, flags: PlanFlags) -> None:
    """Compiles the run's programs for absent devices and prints the plan.

    Raises:
      UserError: if the flags do not go together, or the device cannot be planned for.
    """
    if not (flags.plan and flags.target):
        flag = "--target" if flags.target else "--shape"
        raise UserError(
            f"{flag} is for planning alone: add --plan"
            f"{'' if flags.target else ' --target=h100'}, or leave it out"
        )
    # Silences the compiler's warnings that the devices are absent.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    jax.config.update("jax_platforms", "cpu")  # Nothing is run on a device.
    from ragen_jax.cli import compiler_options
    from ragen_jax.planning import model, report, target
    from ragen_jax.reporting.console import Console

    compiler_options.set_precision(settings)
    console = Console(sys.stdout)
    with user_mistakes():
        replies = _read_replies(flags.replies)
        absent_devices = target.make_target(
            flags.target,
            flags.devices,
            flags.hosts,
            deterministic=settings.deterministic,
        )
        source = model.find(settings.model.path, flags.shape)
        plan = report.make(
            settings, source, absent_devices, replies=replies, status=console.status
        )
    console.line(report.text(plan))


def _read_replies(texts: Sequence[str]) -> list[float]:
    """Mean tokens of a reply. Raises UserError for what is not a number above 0."""
    try:
        replies = [float(text) for text in texts]
    except ValueError:
        replies = [math.nan]
    if not all(0 < reply < math.inf for reply in replies):
        raise UserError(
            f"--target-replies={','.join(texts)}: give numbers of tokens above 0, as in"
            " --target-replies=50,150,400"
        )
    return replies
