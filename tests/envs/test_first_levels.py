"""A search for a level that never ends is refused before a run waits for it."""

import dataclasses

import jax.numpy as jnp
import pytest
from helpers import endless, runs

from ragen_jax import envs
from ragen_jax.envs import base, first_levels
from ragen_jax.errors import SettingsError
from ragen_jax.training import run as run_lib
from ragen_jax.utils import endings

COIN_WALK = str(runs.ROOT / "docs" / "examples" / "coin_walk.py")


@pytest.fixture
def without_tests(monkeypatch):
    """The coin walk without any test level."""
    monkeypatch.setattr(first_levels, "PATIENCE", 0.5)
    with endless.without_levels(envs.make(COIN_WALK, ()), base.TEST) as env:
        yield env


def test_a_split_whose_levels_never_come_is_refused_with_the_key_of_the_environment(
    without_tests,
):
    splits, key = (base.VALIDATION, base.TEST), "env.evaluate.far.name"
    with pytest.raises(
        SettingsError,
        match=rf"^{key} = '.*coin_walk.py': reset has drawn no test level",
    ) as error:
        first_levels.check_levels_come(without_tests, splits, COIN_WALK, key)
    assert "\n" not in str(error.value)
    assert endings.has_unawaited()  # Python's own end would wait for the search.


def test_splits_that_are_not_played_may_have_no_levels(without_tests):
    splits = (base.TRAIN, base.VALIDATION)
    first_levels.check_levels_come(without_tests, splits, COIN_WALK)


def test_a_level_shown_by_a_phrase_that_there_is_not_is_refused():
    walk = envs.make(COIN_WALK, ())
    for number in (len(walk.phrases), -7):
        shown = jnp.array([0, base.NO_PHRASE, number])
        env = dataclasses.replace(
            walk, reset=lambda _, split: split, observe=lambda _, ids=shown: ids
        )
        with pytest.raises(
            SettingsError,
            match=rf"test level: observe gives the id {number}: give those",
        ):
            first_levels.check_levels_come(env, (base.TEST,), COIN_WALK)


def test_a_run_asks_for_the_splits_that_it_plays(monkeypatch):
    asked = []
    monkeypatch.setattr(
        first_levels,
        "check_levels_come",
        lambda env, splits, *names: asked.append((env.name, splits, *names)),
    )
    run_lib.check_levels_of_run(runs.prepare())
    assert asked == [
        ("frozen_lake", (base.TRAIN,), "frozen_lake", "env.name"),
        ("frozen_lake", (base.VALIDATION, base.TEST), "frozen_lake", "env.name"),
    ]
