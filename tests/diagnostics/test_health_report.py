"""The health report: what goes into the page, and the page in a real browser."""

import gzip
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import browser, warm_process
from helpers.paths import ROOT

from ragen_jax.diagnostics import episode_log, report, rollbacks
from ragen_jax.diagnostics.report import data as data_lib
from ragen_jax.diagnostics.report import page
from ragen_jax.errors import UserError
from ragen_jax.reporting import plots

# What a model might write, and no page may run or lose.
EVIL = (
    "</script><script>document.title='broken'</script>"
    "<img src=x onerror=\"document.title='broken'\"> & \u2028 @@DATA@@ <!-- ]]>"
)


def episode(iteration: int, phase: str = "train", **changes) -> dict:
    """An episode of one turn as the log holds it."""
    turn = {
        "message": "P _ G\n_ O _\nTurn 1 of 5. Actions left: 10.",
        "thought": f"The goal is to the right. {EVIL}",
        "answer": "<answer>Right || Right</answer>",
        "actions": ["Right", "Right"],
        "reward": 1.0,
        "valid": True,
        "tokens": ["The", " goal", EVIL, "<answer>", "Right", "</answer>"],
        "logprob": [-0.1, -0.5, -2.0, -0.01, -0.2, 0.0],
        "entropy": [0.3, 0.9, 1.5, 0.1, 0.4, 0.0],
        "advantage": [1.0, -0.5, 0.25, 1.0, 1.0, 1.0],
        "value": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    }
    usual = {
        "iteration": iteration,
        "phase": phase,
        "environment": "frozen_lake",
        "level": iteration % 7,
        "rollout": 0,
        "success": iteration % 3 > 0,
        "return": float(iteration % 3),
        "end": "environment_done",
        "system": f"You play a game. {EVIL}",
        "turns": [turn],
    }
    return usual | changes


def write_run(folder: Path, seed: int, episodes: list[dict], iterations=60) -> Path:
    """The files that a run leaves behind, of a success that rises and then falls."""
    folder.mkdir()
    lines = []
    for i in range(1, iterations + 1):
        success = min(i, 40) / 50 - max(0, i - 40) / 40 + (i * seed) % 5 / 100
        values = {
            "train/success": round(success, 3),
            "train/return_with_penalty": round(success - 0.05, 3),
            "filter/reward_std": round(0.4 - max(0, i - 32) / 30, 3),
            "rollout/entropy": round(0.3 + max(0, i - 40) / 20, 3),
            "health/distinct_thoughts": None if i == 1 else 0.8,
        }
        lines.append(json.dumps({"iteration": i} | values))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"seed": seed, "optimizer": {"actor_lr": 1e-4}}
    (folder / "settings.json").write_text(json.dumps(settings))
    sides = {"success": 0.4, "success_standard_error": 0.03, "turns": 3.0}
    test = {"before": sides, "after": sides | {"success": 0.8}, "gain": 0.4}
    (folder / "test.json").write_text(json.dumps(test | {"gain_standard_error": 0.02}))
    episode_log.append(folder, episodes)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    both = [episode(0, "before", level=3), episode(60, "after", level=3)]
    return write_run(tmp_path / "one", 1, [episode(i) for i in range(1, 9)] + both)


class Scripts(html.parser.HTMLParser):
    """The script elements of a page, as a parser of HTML finds them."""

    def __init__(self):
        super().__init__()
        self.found, self.is_in, self.tags = [], False, []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.found.append((dict(attrs), ""))
            self.is_in = True

    def handle_endtag(self, tag):
        self.is_in = self.is_in and tag != "script"

    def handle_data(self, data):
        if self.is_in:
            attributes, text = self.found[-1]
            self.found[-1] = attributes, text + data


def test_texts_of_a_model_stay_data(run):
    text = report.write_report(run).read_text()
    scripts = Scripts()
    scripts.feed(text)
    assert [attributes for attributes, _ in scripts.found] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    stored = json.loads(scripts.found[0][1])
    assert "<" not in scripts.found[0][1]
    assert stored["episodes"][0]["turns"][0]["tokens"][2] == EVIL
    assert "img" not in scripts.tags
    source = scripts.found[1][1]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert way not in source
    assert "eval(" not in source


def test_the_page_asks_nothing_of_a_network(run):
    text = report.write_report(run).read_text()
    without = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(src|href)=[\"']?(?!#)[a-z]+:", without)
    assert "https://" not in without and "http://" not in without
    assert "default-src 'none'" in text and "@import" not in text


