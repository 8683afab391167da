"""A supervised start keeps its finished stages until it is done."""

import contextlib
import signal
from pathlib import Path

import pytest

from ragen_jax.errors import UserError
from ragen_jax.utils import endings
from ragen_jax.warm_start import kept


def _write(folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_text(folder.name)


def _names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_the_newest_stage_alone_is_kept_and_at_last_becomes_the_model(tmp_path):
    out = tmp_path / "my model"
    keeper = kept.KeptStages(out, "tiny")
    keeper.keep("lake_boards", _write)
    assert _names(tmp_path) == ["my model.after_lake_boards"]
    keeper.keep("bandit_mixed", _write)
    assert _names(tmp_path) == ["my model.after_bandit_mixed"]
    out.mkdir()  # An empty one is replaced.
    keeper.finish()
    assert _names(tmp_path) == ["my model"]
    assert (out / "model").read_text() == "my model.after_bandit_mixed"


def test_a_mistake_after_a_stage_says_how_to_go_on_and_so_does_the_next_command(
    tmp_path,
):
    keeper = kept.KeptStages(tmp_path / "out", None)
    with pytest.raises(UserError, match=r"^lower the rate$"), keeper.adding_remedy():
        raise UserError("lower the rate")
    keeper.keep("lake_boards", _write)
    with pytest.raises(UserError) as caught, keeper.adding_remedy():
        raise UserError("lower the rate")
    folder = tmp_path / "out.after_lake_boards"
    flags = f"--start={folder} --first_stage=lake_dialogues"
    remedy = f"go on from it by the same command with {flags}"
    assert str(caught.value) == f"lower the rate; lake_boards is done, {remedy}"
    full = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with pytest.raises(UserError) as caught, keeper.adding_remedy():
        raise full
    assert "lower rows, or context, of the stage; lake_boards is" in str(caught.value)
    assert remedy in str(caught.value)
    with pytest.raises(RuntimeError, match="^else$"), keeper.adding_remedy():
        raise RuntimeError("else")
    (tmp_path / "out.after_party").mkdir()  # Of another kind, and left alone.
    with pytest.raises(UserError, match="lake_boards") as caught:
        kept.KeptStages(tmp_path / "out", None)
    assert f"{remedy}; or delete it, or give another --out" in str(caught.value)
    kept.KeptStages(tmp_path / "ou", None)
    # Going on from it, it is needed until the next stage is whole.
    again = kept.KeptStages(tmp_path / "out", str(folder))
    assert again.remedy().endswith(remedy)
    again.keep("lake_dialogues", _write)
    assert _names(tmp_path) == ["out.after_lake_dialogues", "out.after_party"]


def test_two_commands_for_one_folder_lose_nothing(tmp_path):
    one, other = (kept.KeptStages(tmp_path / "out", None) for _ in range(2))
    one.keep("bandit_mixed", _write)
    other.keep("bandit_mixed", _write)
    one.finish()
    with pytest.raises(UserError) as caught, other.adding_remedy():
        other.finish()
    folder = tmp_path / "out.after_bandit_mixed_2"
    assert str(caught.value).endswith(
        f"the model is whole in {folder}: move it to where you want it"
    )
    assert _names(tmp_path) == ["out", "out.after_bandit_mixed_2"]


def test_a_signal_after_a_stage_says_how_to_go_on(tmp_path, monkeypatch):
    ended, policies = [], []
    monkeypatch.setattr(endings, "exit_at_once", lambda *call: ended.append(call))
    listening = lambda policy: contextlib.nullcontext(policies.append(policy))
    monkeypatch.setattr(endings, "listening", listening)
    keeper = kept.KeptStages(tmp_path / "out", None)
    with keeper.adding_remedy():
        policies[0](signal.SIGTERM)
        keeper.keep("lake_boards", _write)
        policies[0](signal.SIGTERM)
    assert ended[0] == (143, "terminated")
    assert ended[1][0] == 143
    assert ended[1][1].startswith("terminated; lake_boards is done, go on from it by")
