"""A study of two arms, files of studies, and records of runs that never trained."""

import json

import numpy as np

from ragen_jax.studies.definition import Claim, Study
from ragen_jax.studies.run_record import RunRecord

STUDY = Study(
    name="two",
    question="Is one better than other?",
    source="nothing",
    config="configs/frozenlake.py",
    changes={"iterations": 10},
    arms={"one": {}, "other, too": {"config": "configs/bandit.py"}},
    seeds=(0, 1),
    claims=(Claim("one is better", "one", "other, too"),),
    smoke={"iterations": 1},
)


def study_file(name: str, **fields) -> str:
    """The text of a file that defines a study of one arm, or with other fields."""
    usual = dict(
        question="?",
        source="nothing",
        config="configs/frozenlake.py",
        changes={"iterations": 2},
        arms={"one": {}},
        seeds=(0, 1),
    )
    given = {"name": name, **usual, **fields}
    texts = {  # JSON where it can be: with double quotes, as the rest of the code.
        key: repr(value) if isinstance(value, tuple) else json.dumps(value)
        for key, value in given.items()
    }
    lines = "".join(f"        {key}={text},\n" for key, text in texts.items())
    return (
        "from ragen_jax.studies.definition import Study\n\n\n"
        f"def get_study():\n    return Study(\n{lines}    )\n"
    )


def record(seed, levels, success=(), **series):
    """A run with these successes by test level and a series of each metric."""
    series = {"validation/success": success} | series
    length = max(len(values) for values in series.values())
    records = [
        {"iteration": i + 1} | {k: v[i] for k, v in series.items() if i < len(v)}
        for i in range(length)
    ]
    levels = np.asarray(levels, float)
    test = {
        "before": {"success": 0.25},
        "after": {"success": levels.mean()},
        "gain": levels.mean() - 0.25,
        "after_by_level": levels.tolist(),
        "before_by_level": np.full(len(levels), 0.25).tolist(),
    }
    return RunRecord(seed, records, test)