def test_runs_that_differ_in_the_seed_alone_are_one_series(tmp_path):
    runs = [write_run(tmp_path / f"seed{s}", s, []) for s in (1, 2)]
    other = write_run(tmp_path / "other", 1, [])
    changed = {"seed": 1, "optimizer": {"actor_lr": 1e-3}}
    (other / "settings.json").write_text(json.dumps(changed))
    found = data_lib.gather([*runs, other])
    assert [one["runs"] for one in found["series"]] == [[0, 1], [2]]
    assert found["differences"] == [
        {"key": "optimizer.actor_lr", "values": ["0.0001", "0.0001", "0.001"]},
        {"key": "seed", "values": ["1", "2", "1"]},
    ]
    assert [chart["metric"] for chart in found["charts"]][:2] == [
        "train/success",
        "train/return_with_penalty",
    ]
    assert found["tests"][0]["gain"] == 0.4
    # Of runs whose settings are not known it is not known that they are the same.
    for folder in runs:
        (folder / "settings.json").unlink()
    found = data_lib.gather(runs)
    assert [one["runs"] for one in found["series"]] == [[0], [1]]


def test_the_alarm_marks_the_collapse(run):
    (found,) = data_lib.gather([run])["runs"]
    levels = [mark["level"] for mark in found["marks"]]
    assert "collapse" in levels
    assert min(mark["first"] for mark in found["marks"]) > 30


def test_neighbouring_iterations_of_one_level_are_one_mark():
    levels = ["healthy", "watch", "watch", "collapse", "healthy", "watch"]
    marks = data_lib.spans(range(1, 7), levels, list("abcdef"))
    assert [(m["first"], m["last"], m["why"]) for m in marks] == [
        (2, 3, "b"),
        (4, 4, "d"),
        (6, 6, "f"),
    ]


def test_what_a_run_went_back_over_is_told_though_its_record_is_gone(tmp_path):
    folder = write_run(tmp_path / "one", 1, [], iterations=20)
    rollbacks.note_rollback(folder, 41, 10, f"a collapse {EVIL}", "learning_rate")
    (found,) = data_lib.gather([folder])["runs"]
    assert found["marks"] == []
    assert [(r["from"], r["to"]) for r in found["rollbacks"]] == [(41, 10)]
    assert "run.rollbacks" in (Path(page.__file__).parent / "script.js").read_text()


