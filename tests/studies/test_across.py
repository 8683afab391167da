"""Analyses across studies: by hand on invented runs, and the page in the repository."""

import collections
import dataclasses
import math

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.study_records import record

from ragen_jax.diagnostics import validation_decline
from ragen_jax.errors import UserError
from ragen_jax.studies import statistics
from ragen_jax.studies.across import (
    bandit_std,
    budgets,
    claims,
    information,
    numbers,
    page,
    power,
    shared_draws,
    signs,
)
from ragen_jax.studies.across.pool import Pool, Trained, load
from ragen_jax.studies.definition import Claim, PlannedRun, Study
from ragen_jax.studies.run_record import RunRecord

_SETTINGS = {
    "env.name": "bandit",
    "env.low_reward": 0.15,
    "env.high_probability": 0.25,
    "rollout.prompts": 8,
    "rollout.group_size": 16,
    "optimizer.minibatch": 32,
    "optimizer.epochs": 1,
    "optimizer.reuse": 1,
    "optimizer.schedule": "constant",
    "optimizer.actor_lr": 1e-4,
    "health.on_collapse": "warn",
    "estimator": "ppo",
    "iterations": 4,
}


def trained(arm, seed, run=None, success=(), levels=(1,), **changes):
    """A run of an arm whose validations are of every iteration."""
    planned = PlannedRun(arm, seed, "configs/bandit.py", {"arm": arm, "seed": seed})
    run = run or record(seed, levels, success=success)
    return Trained(planned, run, {**_SETTINGS, **changes})


def study_of(name, arms, claimed=()):
    """A study with the arms that its runs are of."""
    arms = {arm: {} for arm in arms}
    return Study(name, "?", "nothing", "configs/bandit.py", {}, arms, claims=claimed)


def pool_of(*runs, name="invented", claimed=()):
    study = study_of(name, [run.planned.arm for run in runs], claimed)
    return Pool({name: study}, {name: list(runs)})


@pytest.fixture(scope="module")
def stored():
    return load(ROOT, ROOT / "docs" / "studies")


def test_the_page_in_the_repository_is_what_its_command_writes_now(stored):
    same = (ROOT / "docs" / "studies" / page.NAME).read_text() == page.text(stored)
    assert same, f"data or code have changed: rewrite the page by `{page.COMMAND}`"


def test_the_documents_count_of_declines_is_that_of_the_stored_runs(stored):
    kinds = collections.Counter()
    for run in stored.runs:
        if run.environment == "Bandit" and not run.rewinds:
            levels = run.settings["evaluation.prompts"]
            series = zip(*run.record.series(validation_decline.SUCCESS), strict=True)
            seen, declines = validation_decline.Record(), False
            for iteration, success in series:
                error = math.sqrt(success * (1 - success) / levels)
                found = {"success": success, "success_standard_error": error}
                found = {f"validation/{name}": value for name, value in found.items()}
                seen = validation_decline.update(seen, iteration, found)
                declines |= seen.is_decline
            kinds[declines, seen.best - seen.last > 0.1, seen.low] += 1
    count = lambda fits: sum(kinds[kind] for kind in kinds if fits(*kind))
    text = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    triggers, falls = count(lambda d, f, _: d), count(lambda d, f, _: f)
    late = count(lambda d, f, low: f and not d)
    for sentence in (
        f"In the {kinds.total()} different runs of Bandit",
        f"triggers in {triggers}: in {falls - late} of the {falls} that end more",
        f"(in {small(count(lambda d, f, low: f and not d and low))} of the other"
        f" {small(late)} the last validation alone is low), and in"
        f" {small(triggers - falls + late)} that recover.",
    ):
        assert sentence in " ".join(text.split())


def small(number):
    return "zero one two three four five six seven eight nine ten".split()[number]


def test_a_folder_without_data_is_refused_and_gets_no_page(tmp_path):
    with pytest.raises(UserError, match="--pages=.* has no data of a study's runs"):
        page.write(ROOT, tmp_path)
    assert not list(tmp_path.iterdir())


def test_intervals_are_those_of_the_textbooks():
    mean = numbers.student([1.0, 3.0, math.nan, 2.0])
    half = 4.302653 / math.sqrt(3)
    found = (mean.value, mean.low, mean.high, mean.count)
    assert found == pytest.approx((2, 2 - half, 2 + half, 3))
    assert math.isnan(numbers.student([0.1, 0.1]).low)
    # Equal but for the sixth digit that a data file keeps.
    assert math.isnan(numbers.student([0.039063, 0.039062]).low)
    assert numbers.wilson(0, 10) == pytest.approx((0, 0.277533), abs=1e-5)
    assert numbers.wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-5)
    limits = numbers.deviation_limits(1, 10)  # chi-square 20.4832 and 3.24697
    assert limits == pytest.approx((0.698723, 1.754934), abs=1e-5)
    assert numbers.points(numbers.student([0.5, -0.5])) == "0.0 [-635.3, 635.3]"


