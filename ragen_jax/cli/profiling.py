"""`launch/train.py --profile=FROM:TO`: which iterations are traced."""

import re

from absl import flags

from ragen_jax.cli.flags import refuse_unread
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings

_PROFILE = flags.DEFINE_string(
    "profile",
    None,
    "FROM:TO, iterations (both included) to trace with jax.profiler into"
    " WORKDIR/profile.",
)


def asked_iterations(settings: Settings) -> range:
    """The iterations that --profile asks to trace; empty without it.

    Raises:
      UserError: if it is malformed, or the run trains no such iterations.
    """
    refuse_unread([_PROFILE.name], beside="plan")
    if _PROFILE.value is None:
        return range(0)
    return read_iterations(_PROFILE.value, settings.iterations)


def read_iterations(text: str, last: int) -> range:
    """The iterations of FROM:TO, both included.

    Args:
      text: as the user wrote it.
      last: iteration of the run.

    Raises:
      UserError: if the text is malformed, or the run trains no such iterations.
    """
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise UserError(
            f"--profile={text}: give the first and the last iteration to trace, as in"
            " --profile=3:4"
        )
    begin, end = map(int, match.groups())
    if begin > end:
        raise UserError(
            f"--profile={text} ends before it begins: write --profile={end}:{begin}"
        )
    if begin < 2:
        raise UserError(
            f"--profile={text}: the first iteration compiles, which is not what an"
            " iteration takes: begin with 2 or later, as in --profile=3:4"
        )
    if end > last:
        raise UserError(
            f"--profile={text}: the run ends with iteration {last}: choose iterations"
            " up to that one, or raise --config.iterations"
        )
    return range(begin, end + 1)
