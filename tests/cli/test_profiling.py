"""`--profile=FROM:TO`: the iterations that it means, and what it refuses."""

import pytest
from helpers import runs, warm_process, wrong_input

from ragen_jax.cli.profiling import read_iterations
from ragen_jax.errors import UserError


def test_both_ends_of_a_range_are_traced():
    assert list(read_iterations("3:5", last=5)) == [3, 4, 5]
    assert list(read_iterations("2:2", last=5)) == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (text, "give the first and the last iteration")
            for text in ("", "3", "3-4", "3:", ":4", "a:b", "-2:4", "3:4:5", "2.5:4")
        ),
        ("3:" + 5000 * "9", "give the first and the last iteration"),
        ("1:3", "the first iteration compiles"),
        ("0:0", "the first iteration compiles"),
        ("4:3", "ends before it begins: write --profile=3:4"),
        ("4:6", "the run ends with iteration 5"),
        ("6:7", "the run ends with iteration 5"),
    ],
)
def test_a_range_that_cannot_be_traced_is_refused(text, said):
    with pytest.raises(UserError) as caught:
        read_iterations(text, last=5)
    assert str(caught.value).startswith(f"--profile={text}")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--profile=1:2"], "the first iteration compiles"),
        (["--profile=2:3", "--plan"], "--profile has no effect with --plan"),
    ],
)
def test_a_wrong_range_ends_training_before_it_begins(more, said, tmp_path):
    script = runs.ROOT / "launch" / wrong_input.train().script
    given = [f"--config={runs.CONFIG}", f"--workdir={tmp_path}/run", *more]
    ended = warm_process.attempt(script, given, tmp_path)
    assert (ended.code, ended.made, ended.compiled) == (2, [], []), ended.errors
    assert ended.errors.startswith("error: ") and said in ended.errors