def test_the_record_of_the_test_ends_no_mark(run):
    (before,) = data_lib.gather([run])["runs"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    test = {"iteration": 55, "test/success": 0.5}
    lines.insert(55, json.dumps(test))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (after,) = data_lib.gather([run])["runs"]
    assert after == before


def test_a_test_says_after_which_iteration_it_was(run):
    """While a run that had ended is continued, its test is an old one."""
    (unknown,) = data_lib.gather([run])["tests"]
    assert unknown["iteration"] is None and unknown["environment"] == ""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines.insert(30, json.dumps({"iteration": 30, "test/success": 0.5}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    test = json.loads((run / "test.json").read_text())
    (run / "test.json").write_text(json.dumps({"lake": test, "room": test}))
    lake, room = data_lib.gather([run])["tests"]
    assert lake["iteration"] == room["iteration"] == 30
    assert (lake["environment"], room["environment"]) == ("lake", "room")


def test_a_run_that_learned_nothing_says_so_at_the_top_unless_it_was_continued(run):
    assert data_lib.gather([run])["warnings"] == []
    warning = f"nothing was learned: {EVIL}"
    test = json.loads((run / "test.json").read_text()) | {"warning": warning}
    (run / "test.json").write_text(json.dumps({"lake": test, "room": test}))
    assert data_lib.gather([run])["warnings"] == []
    lines = (run / "metrics.jsonl").read_text()
    lines += json.dumps({"iteration": 60, "test/success": 0.5}) + "\n"
    (run / "metrics.jsonl").write_text(lines)
    assert data_lib.gather([run])["warnings"] == [f"one: {warning}"]
    folder = Path(page.__file__).parent
    assert 'id="warnings"' in (folder / "page.html").read_text()
    assert "data.warnings.map" in (folder / "script.js").read_text()


def test_what_a_test_of_one_level_does_not_know_is_no_obstacle(run):
    """The standard error of a single level is not known."""
    test = json.loads((run / "test.json").read_text())
    test["gain_standard_error"] = test["before"]["success_standard_error"] = math.nan
    (run / "test.json").write_text(json.dumps(test))
    (shown,) = data_lib.gather([run])["tests"]
    assert shown["gain_standard_error"] is None
    assert shown["before"]["success_standard_error"] is None
    report.write_report(run)


def test_rewards_that_are_no_numbers_are_no_obstacle(tmp_path):
    lost = episode(1, **{"return": math.nan})
    lost["turns"][0]["reward"] = math.inf
    folder = write_run(tmp_path / "one", 1, [lost])
    log = folder / episode_log.FILE
    assert "NaN" not in gzip.decompress(log.read_bytes()).decode()
    older = gzip.compress(f"{json.dumps(lost)}\n".encode())  # As it was written once.
    log.write_bytes(log.read_bytes() + older)
    for shown in data_lib.gather([folder])["episodes"]:
        assert shown["return"] is None and shown["turns"][0]["reward"] is None
    report.write_report(folder)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("test.json", '{"after": {"succ', "cut off"),
        ("test.json", "[" * 10**5, "cut off"),
        ("test.json", '{"a": %s}' % ("[" * 800 + "]" * 800), "cut off"),
        ("test.json", "[]", "no object"),
        ("test.json", '{"rooms": 3}', "what was before or after"),
        ("test.json", '{"after": {"success": 1}}', "what was before or after"),
        ("settings.json", '{"seed"', "cut off"),
        ("settings.json", "3", "no object"),
        (episode_log.FILE, "an episode", "damaged behind its first 0 episodes"),
        ("metrics.jsonl", '{"iteration": 1, "train/success": "1"}\n', "Line 1 of"),
    ],
    ids=range(10),
)
def test_a_damaged_file_is_named_and_no_part_of_the_page_is_silently_left_out(
    run, name, text, why
):
    (run / name).write_text(text)
    with pytest.raises(UserError) as caught:
        report.write_report(run)
    assert str(run / name) in str(caught.value) and why in str(caught.value)
    assert (run / name).read_text() == text


def test_runs_of_one_name_are_told_apart_and_a_run_named_twice_is_one(tmp_path):
    for study in "one", "other":
        (tmp_path / study).mkdir()
    same = [write_run(tmp_path / study / "seed0", 1, []) for study in ("one", "other")]
    third = write_run(tmp_path / "other" / "xseed0", 1, [])
    found = data_lib.gather([*same, third, tmp_path / "one" / ".." / "one" / "seed0"])
    names = [one["name"] for one in found["runs"]]
    assert names == ["one/seed0", "other/seed0", "xseed0"]
    assert found["series"][0]["runs"] == [0, 1, 2]


def in_node(code: str):
    """What an expression over the page's functions of series is, by node."""
    source = (Path(page.__file__).parent / "series.js").read_text()
    program = f"{source}\nconsole.log(JSON.stringify({code}));"
    done = subprocess.run(
        ["node", "-e", program], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


in_javascript = pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed here"
)


@in_javascript
def test_a_mean_over_runs_ends_where_the_first_of_them_ends():
    runs = [
        {"iterations": [1, 2, 3], "values": {"x": [0.0, None, 0.0]}},
        {"iterations": [1, 2, 3, 4], "values": {"x": [1.0, 1.0, 0.5, 1.0]}},
        {"iterations": [1, 2], "values": {}},  # Has no such metric.
    ]
    lines = in_node(f"curves({json.dumps(runs)}, 'x')")
    assert [[p["x"] for p in line] for line in lines] == [[1, 3], [1, 2, 3, 4]]
    assert in_node(f"band({json.dumps(lines)})") == [
        {"x": 1, "mean": 0.5, "low": 0, "high": 1},
        {"x": 3, "mean": 0.25, "low": 0, "high": 0.5},
    ]


@in_javascript
def test_a_change_from_or_to_what_is_not_known_is_not_known():
    found = "[change(0.25, 1), change(null, 0.5), change(0.5, null), change(0.5)]"
    assert in_node(found) == [0.75, None, None, None]


@in_javascript
def test_the_smoothed_line_of_the_page_is_that_of_the_runs_picture():
    values = np.random.default_rng(0).normal(size=23)
    points = [{"x": i, "mean": value} for i, value in enumerate(values.tolist())]
    found = in_node(f"smooth({json.dumps(points)}, {plots.REACH})")
    assert [point["x"] for point in found] == list(range(23))
    expected = plots.smooth(values, plots.REACH)
    np.testing.assert_allclose([point["mean"] for point in found], expected)


def test_a_folder_without_a_run_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no metrics.jsonl .* give the workdir"):
        report.write_report(tmp_path)


@pytest.mark.parametrize("flag", ["workdir", "compare"])
def test_a_folder_that_is_not_there_is_refused_by_the_name_of_its_flag(tmp_path, flag):
    (tmp_path / "here").mkdir()
    folders = {"workdir": "here", "compare": "here"} | {flag: "none"}
    arguments = [f"--{name}={tmp_path / path}" for name, path in folders.items()]
    script = ROOT / "launch" / "report.py"
    ended = warm_process.attempt(script, arguments, tmp_path)
    assert ended.code == 2
    assert f"--{flag}={tmp_path}/none: there is no such folder; give" in ended.errors


def test_data_that_holds_the_templates_marks_is_put_in_as_it_is():
    text = page.embedded({"a": "@@STYLE@@</script>\u2028\ud800"})
    # A half of a character, which no file can hold, becomes a question mark.
    assert json.loads(text.encode()) == {"a": "@@STYLE@@</script>\u2028?"}
    assert "<" not in text and "\u2028" not in text


# In Chromium --------------------------------------------------------------------------

LEGEND = "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you on the goal."
ROW = "document.querySelector('.row[aria-selected=true]')"
PICKED = f"{ROW}.getAttribute('aria-posinset')"


def timed(code: str) -> str:
    """JavaScript for the milliseconds that some takes."""
    start, end = "const start = performance.now();", "return performance.now() - start"
    return f"(() => {{ {start} {code}; {end} }})()"


@pytest.fixture(scope="module")
def browser_page(tmp_path_factory):
    """The page of a run with 10,002 episodes, open in a browser, the list in focus."""
    place = tmp_path_factory.mktemp("browser")
    system = f"You play a game. {LEGEND} {EVIL}"
    both = [
        episode(0, "before", level=3, system=system),
        episode(60, "after", level=3, system=system),
    ]
    folder = write_run(place / "run", 1, both)
    data = data_lib.gather([folder])
    data["episodes"] += [{"run": 0, **episode(i % 200)} for i in range(10_000)]
    path = folder / report.FILE
    path.write_text(page.render(data))
    with browser.browse(place) as opened:
        opened.open(path)
        opened.evaluate("document.getElementById('list').focus()")
        yield opened


in_chromium = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="Chromium is not installed here"
)


