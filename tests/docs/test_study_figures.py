"""Figures of the documents' prose about studies, computed again from the studies' data.

The pages themselves are written by the program that judges; these were written by hand.
"""

import functools
import math
import re

import numpy as np
import pytest
from absl import flags
from helpers.paths import ROOT
from scipy import special

from ragen_jax.cli.flags import define_config, parse, read_settings
from ragen_jax.settings.update_counts import updates_expected
from ragen_jax.studies import archive, definition, measures, verdicts
from ragen_jax.studies.run_record import RunRecord


def text_of(document: str) -> str:
    return " ".join((ROOT / "docs" / document).read_text().split())


@functools.cache
def runs_of(study: str) -> dict[str, list[RunRecord]]:
    """Arm -> the runs that the study's data file keeps."""
    found: dict[str, list[RunRecord]] = {}
    for item in archive.entries(ROOT / "docs" / "studies" / f"{study}.json"):
        found.setdefault(item["arm"], []).append(archive._record(item))
    return found


def values(study: str, arm: str, measure: str) -> np.ndarray:
    return np.array([measures.value(run, measure) for run in runs_of(study)[arm]])


def percent(shares: np.ndarray, digits: int = 1) -> str:
    return f"{100 * shares.mean():.{digits}f} %"


def test_what_clip_higher_costs_beside_five_seeds_is_welchs_interval():
    left = values("kl_and_clip", "Bandit, KL 0.001, clip 0.28", "test_success")
    right = values("baseline", "Bandit, PPO", "test_success")
    # Welch 1947, Biometrika 34: each arm's variance, and degrees by Satterthwaite.
    parts = np.array([x.var(ddof=1) / len(x) for x in (left, right)])
    freedom = parts.sum() ** 2 / (parts**2 / [len(left) - 1, len(right) - 1]).sum()
    half = special.stdtrit(freedom, 0.975) * math.sqrt(parts.sum())
    below = right.mean() - left.mean()
    low, high = 100 * (below - half), 100 * (below + half)
    said = f"{100 * below:.1f} below, by Welch's t {low:.1f} to {high:.1f}"
    assert said in text_of("results.md")


def test_training_of_kl_and_clip_ends_where_its_runs_end():
    arms = [arm for arm in runs_of("kl_and_clip") if arm.startswith("Bandit")]
    ends = {percent(values("kl_and_clip", arm, "last_success"), 0) for arm in arms}
    assert ends == {"98 %", "99 %"}
    assert "All four arms end training at 98 to 99 %," in text_of("results.md")


def test_the_filters_are_compared_with_what_is_solved_before_training():
    arm = "Bandit, spread of return, the lower half"
    before = percent(values("filter_choice", arm, "test_before"))
    assert f"where {before} are solved before training: 56.4" in text_of("results.md")


def test_an_iteration_of_figure_9_on_bandit_takes_what_its_first_three_seeds_took():
    plain, filtered = (
        values("stabilized", f"Bandit, {arm}", "seconds")[:3].mean()
        for arm in ("StarPO", "StarPO-S")
    )
    said = f"takes {filtered:.1f} s instead of {plain:.1f} on Bandit (three seeds"
    assert said in text_of("results.md")


def test_what_the_filters_of_bandit_keep_is_what_their_runs_kept():
    spread, length = (
        8 * values("filter_choice", f"Bandit, {score}, top-p 0.9", "kept_groups").mean()
        for score in ("spread of return", "length")
    )
    said = (
        f"top-p 0.9 keeps {spread:.1f} by the spread of returns and all {length:g} by"
    )
    text = text_of("studies/filter_choice.md")
    assert said in text and "min-p 0.05 and top-p 1 drop the same groups" in text
    min_p, top_p = (
        runs_of("filter_choice")[f"Bandit, spread of return, {title}"]
        for title in ("min-p 0.05", "top-p 1")
    )
    for one, other in zip(min_p, top_p, strict=True):
        assert one.test == other.test
        for name in ("train/success", "filter/kept_fraction", "update/actor_grad_norm"):
            assert np.array_equal(one.series(name)[1], other.series(name)[1])


