"""Where a study's pages go: by default, and as the flags say."""

from pathlib import Path

RUNS = "runs/studies"  # default of --folder
PUBLISHED = Path("docs", "studies")  # in this repository


def default_pages(study_file: str, folder: Path) -> Path:
    """Where a study's page, figure and data go unless --pages says otherwise.

    Of a file in this repository's configs/studies docs/studies; of a user's own the
    folder of its runs.

    Args:
      study_file: path of the file that defines the study.
      folder: of the study's runs.
    """
    if (root := _repository_of(study_file)) is None:
        return folder
    pages, here = root / PUBLISHED, Path.cwd()
    return pages.relative_to(here) if pages.is_relative_to(here) else pages


def flags(study_file: str, runs: Path, folder: Path, pages: Path) -> list[str]:
    """The flags by which the command that a page shows finds the same folders.

    Args:
      study_file: path of the file that defines the study.
      runs: folder of all studies' runs, of --folder.
      folder: in it, of this study's runs.
      pages: of the page.
    """
    is_default = pages.resolve() == default_pages(study_file, folder).resolve()
    # A page that is published names no folder of one machine: its data hold the runs.
    is_published = is_default and _repository_of(study_file) is not None
    given = []
    if runs != Path(RUNS) and not is_published:
        given.append(f"--folder={runs}")
    if not is_default:
        given.append(f"--pages={pages}")
    return given


def _repository_of(study_file: str) -> Path | None:
    """The copy of this repository whose configs/studies holds a file; None: none."""
    folder = Path(study_file).expanduser().resolve().parent
    root = folder.parent.parent
    is_there = (root / "ragen_jax" / "studies").is_dir()
    return root if folder == root / "configs" / "studies" and is_there else None