def test_a_paired_t_test_needs_as_many_seeds_as_published_tables_say():
    # Faul et al. 2007, G*Power 3: a two-sided paired t test at 5 %, 80 %.
    assert [numbers.seeds_needed(d, 1) for d in (0.5, 0.8, 1.0)] == [34, 15, 10]
    assert numbers.power(0.5, 1, 34) == pytest.approx(0.8078, abs=1e-4)
    # Without a difference the test errs in 5 %, on both sides together.
    assert numbers.power(1e-12, 1, 3) == pytest.approx(0.05)
    assert numbers.seeds_needed(0.001, 1) == 0


def test_of_many_tests_those_remain_that_the_rate_of_false_discoveries_lets_pass():
    values = [0.05, 0.01, 0.04, 0.02, 0.03]
    # 0.05 <= 5 * 0.05 / 5.
    assert numbers.remaining_by_benjamini_hochberg(values) == 5
    assert numbers.remaining_by_benjamini_hochberg([0.2, 0.03, 0.03]) == 2
    assert numbers.remaining_by_benjamini_hochberg([0.2, 0.04, 0.04]) == 0


def test_arms_are_compared_where_they_have_made_as_many_updates():
    # All prompts reach 0.8 after two iterations, which are 8 updates, and then fall.
    every = {s: trained("all", s, success=(0.5, 0.8, 0.4, 0.2)) for s in (0, 1)}
    half = {
        s: trained("half", s, success=(0.4, 0.5, 0.6, 0.7 + s / 10)) for s in (0, 1, 2)
    }
    found = budgets.contrast("x", half, every, lambda r: 2 + 2 * (r in every.values()))
    assert found.spent == 8
    assert found.by_iteration == pytest.approx({0: 0.5, 1: 0.6})
    assert found.end == pytest.approx({0: -0.1, 1: 0.0})
    # At 4 updates 0.5 - 0.5; where all prompts have no validation nothing is taken.
    assert found.course == pytest.approx({0: -0.05, 1: 0.0})
    assert budgets.averaged([found.end, {0: 0.3, 1: 0.2, 2: 9.0}]).value == (
        pytest.approx(0.1)
    )
    # Seeds trained elsewhere may have left an arm none that the other has too.
    assert budgets.contrast("x", {0: half[0]}, {1: half[1]}, lambda run: 2) is None


def test_what_is_decided_at_equal_iterations_alone_may_be_the_updates():
    def contrast(iterations, updates):
        by_iteration, end = dict(enumerate(iterations)), dict(enumerate(updates))
        return budgets.Contrast("x", "Bandit", 8, by_iteration, end, end)

    above, around = (0.5, 0.51, 0.52), (-0.1, 0.0, 0.1)
    for updates, said in (
        (above, "cannot explain them."),
        (around, "may be all that distinguishes them."),
    ):
        found = budgets._finding([contrast(above, updates)])
        assert found.endswith(said) and "Of 1 contrast 1 are" in found
    assert "Nothing is decided" in budgets._finding([contrast(around, around)])


def test_half_the_rate_is_compared_where_it_has_learned_as_much():
    constant = {"optimizer.schedule": "constant"}
    runs = [
        trained("half", s, success=(0.5, 0.6, 0.7, 0.8 + s / 10), **constant)
        for s in (0, 1)
    ]
    runs = [
        dataclasses.replace(r, settings={**r.settings, "optimizer.actor_lr": 5e-5})
        for r in runs
    ]
    runs += [
        trained("plain", s, success=(0.6, 0.5, 0.1, 0), **constant) for s in (0, 1)
    ]
    runs += [trained("falling", 0, **{"optimizer.schedule": "cosine"})]
    runs += [trained("rollback", 0, **{"health.on_collapse": "rollback"})]
    (found,) = budgets.half_rate(pool_of(*runs, name="collapse"))
    assert found.title == "plain"
    assert found.by_iteration == pytest.approx({0: 0.8, 1: 0.9})
    # At the iterations 2 and 4 of half the rate, which are 1 and 2 of the whole.
    assert found.end == pytest.approx({0: 0.3, 1: 0.4})
    assert found.course == pytest.approx({0: 0.15, 1: 0.2})