def rates_left(study: str) -> dict[str, tuple[str, str, str]]:
    """Arm -> its seeds' updates, the most it can make, percent of the rate at the end.

    Each from the least to the greatest, as in "225 to 240". Arms whose data do not say
    how many prompts were kept are left out.
    """
    items = archive.entries(ROOT / "docs" / "studies" / f"{study}.json")
    settings, found = {}, {}
    for item in items:
        arm = item["arm"]
        if "filter/kept_fraction" not in item["series"]:
            continue  # Trained by a study that did not keep this curve.
        if arm not in settings:
            flag_values = flags.FlagValues()
            define_config(flag_values=flag_values)
            parse(["train.py", *item["arguments"]], flag_values)
            settings[arm] = read_settings(flag_values["config"].value)
        rollout, optimizer = settings[arm].rollout, settings[arm].optimizer
        assert optimizer.schedule == "cosine"
        _, kept = item["series"]["filter/kept_fraction"]
        rows = np.round(np.array(kept) * rollout.prompts * rollout.group_size)
        made = int(np.ceil(rows / optimizer.minibatch).sum())
        most = updates_expected(settings[arm])
        # By the last update, from the end of the warm-up on.
        passed = (made - 1 - optimizer.warmup) / (most - optimizer.warmup)
        rate = round(50 * (1 + math.cos(math.pi * passed)))
        found.setdefault(arm, []).append((made, most, rate))
    said = {}
    for arm, seeds in found.items():
        columns = [set(column) for column in zip(*seeds, strict=True)]
        ends = [sorted({min(column), max(column)}) for column in columns]
        said[arm] = tuple(" to ".join(map(str, end)) for end in ends)
    return said


@pytest.mark.slow  # Reads the settings of 26 arms.
def test_a_study_says_which_filters_end_above_the_lowest_rate(monkeypatch):
    monkeypatch.chdir(ROOT)
    end = "{0} of {1} and ends at {2} % of the highest rate"
    notes = {
        "filter_level": {
            "Sokoban, prompts": f"the arm of prompts on Sokoban makes {end}",
            "Bandit, prompts": "on Bandit {0} of {1}, and the other arms end at 0",
        },
        "group_shape": {
            "Bandit, 64 x 2, filtered": f"64 x 2 makes {end}",
            "Bandit, 32 x 4, filtered": "32 x 4 makes {0} and ends at {2} %",
            "Bandit, 8 x 16, filtered": "8 x 16 makes {0} and ends at {2} as the arms",
            "Sokoban, 64 x 2, filtered": "on Sokoban 64 x 2 makes {0} of {1} and ends"
            " at {2} %",
            "Sokoban, 32 x 4, filtered": "32 x 4 makes {0} and ends at {2} %.",
        },
        "filter_choice": {
            "Bandit, spread of entropy, top-p 0.9": "by the spread of entropy it makes"
            " {0} of {1} on Bandit and ends at {2} % of the highest rate",
            "Bandit, summed return, top-p 0.9": "by the summed return {0} and ends at"
            " {2} %; the others end at 0",
        },
        "information": {"Sokoban, filtered": f"Filtered Sokoban makes {end}"},
    }
    for study, arms in notes.items():
        found, text = rates_left(study), text_of(f"studies/{study}.md")
        for arm, note in arms.items():
            assert note.format(*found.pop(arm)) in text, (study, arm)
        assert {rate for _, _, rate in found.values()} <= {"0"}, study
    slips = ("2", "5", "10", "50")
    columns = zip(
        *(rates_left("slip")[f"slip {slip} %, filtered"] for slip in slips), strict=True
    )
    made, most, rates = (" and ".join(", ".join(x).rsplit(", ", 1)) for x in columns)
    said = f"make {made} of 800 updates and end at {rates} % of the highest rate"
    assert set(most.replace(" and", ",").split(", ")) == {"800"}
    assert said in text_of("studies/slip.md")


@pytest.mark.slow  # Bootstraps eight claims.
def test_the_claims_that_three_seeds_of_the_collapse_decide_are_counted():
    study = definition.load(ROOT / "configs" / "studies" / "collapse.py")
    five = runs_of("collapse")
    three = {arm: [r for r in runs if r.seed < 3] for arm, runs in five.items()}
    decided = [
        verdicts.judge(claim, five).verdict
        for claim in study.claims
        # Those about half the rate, and on validation, were asked of all five seeds.
        if claim.left != "half the rate" or claim.right == "plain GRPO"
        if claim.measure != "last_validation"
        if verdicts.judge(claim, three).verdict != verdicts.UNDECIDED
    ]
    assert len(decided) == 6
    assert decided.count(verdicts.HOLDS) == 2
    assert decided.count(verdicts.WEAKLY_HOLDS) == 2
    assert decided.count(verdicts.UNDECIDED) == 2
    said = (
        "Of six claims that the first three seeds decide, two hold by t with five (half"
        " the rate and the rollback end higher), two still by the bootstrap alone, and"
        " two are undecided"
    )
    assert said in text_of("echo_trap.md")


