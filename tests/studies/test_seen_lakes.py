"""Which test lakes training has shown, and the comparison of lakes that are alike."""

import math

import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax.envs.base import TEST, TRAIN
from ragen_jax.envs.frozen_lake.types import GOAL, HOLE, ICE, State
from ragen_jax.studies import seen_lakes


def lake(rows: str, player: tuple[int, int]) -> tuple[list, tuple[int, int]]:
    letters = {"_": ICE, "O": HOLE, "G": GOAL}
    return [[letters[letter] for letter in row] for row in rows.split()], player


def state_of(*lakes) -> State:
    tiles, players = zip(*lakes, strict=True)
    return State(np.array(tiles), np.array(players), np.zeros(len(lakes), bool))


def test_a_lake_is_shown_where_a_training_player_can_walk_to_its_start():
    rows = "___ OG_ __O"
    training = state_of(lake(rows, (0, 0)), lake("___ ___ __G", (0, 0)))
    test = state_of(
        lake(rows, (1, 2)),
        lake(rows, (2, 1)),  # Behind the goal, which ends an episode.
        lake("___ O_G __O", (0, 0)),  # Another goal.
        lake("___ ___ __G", (2, 0)),
    )
    assert seen_lakes.shown(training, test).tolist() == [True, False, False, True]


def test_lakes_are_compared_with_others_of_their_kind():
    is_shown = np.array([True, True, False, True, False, False])
    kinds = [(0, 1), (0, 1), (0, 1), (2, 3), (2, 3), (2, 3)]
    values = np.array([1.0, 0.5, 0.25, 1.0, 0.0, 1.0])
    found = seen_lakes.matched_difference(values, is_shown, kinds)
    assert found == pytest.approx((0.5 + 0.5) / 2)
    assert math.isnan(seen_lakes.matched_difference(values, is_shown, [*range(6)]))


def test_a_kind_of_lakes_counts_as_often_as_both_sides_have_one_of_it():
    values = np.array([1.0, 0, 0, 0, 0, 0, 1])
    is_shown = np.array([1, 0, 0, 0, 1, 1, 0], bool)
    kinds = [(0, 1)] * 4 + [(2, 3)] * 3
    assert seen_lakes.matched_difference(values, is_shown, kinds) == 0


@pytest.mark.slow
def test_levels_are_those_of_a_run_and_the_figures_those_of_the_document(capsys):
    first = seen_lakes.lakes(0, TRAIN, 1, 8)
    np.testing.assert_array_equal(
        seen_lakes.lakes(0, TRAIN, 200, 8).tiles[:8], first.tiles
    )
    assert len(seen_lakes.lakes(0, TEST, 1, 256).tiles) == 256
    seen_lakes.main()
    printed = capsys.readouterr().out
    document = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = document.split('"unseen" means')[1].split("###")[0]
    rows = [row.split(" | ") for row in printed.splitlines()]
    by_name = {row[0].removeprefix("| "): row[1:] for row in rows if len(row) == 4}
    shown, others, alike = by_name["after"]
    assert f"these end at {shown} %" in text and f"at {others} (" in text
    assert alike.startswith("2.7 [-3.4, 8.9]") and "those shown end 2.7 points" in text
    assert by_name["gain"][2].startswith("6.9 [-3.0, 16.7]")
    runs = sum(int(row[1]) for row in rows if row[0].removeprefix("| ").isdigit())
    assert f"the {runs} such runs" in text