def test_a_spread_is_what_effects_of_arm_and_seed_leave():
    # A corner above what they explain by 4 leaves 1, -1, -1, 1, of one degree.
    left, freedom = numbers.without_two_effects("aabb", "0101", [1, 2, 3, 8])
    assert left == pytest.approx([1, -1, -1, 1]) and freedom == 1
    assert numbers.without_two_effects("aab", "010", [1, 2, 9])[1] == 0
    ends = {("a", 0): 0, ("a", 1): 2, ("b", 0): 0, ("b", 1): 4}
    runs = [
        trained(arm, seed, levels=np.arange(8) < hits)
        for (arm, seed), hits in ends.items()
    ]
    # Residuals of 1/16 a table, two tables: 8 / 256 over 2 degrees, and its double.
    assert power.spread("x", [runs, runs]) is None
    found = power.spread("x", [runs] * 4)
    assert found.deviation == pytest.approx(math.sqrt(2 * 4 / 256))
    assert (found.runs, found.seeds, found.freedom) == (16, 2, 4)
    failing = [trained("c", seed, levels=[0, 0, 0, 0, seed]) for seed in (0, 1)]
    sound = [trained("d", seed, levels=[1]) for seed in (0, 1, 2)]
    assert power.without_failures([*sound, *failing]) == sound


def test_a_decline_is_dated_by_the_first_of_two_low_validations():
    assert signs.decline(record(0, [1], success=(0.5, 0.9, 0.7, 0.95, 0.8, 0.7))) == 5
    # What lies below a best that comes later has not declined from it.
    assert math.isnan(signs.decline(record(0, [1], success=(0.7, 0.7, 0.9, 0.85))))
    # A tenth below is not more than a tenth; one low validation is not two.
    assert math.isnan(signs.decline(record(0, [1], success=(0.9, 0.8, 0.8))))
    assert math.isnan(signs.decline(record(0, [1], success=(0.9, 0.7, 0.9, 0.7))))


def test_a_sign_counts_before_a_decline_and_anywhere_without_one(monkeypatch):
    falls, stays = (0.9, 0.9, 0.5, 0.5), (0.9,) * 4
    runs = [record(s, [1], success=falls if s < 3 else stays) for s in range(6)]
    at = {0: 2.0, 1: 3.0, 2: math.nan, 3: 3.0, 4: 4.0, 5: math.nan}
    monkeypatch.setattr(signs, "SIGNS", {"x": lambda run: at[run.seed]})
    (found,) = signs.tally(runs)
    # A sign at the decline itself is none before it.
    assert found == signs.Sign("x", 1, 3, at_all=2, by_then=1, others=3)
    assert not found.is_told_apart
    assert signs.Sign("x", 40, 41, at_all=3, by_then=1, others=45).is_told_apart
    assert "no sign comes before" in signs._finding("Bandit", [found])


def test_one_run_declines_and_two_decline():
    runs = [trained("a", seed, success=(0.9, 0.9, 0.5, 0.5)) for seed in (0, 1)]
    one, *_ = signs._environment("Bandit", runs[:1], pool_of(runs[0]))
    both, *_ = signs._environment("Bandit", runs, pool_of(*runs))
    assert "1 run of 1 seed, of which 1 declines (1 of `invented`)" in one
    assert "2 runs of 2 seeds, of which 2 decline (2 of `invented`)" in both


def test_the_std_on_bandit_is_the_sum_over_what_a_group_may_return():
    values = bandit_std.expected(0.15, 0.25, 2)
    # Two that pull the high-risk arm differ, by 1, in 3 of 8 cases.
    assert values[0] == 0 and values[-1] == pytest.approx(3 / 8 / math.sqrt(2))
    # One of each, half of the cases: they differ by 0.85 or 0.15.
    mixed = (0.25 * 0.85 + 0.75 * 0.15) / math.sqrt(2)
    middle = mixed / 2 + values[-1] / 4
    assert values[100] == pytest.approx(middle)
    assert bandit_std.halves_at(np.linspace(0, 2, 201)) == pytest.approx(0.495)
    run = record(0, [1], **{"train/success": (1.0, 0.5)})
    implied = bandit_std.predicted(trained("a", 0, run, **{"rollout.group_size": 2}))
    assert implied.series("filter/reward_std")[1] == pytest.approx([values[-1], middle])


