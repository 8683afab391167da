"""The names of a workdir's files, each defined where it is written."""

from ragen_jax.diagnostics import episode_log, rollbacks
from ragen_jax.parallel import program_cache
from ragen_jax.reporting import metrics
from ragen_jax.training import checkpoint_files, profiling
from ragen_jax.utils import workdir_files


def test_the_names_that_no_other_command_may_replace_are_those_of_their_writers():
    writers = [
        checkpoint_files.FOLDER,
        metrics.FILE,
        metrics.PICTURE,
        metrics.TENSORBOARD,
        episode_log.FILE,
        profiling.FOLDER,
        program_cache.FOLDER,
        rollbacks.FILE,
        workdir_files.SETTINGS,
        workdir_files.TEST,
    ]
    assert set(workdir_files.KEPT) == set(writers)