def test_the_spread_on_sokoban_is_that_of_the_runs():
    first, last = {}, {}
    for name in ("GRPO", "PPO"):
        series = [
            run.series("filter/reward_std")[1]
            for run in runs_of("baseline")[f"Sokoban, {name}"]
        ]
        first[name] = np.mean([each[:20].mean() for each in series])
        last[name] = np.mean([each[-20:].mean() for each in series])
    said = (
        f"groups falls from {first['GRPO']:.1f} to {last['GRPO']:.1f} (means of the"
        " first and last 20 iterations), and that of PPO does not"
        f" ({first['PPO']:.1f} and {last['PPO']:.1f})"
    )
    assert said in text_of("results.md")


def test_two_seeds_of_ppo_on_sokoban_lead_without_a_fall():
    leads = []
    for run in runs_of("baseline")["Sokoban, PPO"]:
        lead, success = measures.value(run, "std_lead"), run.series("train/success")[1]
        if not math.isnan(lead):
            leads.append(f"{lead:.0f}")
            assert success[-20:].mean() > success[:20].mean()
    said = f"gives two seeds of PPO a lead of {' and '.join(sorted(leads))} iterations"
    assert said in text_of("results.md") and len(leads) == 2


def test_the_table_of_the_echo_has_the_means_of_its_run():
    (run,) = [run for run in runs_of("collapse")["no KL"] if run.seed == 1]
    text = text_of("echo_trap.md")
    for first, last in ((6, 10), (21, 40), (41, 60), (61, 80), (81, 90), (91, 100)):
        means = []
        for name, factor in (
            ("train/success", 100),
            ("rollout/valid_reply_rate", 100),
            ("health/distinct_thoughts", 100),
        ):
            iterations, series = run.series(name)
            chosen = (iterations >= first) & (iterations <= last)
            means.append(f"{factor * series[chosen].mean():.0f}")
        success, valid, thoughts = means
        row = text.split(f"| {first} to {last} | ")[-1].replace("*", "").split(" | ")
        assert [row[0], row[4], row[5]] == [success, valid, thoughts], (first, last)


def test_the_seeds_that_20_points_of_the_collapse_need_are_those_of_the_power_page():
    page = text_of("studies/across.md")
    cells = page.split("| Bandit, constant, 0.0003 |")[1].split("|")
    needed = cells[6].strip()  # After runs, seeds, SD, 2, 5 and 10 points.
    assert f"{needed} seeds would be needed" in text_of("echo_trap.md")
    assert f"would need {needed} seeds" in text_of("results.md")


def test_of_banditrev_without_a_thought_most_failures_are_invalid_replies():
    def tested(title: str, when: str) -> np.ndarray:
        """[seeds, 2], success and the share of valid replies."""
        tests = [run.test for run in runs_of("thinking")[f"BanditRev, {title}"]]
        keys = ("success", "valid_reply_rate")
        return np.array([[test[when][key] for key in keys] for test in tests])

    before, after = tested("no thinking", "before"), tested("no thinking", "after")
    shares = [f"{100 * success / valid:.1f}" for success, valid in after]
    right = " and ".join([", ".join(shares[:-1]), shares[-1]])
    said = (
        f"{percent(after[:, 1])} of the test's replies without a thought are valid"
        f" ({percent(before[:, 1])} before training) and"
        f" {percent(tested('thinking', 'after')[:, 1])} of those with one; of the valid"
        f" ones without a thought {right} % choose right"
    )
    assert said in text_of("results.md")


def test_the_pages_say_how_many_claims_remain_after_holms_correction():
    left = {}
    for page in sorted((ROOT / "docs" / "studies").glob("*.md")):
        found = re.search(
            r"(\d+) holds? or do(?:es)? not hold, of which Holm's correction over this"
            r" page leaves (\d+)",
            page.read_text(),
        )
        if found:
            left[page.stem] = (int(found[1]), int(found[2]))
    text = text_of("results.md")
    some = {name: found for name, found in left.items() if found[1]}
    none = {name: found for name, found in left.items() if not found[1]}
    for name, (decided, remaining) in some.items():
        assert f"`{name}` {remaining} of {decided}," in text
    assert none == {"collapse": (12, 0), "reuse": (2, 0), "kl_and_clip": (1, 0)}
    assert "none of `collapse`'s 12, `reuse`'s 2 and `kl_and_clip`'s 1;" in text
    assert len(some) == text.count(
        " of ", text.index("`risk` 4"), text.index("none of")
    )
