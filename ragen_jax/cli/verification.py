"""The job of `launch/evaluate.py --verify`: which checkpoints are as they were written.

Nothing is played, no array is made, and JAX computes nothing.
"""

from pathlib import Path

from ragen_jax.errors import UserError


def verify(path: str) -> None:
    """Reads every file of one checkpoint, or of a folder of them; prints a line each.

    Args:
      path: a workdir, its folder of checkpoints, or one step's folder.

    Raises:
      UserError: if there is nothing to verify, or anything is damaged.
    """
    from ragen_jax.training import checkpoint_files as files

    top = Path(path).expanduser().resolve()
    if not top.is_dir():
        raise UserError(f"--checkpoint={path}: there is no such folder; give a workdir")
    directory = top / files.FOLDER if (top / files.FOLDER).is_dir() else top
    steps = [s for s in map(files.step_of, directory.iterdir()) if s is not None]
    folders = [directory / str(step) for step in sorted(steps)]
    # Not by its name alone: a run's workdir may be called 1, too.
    if files.step_of(top) is not None and _has_parts(top):
        folders = [top]
    if not folders:
        raise UserError(
            f"{directory} holds no step's folder; give the workdir of a run"
        )
    verdicts = {folder: _verdict(folder) for folder in folders}
    # A running training may have deleted a step in the meantime.
    verdicts = {
        folder: verdict for folder, verdict in verdicts.items() if folder.exists()
    }
    width = max((len(folder.name) for folder in verdicts), default=0)
    for folder, (_, verdict) in verdicts.items():
        print(f"{folder.name:>{width}}  {verdict}")
    damaged = [
        folder.name for folder, (is_whole, _) in verdicts.items() if not is_whole
    ]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(verdicts)} checkpoints in {directory} are damaged"
            f" or cannot be read: {', '.join(damaged)}; restore the damaged from a"
            " copy, or delete them, and let this host read the others"
        )


def _has_parts(folder: Path) -> bool:
    """Whether anything of a step lies in a folder, be it damaged."""
    from ragen_jax.training import checkpoint_files as files

    parts = (files.INFO.parent, files.STATE, files.DIGESTS)
    return any((folder / part).exists() for part in parts)


def _verdict(folder: Path) -> tuple[bool, str]:
    """Whether a step is whole, and a line about it."""
    from ragen_jax.training import checkpoint_files as files

    try:
        if not files.has_digests(folder):
            return True, "not known: it was saved before checkpoints had digests"
        if damaged := files.damaged_file(folder):
            raise files.damage(folder, *damaged)
        sizes = [size for size, _ in files.read_digests(folder).values()]
    except files.UnreadableError as error:  # It may be whole.
        return False, f"not known: {error}"
    except UserError as error:
        return False, f"damaged: {error}"
    return True, f"whole, {len(sizes)} files, {sum(sizes) / 2**20:,.1f} MiB"