@pytest.mark.slow
@in_chromium
def test_ten_thousand_episodes_open_in_a_browser_and_no_text_is_run(browser_page):
    ask = browser_page.evaluate
    # A text of an episode that was run would have changed it.
    assert ask("document.title") == "Health of run"
    assert ask("document.getElementById('count').textContent").startswith("10002 of")
    options = ask("document.querySelectorAll('[role=option]').length")
    assert 5 < options < 100  # Only what is in view exists.
    assert ask("document.querySelectorAll('figure svg').length") == 5
    assert ask("document.querySelectorAll('img').length") == 0
    shown = ask("document.getElementById('episode').textContent")
    assert "<img src=x onerror=" in shown
    assert ask("performance.getEntriesByType('resource').length") == 0  # No network.


@pytest.mark.slow
@in_chromium
def test_keys_walk_through_ten_thousand_episodes_without_a_stall(browser_page):
    ask, press = browser_page.evaluate, browser_page.press
    press("Home")
    assert ask(PICKED) == "1"
    press("ArrowDown", "PageDown", "ArrowUp")
    assert ask(PICKED) == "11"
    press("End")
    assert ask(PICKED) == "10002"
    assert ask(f"{ROW}.getBoundingClientRect().height") == 28  # In view, and drawn.
    # A step draws one row at most: those that stay in view stay as they are.
    ask("pick(5000); window.before = new Set(rows.children); pick(5001)")
    drawn = ask("[...rows.children].filter((row) => !before.has(row)).length")
    assert drawn <= 1
    # No stall, on a machine that may be busy: a second a step, near or far.
    assert ask(timed("for (let i = 5000; i < 5010; i++) pick(i)")) < 10_000
    assert ask(timed("for (let i = 0; i < 10; i++) pick(i * 997)")) < 10_000
    assert ask(timed("refilter()")) < 5000


@pytest.mark.slow
@in_chromium
def test_the_same_level_before_and_after_stands_side_by_side_with_its_boards(
    browser_page, tmp_path
):
    ask, press = browser_page.evaluate, browser_page.press
    ask("filters.phase.value = 'before'; refilter()")
    ask("document.getElementById('list').focus()")
    press("c")
    assert ask("document.querySelectorAll('.card').length") == 2
    texts = ask("[...document.querySelectorAll('.card h3')].map((h) => h.textContent)")
    assert ["before" in texts[0], "after" in texts[1]] == [True, True]
    # The board of the message, two rows of three cells, coloured by the legend.
    board = "document.querySelector('svg.board')"
    assert ask(f"{board}.querySelectorAll('rect').length") == 6
    said = ask(f"[...{board}.querySelectorAll('text')].map((t) => t.textContent)")
    assert said == ["P", "G", "O"]
    cells = f"[...{board}.querySelectorAll('rect')]"
    colours = ask(f"{cells}.map((cell) => cell.getAttribute('fill'))")
    assert colours[4] != colours[2] != colours[1] == colours[3]  # hole, goal, ice
    # To be looked at.
    pictures = Path(os.environ.get("RAGEN_JAX_SCREENSHOTS", tmp_path))
    for name, place in (("episodes", "getElementById('browser')"), ("top", "body")):
        ask(f"document.{place}.scrollIntoView()")
        browser_page.screenshot(pictures / f"report_{name}.png")
        assert (pictures / f"report_{name}.png").stat().st_size > 20_000
