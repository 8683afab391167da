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
