"""The most tokens of an observation, where each phrase is one token."""

import numpy as np
import pytest

from ragen_jax import envs


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[("frozen_lake", dict(observation=o)) for o in ("grid", "coordinates")],
        ("frozen_lake", dict(observation="both", size=2, frozen_probability=0.5)),
        *[("sokoban", dict(observation=o)) for o in ("grid", "coordinates")],
        ("sokoban", dict(observation="both", size=8, boxes=3)),
        *[("bandit", {}), ("countdown", {}), ("countdown", dict(max_numbers=6))],
        *[("sudoku", {}), ("2048", {}), ("rubik", {}), ("math", dict(max_steps=5))],
    ],
)
def test_the_longest_observation_of_phrases_of_one_token_has_m_tokens(name, options):
    env = envs.make(name, options.items())
    longest = env.longest_observation(np.ones(len(env.phrases), int))
    assert longest == env.observation_phrases


@pytest.mark.parametrize("name", ["bandit", "rubik", "sudoku"])
def test_a_long_end_of_a_line_counts_wherever_lines_end(name):
    env = envs.make(name, ())
    is_end = np.array([text.endswith("\n") for text in env.phrases])
    ends = {"bandit": 1, "rubik": 1 + 6 + 12, "sudoku": 1 + 4}[name]
    longer = env.longest_observation(np.where(is_end, 101, 1))
    assert longer == env.observation_phrases + 100 * ends
