"""Where a study's page goes, and the command that it shows."""

from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.study_records import study_file

from ragen_jax.studies import places, study

OWN = study_file("own", config="configs/bandit.py", changes={}, seeds=(0,))
GUIDE = ROOT / "docs" / "studies" / "README.md"
THEIRS = str(ROOT / "configs" / "studies" / "thinking.py")


def test_a_study_of_ones_own_gets_its_page_beside_its_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    plan = study.prepare(study.Choice("own.py", Path("runs", "studies"), None))
    page = study.write_page(plan)
    assert page == Path("runs", "studies", "own", "own.md")
    assert "    python launch/study.py --study=own.py\n" in page.read_text()
    assert not (tmp_path / "docs").exists()
    assert "--pages" not in study.listing(plan)


def test_a_study_of_the_repository_keeps_its_pages_there(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = places.default_pages("configs/studies/thinking.py", tmp_path)
    assert pages == Path("docs", "studies")
    monkeypatch.chdir(tmp_path)
    assert places.default_pages(THEIRS, tmp_path) == ROOT / "docs" / "studies"
    # A folder of the same name elsewhere is none of this repository.
    other = tmp_path / "configs" / "studies" / "own.py"
    assert places.default_pages(str(other), Path("runs")) == Path("runs")


@pytest.mark.parametrize(
    ("path", "runs", "pages", "given"),
    [
        ("own.py", "runs/studies", "runs/studies/own", []),
        ("own.py", "r", "r/own", ["--folder=r"]),
        ("own.py", "r", "p", ["--folder=r", "--pages=p"]),
        ("own.py", "runs/studies", "docs/studies", ["--pages=docs/studies"]),
        (THEIRS, "runs/studies", "p", ["--pages=p"]),
        (THEIRS, "r", "p", ["--folder=r", "--pages=p"]),
        # What is published names no folder of one machine.
        (THEIRS, "r", ROOT / "docs" / "studies", []),
    ],
)
def test_the_command_on_a_page_has_the_folders_that_were_given(
    tmp_path, monkeypatch, path, runs, pages, given
):
    monkeypatch.chdir(tmp_path)
    folder = Path(runs, "own")
    assert places.flags(path, Path(runs), folder, Path(pages)) == given


def test_the_guides_own_study_plans_what_the_guide_says(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    section = GUIDE.read_text().split("## Write your own study\n")[1].split("\n## ")[0]
    path = tmp_path / "my_study.py"
    path.write_text(section.split("```python\n")[1].split("```")[0])
    plan = study.prepare(study.Choice(str(path), tmp_path / "runs", None))
    study.check_settings(plan)
    assert "checks the six runs" in section and len(plan.runs) == 6
    assert f"runs/studies/{plan.study.name}/ARM-seedN" in section
    page = study.write_page(plan).read_text()
    assert "GRPO ends above PPO. (no run of GRPO and PPO)" in page
    assert f"--study={path} --folder={tmp_path}/runs" in page
