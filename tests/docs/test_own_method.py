"""docs/algorithms.md's own estimator, score and loss work in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers.paths import ROOT

SECTION = (
    (ROOT / "docs" / "algorithms.md")
    .read_text()
    .split("## Your own estimator, filter or loss\n")[1]
    .split("\n## ")[0]
)
# Run in the copy, behind the document's own test of its estimator: an update of the
# tests' record with the three of them, traced.
PROGRAM = """
import functools
import jax
from ragen_jax import starpo
from ragen_jax.learning import filters, losses
from ragen_jax.learning.groups import Grouping, group_statistics
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.training import weights

test_each_groups_median_is_subtracted_from_its_returns()

rows, episodes = updates.record()
chosen = updates.settings(estimator="median", filter__metric="solved")
measure, statistic = filters.METRICS["solved"]
solved = episodes.replace(success=episodes.turns > 1)
grouping = Grouping(solved.group, updates.PROMPTS)
score = statistic(group_statistics(measure(chosen, rows, solved), grouping))
by_group = np.asarray(solved.success, float).reshape(updates.PROMPTS, -1)
np.testing.assert_allclose(score, by_group.var(axis=1, ddof=1), atol=1e-6)

# That of the clipped loss at a ratio of 1; at 2 it is not 0, but -4 s (1 - s) 2 with
# s = sigmoid(1).
gradient = jax.grad(
    lambda new: losses.soft_loss(
        new, jnp.zeros((1, 2)), jnp.ones((1, 2)), clip_low=0.2, clip_high=0.28
    ).sum()
)(jnp.log(jnp.array([[1.0, 2.0]])))
np.testing.assert_allclose(gradient, [[-1.0, -1.572895]], rtol=1e-5)
calls, own = [], losses.soft_loss
losses.soft_loss = lambda *a, **options: calls.append(a) or own(*a, **options)
plan = UpdatePlan(
    chosen, updates.CONFIG, None, jnp.float32, None, (updates.LENGTH,), (),
    weights.assembler(None),
)
use = updates.first_use(chosen)
learn = functools.partial(starpo.update, plan)
jax.eval_shape(learn, updates.new_state(chosen), {}, {}, rows, episodes, use)
assert calls
"""


def _insert(path, before: str, text: str) -> None:
    """The text in front of the only place where the file has `before`."""
    source = path.read_text()
    assert source.count(before) == 1, (path, before)
    path.write_text(source.replace(before, f"{text}{before}"))


@pytest.mark.slow  # A process that imports the package anew.
def test_the_steps_of_the_document_make_an_estimator_a_score_and_a_loss(tmp_path):
    package = tmp_path / "ragen_jax"
    shutil.copytree(
        ROOT / "ragen_jax", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    learning, choices = package / "learning", package / "settings" / "choices.py"
    estimator, estimator_fact, its_test, score, score_fact, loss = re.findall(
        r"```python\n(.*?)```", SECTION, re.DOTALL
    )
    entries = re.findall(r'Then `("\w+": .*?,)` in `', SECTION)
    table = "ESTIMATORS: dict["
    _insert(learning / "estimators.py", table, f"{estimator}\n\n")
    _insert(learning / "estimators.py", '    "ppo": ppo,\n', f"    {entries[0]}\n")
    _insert(choices, '    "ppo": Estimator(\n', estimator_fact)
    _insert(learning / "filters.py", "# Metric -> (a", f"{score}\n\n")
    _insert(
        learning / "filters.py", '    "return_std": (_returns', f"    {entries[1]}\n"
    )
    _insert(choices, '    "return_std": FilterMetric(\n', score_fact)
    _insert(learning / "losses.py", "def clipped_policy_loss(", f"{loss}\n\n")
    objectives = learning / "objectives.py"
    called = objectives.read_text()
    assert called.count("losses.clipped_policy_loss(") == 1
    objectives.write_text(
        called.replace("losses.clipped_policy_loss(", "losses.soft_loss(")
    )
    done = subprocess.run(
        [sys.executable, "-c", its_test + PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
