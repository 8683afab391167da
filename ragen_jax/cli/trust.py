"""Trust in code that a checkpoint names: none, unless the command line says so.

The settings of a checkpoint may name Python files: an environment (`env.name`) or a
hook (`reward.hook`). A checkpoint may come from anywhere, and such a path may lead to a
file that came with it. It is executed only if the user names that file on the command
line, or passes --trust-code and the file is the one that the run was trained with.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from ragen_jax.cli.help_text import group
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.utils import user_modules

_CODE = flags.DEFINE_multi_string(
    "code", [], "Run this Python file, which the checkpoint's settings name"
)
_TRUST = flags.DEFINE_boolean(
    "trust-code",
    False,
    "Run the Python files that the checkpoint's settings name, if they are unchanged"
    " since training.",
)
group("Python files that a checkpoint names", "code", "trust-code")


def restrict_to_trusted(
    where: Path, settings: Settings, info: Mapping[str, Any], named: Iterable[str] = ()
) -> None:
    """Lets this process execute trusted Python files alone, from now on.

    Args:
      where: path of the checkpoint; for messages.
      settings: that it was saved with.
      info: of the checkpoint; `code` has the digest of each file.
      named: further trusted files, such as those of the user's --config.

    Raises:
      UserError: for --trust-code if a file has changed since training.
    """
    trusted = {user_modules.resolved(name) for name in (*named, *_CODE.value)}
    digests = info.get("code")
    digests = digests if isinstance(digests, Mapping) else {}
    for name in settings.files() if _TRUST.value else ():
        path = user_modules.resolved(name)
        if path in trusted:
            continue
        if not path.is_file() or user_modules.digest(path) != digests.get(name):
            raise UserError(
                f"--trust-code: {path} is not the file that {where} was trained with:"
                f" read it, and pass --code={name} to run it anyway"
            )
        trusted.add(path)
    user_modules.restrict(
        trusted,
        f"{where} names this Python file, which is not run without permission: read it,"
        " then pass --code={name}, or --trust-code to run it only if it is unchanged"
        " since training",
    )
