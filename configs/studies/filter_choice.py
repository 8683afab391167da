"""Strategies and scores of the filter (arXiv:2604.06268, Table 9).

python launch/study.py --study=configs/studies/filter_choice.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_STRATEGIES = {
    "top-p 1": ("top_p", 1.0),
    "top-p 0.9": ("top_p", 0.9),
    "top-p 0.5": ("top_p", 0.5),
    "min-p 0.05": ("min_p", 0.05),
    "min-p 0.1": ("min_p", 0.1),
    "min-p 0.2": ("min_p", 0.2),
    "a quarter": ("top_fraction", 0.25),
    "half": ("top_fraction", 0.5),
}
_SCORES = {
    "summed return": "return_sum",
    "entropy": "entropy",
    "spread of entropy": "entropy_std",
    "length": "length",
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"spread of return, {title}": {
            "filter.strategy": strategy,
            "filter.fraction": fraction,
        }
        for title, (strategy, fraction) in _STRATEGIES.items()
    }
    arms |= {
        f"{title}, top-p 0.9": {
            "filter.strategy": "top_p",
            "filter.fraction": 0.9,
            "filter.metric": metric,
        }
        for title, metric in _SCORES.items()
    }
    arms["spread of return, the lower half"] = {
        "filter.strategy": "top_fraction",
        "filter.fraction": 0.5,
        "filter.prefer": "smallest",
    }
    by_spread = "spread of return, top-p 0.9"
    scores = tuple(
        Claim(
            text=f"Filtering by the spread of returns ends above filtering by {title}.",
            left=by_spread,
            right=f"{title}, top-p 0.9",
        )
        for title in _SCORES
    )
    others = (
        Claim(
            text="The upper half by spread ends above the lower half.",
            left="spread of return, half",
            right="spread of return, the lower half",
        ),
        Claim(
            text="Dropping prompts of little spread ends above dropping only those of"
            " none.",
            left=by_spread,
            right="spread of return, top-p 1",
        ),
    )
    return Study(
        name="filter_choice",
        question="By what should prompts be chosen, and how many?",
        source="arXiv:2604.06268, Table 9",
        config="configs/sokoban.py",
        changes={"iterations": 200, "every.evaluate": 20},
        arms=arms,
        measures=(
            "test_success",
            "best_validation",
            "collapsed",
            "last_entropy",
            "last_reward_std",
        ),
        curves=("validation/success", "filter/kept_fraction"),
        claims=(*scores, *others),
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        notes="PPO without a KL term. A score's unit decides what top-p keeps: a summed"
        " return may be negative, and then nothing is kept and the update is skipped.",
    )
