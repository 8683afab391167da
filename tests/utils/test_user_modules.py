"""Files of the user's that a config names."""

import pytest

from ragen_jax.errors import SettingsError, UserError
from ragen_jax.utils import user_modules


@pytest.fixture
def restricted():
    """No file may be run, as after reading a checkpoint whose path has braces."""
    user_modules.restrict([], "runs/{a}/{ names this file: pass --code={name}")
    yield
    user_modules.trust_everything()


def test_a_file_without_permission_is_refused_whatever_its_checkpoint_is_called(
    tmp_path, restricted
):
    file = tmp_path / "env.py"
    file.write_text("raise SystemExit")
    with pytest.raises(SettingsError) as refused:
        user_modules.load(str(file), "env.name")
    assert str(refused.value) == (
        f"env.name = {str(file)!r}: runs/{{a}}/{{ names this file: pass --code={file}"
    )


def test_code_of_the_users_that_exits_is_told_where(tmp_path):
    """It ended the command as if all had gone well."""
    file = tmp_path / "hook.py"
    file.write_text("import sys\ndef turn_rewards(episodes):\n    sys.exit()")
    hook = user_modules.load(str(file), "reward.hook").turn_rewards
    words = r"hook.py, line 3, exits \(None\): raise an error with the reason there"
    with pytest.raises(UserError, match=words), user_modules.refusing_exits():
        hook(None)


def test_code_that_may_never_end_is_named_while_it_is_waited_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(user_modules, "PATIENCE", 0.05)
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ntime.sleep(0.2)\n")
    user_modules.load(str(file), "reward.hook")
    assert capsys.readouterr().err == (
        f"reward.hook = {str(file)!r}: executing the file takes more than 0.05 s: if it"
        " never ends, interrupt this command and look for a loop\n"
    )
    with user_modules.warn_if_slow("what ends at once"):
        pass
    file.write_text("import time\n\ntime.sleep(0.1)\n")
    monkeypatch.setattr(user_modules, "PATIENCE", 60)
    user_modules.load(str(file), "reward.hook")
    assert capsys.readouterr().err == ""
