"""The table of the papers' claims in docs/results.md agrees with the studies' pages."""

import re

import pytest
from helpers.paths import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text()
STUDIES = ROOT / "docs" / "studies"
# Of each row the study, a pattern of the claims that it is about, and what it calls
# them, by the pattern's groups; a group that is missing is the usual symbols.
ROWS = (
    ("baseline", r"(\w+), (\w+): validation success rises and then falls", "{} {}"),
    ("baseline", r"(\w+), (\w+): training success rises and then falls", "{} {}"),
    ("baseline", r"(\w+), (\w+): the in-group standard deviation falls", "{} {}"),
    ("kept_share", r"(\w+), (\w+): the ([a-z ]+) of the prompts", "{} {} {}"),
    ("kept_share", r"(\w+), (\w+): with a quarter an iteration takes less", "{} {}"),
    ("kl_and_clip", r"On (\w+) without the KL term", "{}"),
    ("kl_and_clip", r"On (\w+) with clip-higher", "{}"),
    ("stabilized", r"On (\w+) StarPO-S ends above", "{}"),
    ("reuse", r"On (\w+), after 200 updates, .* one for (\d+) of them", "{} {}"),
    ("prompts_and_replies", r"Four episodes .* over to ([\w ]+) than one", "{}"),
    ("actions_per_turn", r"(?:On (new symbols) )?[Ff]ive actions a turn end", "{}"),
    ("actions_per_turn", r"(?:On (new symbols) )?[Ss]even actions a turn end", "{}"),
    ("thinking", r"On (\w+) an agent that thinks", "{}"),
    ("thinking", r"On (\w+) training adds more to an agent that thinks", "{}"),
    ("supervised", r"On (\w+) reinforcement ends above", "{}"),
    ("collapse", r"Half the rate ends above ([\w -]+)\.", "{}"),
    ("collapse", r"On validation half the rate ends above ([\w -]+)\.", "{}"),
    ("group_shape", r"On (\w+), \d+ prompts x (\d+) episodes, filtered", "{} {}"),
    ("variance_quarters", r"On (\w+) the quarter that varies most", "{}"),
    ("variance_quarters", r"On (\w+) the second quarter ends above", "{}"),
    ("filter_level", r"On (\w+) keeping prompts that vary most ends above", "{}"),
    ("filter_level", r"On (\w+) it ends above", "{}"),
    ("filter_choice", r"On (\w+) filtering by the spread .* by ([a-z ]+)\.", "{} {}"),
    ("information", r"(\w+), (\w+): checkpoints whose thoughts", "{} {}"),
    ("slip", r"At (\d+ %) slip", "{}"),
)
# In the order in which a row has them.
VERDICTS = (
    "holds",
    "holds by the bootstrap alone",
    "undecided",
    "does not hold by the bootstrap alone",
    "does not hold",
    "not judged",
    "not run",
)
MANY = 7  # So many claims with one verdict, and others, are counted, and not named.


def claims_of(study: str) -> list[tuple[str, str]]:
    """The claims on a study's page and their verdicts."""
    page = (STUDIES / f"{study}.md").read_text()
    judged = re.findall(r"^\* (.*)\n  \*\*([^:]*):", page, re.MULTILINE)
    waiting = re.findall(r"^\* (.*) \(no run of .*\)$", page, re.MULTILINE)
    return judged + [(claim, "not run") for claim in waiting]


def expected_cell(study: str, pattern: str, label: str) -> str:
    """The verdicts on a row's claims, each with the claims that have it."""
    found: dict[str, list[str]] = {}
    for claim, verdict in claims_of(study):
        match = re.match(pattern, claim)
        if match:
            name = label.format(*(group or "usual symbols" for group in match.groups()))
            verdict = verdict.removesuffix(" with these seeds")
            found.setdefault(verdict, []).append(name)
    assert set(found) <= set(VERDICTS)
    parts = []
    for verdict in filter(found.__contains__, VERDICTS):
        names = found[verdict]
        counted = len(found) > 1 and len(names) >= MANY
        said = f"the other {len(names)}" if counted else ", ".join(names)
        parts.append(f"**{verdict}**: {said}")
    return "; ".join(parts)


def rows_of_the_table() -> list[tuple[str, str]]:
    """The study and the last cell of each row."""
    return re.findall(
        r"^\| .* \| \[.*\]\(studies/(\w+)\.md\) \| (\*\*.*) \|$", RESULTS, re.MULTILINE
    )


def test_the_table_of_claims_has_a_row_for_each_claim_that_is_checked():
    assert [study for study, _ in rows_of_the_table()] == [study for study, *_ in ROWS]


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda i: f"{i}-{ROWS[i][0]}")
def test_each_row_says_the_verdicts_of_the_studys_page(index):
    _, cell = rows_of_the_table()[index]
    assert cell == expected_cell(*ROWS[index])
