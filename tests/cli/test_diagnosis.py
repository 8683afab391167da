"""What a checkpoint is diagnosed on."""

import json

import pytest
from helpers import runs, warm_process

from ragen_jax.cli import diagnosis
from ragen_jax.errors import UserError


@pytest.mark.parametrize(
    ("shape", "changes", "devices"),
    [
        ((0, 0), {"mesh__data": 3}, 8),  # As trained on three devices.
        ((2, 1), {}, 2),  # Two episodes, which eight devices cannot share.
        ((0, 0), {"mesh__fsdp": 16}, 8),
        ((0, 0), {"mesh__tensor": 16, "rollout__layout": "tensor"}, 8),
    ],
)
def test_a_run_is_diagnosed_on_as_many_devices_as_can_share_its_batch(
    shape, changes, devices
):
    settings = runs.settings(**changes)
    run = diagnosis.prepare(diagnosis.reshape(settings, *shape))
    assert run.model.mesh.devices.size == devices


def test_checkpoints_of_equal_coefficients_share_a_program_of_gradients():
    run = runs.prepare()
    fixed = diagnosis.Instruments(run)
    assert fixed.gradients(2) is fixed.gradients(4)
    moves = runs.replace_settings(run, loss__entropy_end=0.5)
    moving = diagnosis.Instruments(moves)
    assert moving.gradients(0) is moving.gradients(0)
    assert moving.gradients(0) is not moving.gradients(1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--noinformation", "--samples=8"), "--samples has no effect without --inf"),
        (("--nogradients", "--buckets=fixed"), "--buckets has no effect without --gr"),
        (("--same_prompts",), "--same_prompts has no effect without --all: leave it"),
    ],
)
def test_a_flag_of_what_is_not_measured_is_refused(tmp_path, flags, message):
    script = runs.ROOT / "launch" / "diagnose.py"
    ended = warm_process.attempt(script, ["--checkpoint=x", *flags], tmp_path)
    assert (ended.code, ended.made) == (2, [])
    assert message in ended.errors


def test_a_step_that_a_run_deletes_meanwhile_is_left_out(tmp_path, monkeypatch):
    out, there, said = tmp_path / "diagnosis.json", [1, 3], []

    def diagnose(instruments, folder, step, options, smoothed):
        if step == 3:  # What was measured before is written already.
            assert json.loads(out.read_text()) == [{"step": 1}]
        if step in (2, 4):
            raise UserError("it cannot be read")
        return {"step": step}, smoothed

    monkeypatch.setattr(diagnosis, "diagnose", diagnose)
    monkeypatch.setattr(diagnosis.checkpoints, "scores", lambda _: there)

    def run(*steps):
        return diagnosis.diagnose_all(None, tmp_path, steps, None, out, said.append)

    assert run(1, 2, 3) == json.loads(out.read_text()) == [{"step": 1}, {"step": 3}]
    assert said == ["warning: step 2 was deleted meanwhile, and is left out"]
    with pytest.raises(UserError, match="every step of .* was deleted meanwhile"):
        run(2, 4)
    there.append(2)
    with pytest.raises(UserError, match="it cannot be read"):
        run(1, 2)
