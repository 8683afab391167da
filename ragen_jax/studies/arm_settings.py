"""The settings that a study's run trains with, as launch/train.py will read them."""

from absl import flags

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.studies.definition import PlannedRun


def read(run: PlannedRun, *, is_new: bool = True) -> Settings:
    """What launch/train.py reads from a run's arguments, in hundredths of a second.

    Args:
      run: of a study.
      is_new: whether the run has not begun; one that resumes may change what nothing
        reads.

    Raises:
      UserError: for a config, or a change of it, that cannot be used.
    """
    values = flags.FlagValues()
    cli.define_config(flag_values=values)
    try:
        cli.parse(["train.py", *run.arguments()], values)
        config = values["config"].value
        settings = cli.read_settings(config)
        if is_new:
            settings_lib.check_changed(settings, cli.changed_keys(config))
    except UserError as error:
        raise UserError(f"arm {run.arm!r}: {error}") from error
    return settings
