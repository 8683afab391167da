"""Files of the user's that a config names."""

import pytest

from ragen_jax.errors import SettingsError
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
