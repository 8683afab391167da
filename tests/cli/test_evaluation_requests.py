"""What launch/evaluate.py makes of its flags and of the settings."""

import pytest
from helpers import runs

from ragen_jax.cli import evaluation
from ragen_jax.cli.evaluation import Request


def make_request(**changes):
    """One that leaves all to the settings, but for what is given."""
    usual = dict(
        checkpoint="run",
        model=None,
        config=runs.settings(),
        has_config=False,
        is_overridden=False,
        policy="model",
        env=None,
        prompts=2,
        rollouts=1,
        temperature=None,
        seed=None,
        split="test",
        out=None,
        show=0,
    )
    return Request(**(usual | changes))


@pytest.mark.parametrize(("asked", "played"), [(None, 0.0), (0.7, 0.7), (0.0, 0.0)])
def test_the_settings_temperature_holds_where_none_is_asked_for(asked, played):
    settings = runs.settings(evaluation__temperature=0.0)
    request = evaluation.with_temperature(make_request(temperature=asked), settings)
    assert request.temperature == played
