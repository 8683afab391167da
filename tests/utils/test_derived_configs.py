"""Derived configs: the base's settings, its variants or the deriving file's own."""

import pytest
from helpers import runs

from ragen_jax.utils.derived_configs import derive, environment

BASE = runs.ROOT / "configs" / "frozenlake.py"


def test_an_inherited_variant_is_made_by_the_base_and_an_own_one_is_not():
    plain = derive(BASE, "", own=["rev"], inherited=["smoke"])
    assert plain.iterations == 60
    assert derive(BASE, "smoke", own=["rev"], inherited=["smoke"]).iterations == 2
    assert derive(BASE, "rev", own=["rev"], inherited=["smoke"]) == plain


def test_another_variant_is_refused_even_if_the_base_has_it():
    with pytest.raises(
        ValueError, match="'firm': choose one of 'rev', 'smoke', or none"
    ):
        derive(BASE, "firm", own=["rev"], inherited=["smoke"])


def test_an_environment_begins_replies_with_a_thought_unless_it_says_otherwise():
    section = environment("bandit", reverse=True).to_dict()
    assert section == dict(name="bandit", thinking=True, reverse=True)
