"""The log of a few episodes: what it says of them, and how it is kept."""

import gzip
import os
import types

import jax
import numpy as np
import pytest
from helpers import records, runs

from ragen_jax.diagnostics import episode_log, monitor
from ragen_jax.diagnostics.episode_log import TokenNumbers
from ragen_jax.diagnostics.scored_batch import Trained
from ragen_jax.errors import UserError
from ragen_jax.evaluation.transcripts import Reader

# What each token says.
SAID = (b"", b"Right it is</think>", b"<answer>Right</answer>", b"A lake.\n")
READER = Reader(
    env=types.SimpleNamespace(read_action=None, action_names=("Left", "Right")),
    dialogue=types.SimpleNamespace(
        system="Rules.",
        reply_prefix="<think>",
        limits=types.SimpleNamespace(actions_per_turn=2),
    ),
    openings=("",),
    ending="",
    token_bytes=SAID,
    written_bytes=SAID,
)


def record():
    """Three episodes of groups 7, 4 and 4; the last has a second turn, in no form."""
    rows = records.rows_of("orrR....", "orrR....", "orrRorR.", episode=[0, 1, 2])
    tokens = np.array([[3, 1, 2, 0, 0, 0, 0, 0]] * 3)
    tokens[2, 4:7] = 3, 2, 0
    episodes = records.episodes_of(
        [[0, 0], [0, 0], [0.25, 0.5]],
        is_valid=[[True, False]] * 3,
        turns=[1, 1, 2],
        group=[7, 4, 4],
    )
    rows, episodes = jax.device_get((rows, episodes))
    return rows.replace(tokens=tokens), episodes


def monitor_of(score=None) -> monitor.Monitor:
    return monitor.Monitor(lambda *_: {}, score, readers=(READER,), labels=("lake",))


def test_the_agreement_of_thoughts_is_no_metric_where_no_thought_counts():
    rows, episodes = record()
    run = types.SimpleNamespace(settings=runs.settings(), tokens=())
    for is_valid, expected in ((episodes.is_valid, [1.0]), (episodes.actions < 0, [])):
        rollout = types.SimpleNamespace(
            rows=rows, episodes=episodes.replace(is_valid=is_valid)
        )
        assert list(monitor.measure(monitor_of(), run, rollout).values()) == expected


def test_an_episode_is_described_with_what_its_own_tokens_were_worth():
    """The rows that were learned from are others than those that were sampled."""
    rows, episodes = record()
    kept = jax.tree.map(lambda x: x[[1, 2]], rows)
    advantages = np.arange(16.0).reshape(2, 8)
    advantages[1, 6] = np.nan
    last, first = episode_log.describe(
        [READER],
        ["lake"],
        rows,
        episodes,
        [2, 0],
        iteration=5,
        phase="train",
        numbers=TokenNumbers(kept, advantages, 10 * advantages),
    )
    assert (last["level"], last["rollout"], last["return"]) == (4, 1, 0.75)
    assert (first["level"], first["rollout"], first["return"]) == (7, 0, 0)
    one, other = last["turns"]
    assert (one["message"], one["actions"], one["valid"]) == (
        "A lake.\n",
        ["Right"],
        True,
    )
    assert (one["thought"], one["answer"]) == ("Right it is", "<answer>Right</answer>")
    assert one["tokens"] == [said.decode() for said in (*SAID[1:3], SAID[0])]
    assert one["advantage"] == [9, 10, 11] and one["value"] == [90, 100, 110]
    np.testing.assert_allclose(one["logprob"], rows.logprobs[2, 1:4], atol=1e-3)
    np.testing.assert_allclose(other["entropy"], rows.entropy[2, 5:7], atol=1e-3)
    assert (other["thought"], other["actions"], other["valid"]) == (None, [], False)
    assert other["advantage"] == [13, None] and other["value"] == [130, None]
    # The filter dropped its group.
    assert first["turns"][0]["advantage"] is first["turns"][0]["value"] is None


@pytest.mark.parametrize("has_critic", [True, False])
def test_episodes_are_scored_as_they_were_when_they_were_learned_from(
    tmp_path, has_critic
):
    """Filter and weight of a KL term may move: those of four iterations finished."""
    rows, episodes = record()
    shape = rows.tokens.shape
    worth = types.SimpleNamespace(
        advantages=np.ones(shape), old_values=np.zeros(shape), weight=np.ones(shape[0])
    )
    scored = types.SimpleNamespace(kept=types.SimpleNamespace(rows=rows), batch=worth)
    score = {4: scored}
    made = monitor_of(lambda state, *_: score[int(state.iteration)])
    options = types.SimpleNamespace(record_every=5, record_episodes=2)
    settings = types.SimpleNamespace(health=options, has_critic=has_critic)
    run = types.SimpleNamespace(settings=settings)
    programs = types.SimpleNamespace(frozen={}, reference={})
    rollout = types.SimpleNamespace(rows=rows, episodes=episodes)
    for iteration in (5, 6):
        after = Trained({}, {}, np.int32(iteration))
        monitor.record(made, run, programs, after, rollout, tmp_path, iteration)
    found = episode_log.read(tmp_path)
    assert [(e["iteration"], e["level"]) for e in found] == [(5, 4)] * 2
    (turn,) = found[1]["turns"]
    assert turn["advantage"] == [1, 1, 1]
    assert turn["value"] == ([0, 0, 0] if has_critic else None)