def test_arms_of_a_seed_that_draw_alike_are_told_from_other_seeds():
    assert shared_draws.detrended(np.array([0.0, 3.0, 0.0]), 3) == pytest.approx(
        [-1.5, 2.0, -1.5]
    )
    draws = {s: np.random.default_rng(s).random(200) for s in (0, 1, 2)}
    runs = []
    for arm, size in (("a", 1.0), ("b", 0.5)):
        for seed, values in draws.items():
            series = {"train/success": size * values + np.arange(200) / 1000}
            runs.append(trained(arm, seed, record(seed, [1], **series), iterations=200))
    # What has other levels belongs to another group.
    other = record(0, [1], **{"train/success": 1 - draws[0]})
    runs.append(trained("c", 0, other, iterations=200, **{"env.low_reward": 0.1}))
    (found,) = shared_draws.correlations(pool_of(*runs))
    assert found.same.value == pytest.approx(1, abs=0.01)
    assert abs(found.different.value) < 0.2 and found.same.count == 3


def test_a_claims_p_value_is_that_of_its_t_test():
    mean = numbers.student([1.0, 2.0, 3.0])
    # t = 2 / (1 / sqrt(3)) with two degrees of freedom.
    bounds = mean.value, math.nan, math.nan, mean.count, mean.low, mean.high
    interval = statistics.Interval(*bounds)
    assert statistics.p_value(interval, 0) == pytest.approx(0.0742, abs=1e-4)
    assert statistics.p_value(interval, 2) == pytest.approx(1)
    runs = [
        trained(arm, seed, levels=np.arange(100) < hits + seed * (arm == "a"))
        for seed in range(3)
        for arm, hits in (("a", 80), ("b", 20))
    ]
    chosen = [
        Claim("above", "a", "b"),
        Claim("below", "a", "b", relation="less"),
        Claim("by 60", "a", "b", margin=0.61),
        Claim("equal", "b", margin=0.2),  # No interval: all seeds are equal.
    ]
    found = claims.judged(pool_of(*runs, claimed=tuple(chosen)))
    assert [(j.claim.text, j.is_decided, j.holds) for j in found] == [
        ("above", True, True),
        ("below", True, False),
        ("by 60", False, False),
    ]


def test_information_goes_with_success_after_prompts_and_runs_are_taken_out():
    """Prompts make both fall and rise together; what they leave runs against it."""
    noise = {"a": (1, -1, 1, -1), "b": (-1, 1, -1, 1)}
    points = [
        information.Point((arm,), step, 10 * step + left, 5 * step - left)
        for arm, values in noise.items()
        for step, left in enumerate(values)
    ]
    # Four ties of residuals 1 and four of -1, exactly opposed.
    assert information.within(points) == pytest.approx(-1)
    # Ranks of pairs, of which each step has the next two: they leave halves.
    assert information.within(points, ranks_first=True) == pytest.approx(-1)
    far = [*points[:7], dataclasses.replace(points[7], number=1000)]
    ranked = information.within(far, ranks_first=True)
    assert ranked == pytest.approx(information.within(points, ranks_first=True))
    # Of the steps 5²(1.5² + 0.5²)·4 = 250 and, with -left, 8 of the rest.
    first, second = information.between(points)
    assert first == pytest.approx(250 / 258)
    # A line in time takes the steps away, so that only the rest remains.
    assert second == pytest.approx(0, abs=1e-9)
    diagnoses = [
        {"step": s, "text": {"success": 0.5}, "information": {"x": float(s)}}
        for s in (10, 20)
    ]
    runs = [
        trained("a", 0, RunRecord(0, [], {}, diagnoses)),
        trained("b", 0, RunRecord(0, [], {}, diagnoses[1:])),
    ]
    assert "No step of a seed has two runs" in information._finding({})
    found = information.checkpoints(runs, "x")
    assert [point.step for point in found[0]] == [20, 20]


def test_a_run_that_two_studies_trained_counts_once():
    one = trained("a", 0, record(0, [1, 0], **{"train/success": (0.1, 0.2)}))
    again = trained("b", 0, one.record)
    other = trained("b", 1, record(1, [1, 0], **{"train/success": (0.1, 0.2)}))
    pool = pool_of(one, again, other)
    assert pool.runs == [one, other]
    assert pool.arms("invented")["b"] == {0: again, 1: other}
    assert trained("a", 0).arm == trained("a", 1).arm != trained("b", 1).arm


def test_a_run_was_measured_as_the_study_asked_that_diagnosed_it():
    """Another one, which comes first, may have planned it without a diagnosis."""
    plain = trained("a", 0)
    flags = ("--all", "--same_prompts")
    planned = dataclasses.replace(plain.planned, diagnose=flags)
    asked, other = dataclasses.replace(plain, planned=planned), trained("b", 1)
    pool = Pool({}, {"first": [plain, other], "second": [asked]})
    assert pool.runs == [plain, other]
    assert pool.diagnosed_by(plain) == flags and pool.diagnosed_by(other) == ()
