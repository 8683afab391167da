"""Model files that mean harm: one sentence, soon, and no more memory than usual.

Each command line goes through the script itself, all one after the other in a process
that has compiled nothing before.
"""

import pytest
from helpers import hostile_models, runs, warm_process, wrong_input

pytestmark = pytest.mark.slow  # Many of them.

SCRIPT = runs.ROOT / "launch" / "train.py"
SECONDS = 10  # of the processor's time, at most


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    wrong_input.make_place(folder)
    hostile_models.make_place(folder)
    return folder


@pytest.mark.parametrize("name", hostile_models.WRONG)
def test_a_hostile_model_is_refused_in_one_sentence(place, name):
    wrong = hostile_models.WRONG[name]
    given = [argument.replace("{place}", str(place)) for argument in wrong.arguments]
    before = warm_process.process().submit(warm_process.used).result()
    code, output, errors, compiled, made = warm_process.attempt(SCRIPT, given, place)
    assert (code, output, made) == (2, "", []), errors
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert "Traceback" not in errors and len(errors) < 2000
    parts = [part.replace("{place}", str(place)) for part in wrong.parts]
    assert [part for part in parts if part not in errors] == [], errors
    assert [p for p in compiled if not warm_process.COPY.match(p)] == []
    memory, seconds = (
        after - of_before
        for after, of_before in zip(
            warm_process.process().submit(warm_process.used).result(),
            before,
            strict=True,
        )
    )
    assert memory < 500 and seconds < SECONDS, (memory, seconds)