@pytest.mark.parametrize(("every", "levels"), [(1, [7, 4]), (0, [])])
def test_the_first_episodes_of_a_test_are_recorded(
    tmp_path, monkeypatch, every, levels
):
    """Those of the first batch alone; its environment is the second of the run's."""
    monkeypatch.setattr(monitor, "readers_of", lambda tokenizer, tasks: (READER,) * 2)
    tasks = [types.SimpleNamespace(label=label) for label in ("other", "lake")]
    options = types.SimpleNamespace(record_every=every, record_episodes=2)
    settings = types.SimpleNamespace(health=options)
    on_batch = monitor.recorder(settings, None, tasks, tmp_path, "before", 3)
    rows, episodes = record()
    for first in (0, 3):
        second = episodes.replace(environment=np.ones(3, np.int32))
        on_batch("lake", first, rows, second)
    found = episode_log.read(tmp_path)
    assert [episode["level"] for episode in found] == levels
    assert all(episode["environment"] == "lake" for episode in found)


def test_a_log_that_grows_too_long_is_thinned_of_episodes_of_training(
    tmp_path, monkeypatch
):
    def iterations() -> list[int]:
        return [e["iteration"] for e in episode_log.read(tmp_path)]

    monkeypatch.setattr(episode_log, "MOST_EPISODES", 7)
    episode_log.append(tmp_path, [{"iteration": 2, "phase": "after"}])
    for iteration in range(1, 8):
        one = {"iteration": iteration, "phase": "train"}
        episode_log.append(tmp_path, [one])
    assert iterations() == [2, 1, 3, 5, 7]
    episode_log.trim(tmp_path, 4, print)
    assert iterations() == [2, 1, 3]
    episode_log.forget_tests(tmp_path, print)
    assert iterations() == [1, 3]


def test_training_is_not_thinned_where_the_tests_alone_are_too_many(monkeypatch):
    monkeypatch.setattr(episode_log, "MOST_EPISODES", 8)
    tests = [{"iteration": 0, "phase": "before"}] * 6
    trained = [{"iteration": i, "phase": "train"} for i in range(1, 6)]
    assert episode_log.thinned([*tests, *trained]) == [*tests[:2], *trained]


def test_a_write_that_was_cut_short_costs_itself_alone(tmp_path):
    for iteration in (1, 2):
        episode_log.append(tmp_path, [{"iteration": iteration, "phase": "train"}])
    path = tmp_path / episode_log.FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert [e["iteration"] for e in episode_log.read(tmp_path)] == [1]


def test_what_is_written_behind_a_write_that_was_cut_short_is_found(tmp_path):
    for iteration in (1, 2):
        episode_log.append(tmp_path, [{"iteration": iteration, "phase": "train"}])
    path = tmp_path / episode_log.FILE
    path.write_bytes(path.read_bytes()[:-5])
    episode_log.trim(tmp_path, 1, print)  # As a resumed run does.
    for iteration in (2, 3):
        episode_log.append(tmp_path, [{"iteration": iteration, "phase": "train"}])
    assert [e["iteration"] for e in episode_log.read(tmp_path)] == [1, 2, 3]


def test_the_best_and_the_worst_of_each_group_are_chosen():
    returns, group = np.array([1.0, 3, 2, 0, 0, 5]), np.array([0, 0, 0, 1, 1, 2])
    one, two = np.zeros(6, int), np.array([0, 0, 0, 0, 0, 1])
    every, choose = np.ones(6, bool), episode_log.choose_episodes
    assert choose(returns, group, one, every, 9) == [1, 0, 3, 5]
    assert choose(returns, group, one, every, 2) == [1, 0]
    # The first group of each environment comes before a second one.
    assert choose(returns, group, two, every, 9) == [1, 0, 5, 3]


def test_behind_the_first_groups_those_come_that_were_learned_from():
    returns, group = np.arange(8.0), np.arange(8) // 2
    is_kept, choose = np.isin(group, [2]), episode_log.choose_episodes
    one, two = np.zeros(8, int), np.arange(8) // 6
    assert choose(returns, group, one, is_kept, 9) == [1, 0, 5, 4, 3, 2, 7, 6]
    assert choose(returns, group, two, is_kept, 6) == [1, 0, 7, 6, 5, 4]
    assert choose(returns, group, one, is_kept & False, 4) == [1, 0, 3, 2]


@pytest.mark.parametrize("count", [1, 5, 12, 30])
def test_a_log_stays_short_and_holds_the_newest_however_many_are_recorded_at_once(
    tmp_path, monkeypatch, count
):
    monkeypatch.setattr(episode_log, "MOST_EPISODES", 20)

    def record(iteration, phase):
        new = [
            {"iteration": iteration, "phase": phase, "rollout": i} for i in range(count)
        ]
        episode_log.append(tmp_path, new)
        found = episode_log.read(tmp_path)
        assert len(found) <= 20
        mine = [e for e in found if (e["iteration"], e["phase"]) == (iteration, phase)]
        assert mine and mine == new[: len(mine)]
        return found

    for iteration in range(1, 30):
        assert record(iteration, "train")[0]["iteration"] == 1
    record(0, "before")
    found = record(29, "after")
    assert {e["phase"] for e in found} == set(episode_log.PHASES)


def damaged_log(workdir, damage):
    """Three writes, of iterations 1 to 3, one of them damaged; the file's new bytes."""
    writes = []
    for iteration in (1, 2, 3):
        before = sum(map(len, writes))
        episode_log.append(workdir, [{"iteration": iteration, "phase": "train"}])
        writes.append((workdir / episode_log.FILE).read_bytes()[before:])
    whole = damage(writes)
    (workdir / episode_log.FILE).write_bytes(whole)
    return whole


DAMAGES = {
    "a flipped bit": lambda w: (
        w[0] + w[1][:20] + bytes([w[1][20] ^ 1]) + w[1][21:] + w[2]
    ),
    "a lost piece": lambda w: w[0] + w[1][:-9] + w[2],
    "plain text": lambda w: w[0] + b'{"iteration": 2, "phase": "train"}\n',
    "a header with other flags": lambda w: (
        w[0] + w[1][:3] + bytes([w[1][3] ^ 4]) + w[1][4:] + w[2]
    ),
    "the last header with other flags": lambda w: (
        w[0] + w[1][:3] + bytes([w[1][3] ^ 4]) + w[1][4:]
    ),
    "nested too deeply": lambda w: (
        w[0]
        + gzip.compress(
            b'{"iteration": 2, "phase": "train", "x": '
            + b"[" * 800
            + b"]" * 800
            + b"}\n",
            mtime=0,
        )
    ),
    "no episode": lambda w: w[0] + gzip.compress(b'{"iteration": "2"}\n') + w[2],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_log_is_set_aside_whole_and_the_run_goes_on(tmp_path, damage):
    whole = damaged_log(tmp_path, damage)
    with pytest.raises(UserError, match=r"jsonl\.gz is damaged behind its first 1 epi"):
        episode_log.read(tmp_path)
    reported = []
    episode_log.trim(tmp_path, 3, reported.append)  # As a resumed run does.
    (line,) = reported
    assert line.startswith("warning: ") and line.endswith(
        "as episodes.jsonl.gz.damaged"
    )
    assert (tmp_path / f"{episode_log.FILE}.damaged").read_bytes() == whole
    assert [e["iteration"] for e in episode_log.read(tmp_path)] == [1]


def test_what_is_damaged_while_a_run_records_is_not_lost_either(tmp_path):
    for name in ("episodes.jsonl.gz.damaged", "episodes.jsonl.gz.damaged1"):
        whole = damaged_log(tmp_path, DAMAGES["plain text"])
        episode_log.append(tmp_path, [{"iteration": 4, "phase": "train"}])
        assert (tmp_path / name).read_bytes() == whole
        assert [e["iteration"] for e in episode_log.read(tmp_path)] == [1, 4]
        (tmp_path / episode_log.FILE).unlink()


def test_zeros_behind_the_last_write_cost_nothing(tmp_path):
    damaged_log(tmp_path, lambda writes: b"".join(writes) + bytes(40))
    episode_log.append(tmp_path, [{"iteration": 4, "phase": "train"}])
    assert [e["iteration"] for e in episode_log.read(tmp_path)] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == [episode_log.FILE]


def test_a_pipe_in_place_of_the_log_is_not_read(tmp_path):
    os.mkfifo(tmp_path / episode_log.FILE)
    with pytest.raises(UserError, match="jsonl.gz cannot be read: it is a pipe or a d"):
        episode_log.read(tmp_path)
