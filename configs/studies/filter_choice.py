"""Strategies and scores of the filter (arXiv:2604.06268, Table 9).

python launch/study.py --study=configs/studies/filter_choice.py --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

# The paper's table is of Sokoban; episodes of Bandit, one turn each, cost far less.
_ENVIRONMENTS = {
    "Sokoban": {"config": "configs/sokoban.py"},
    "Bandit": {"config": "configs/bandit.py", "iterations": 60, "every.evaluate": 10},
}
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
    choices = {
        f"spread of return, {title}": {
            "filter.strategy": strategy,
            "filter.fraction": fraction,
        }
        for title, (strategy, fraction) in _STRATEGIES.items()
    }
    choices |= {
        f"{title}, top-p 0.9": {
            "filter.strategy": "top_p",
            "filter.fraction": 0.9,
            "filter.metric": metric,
        }
        for title, metric in _SCORES.items()
    }
    choices["spread of return, the lower half"] = {
        "filter.strategy": "top_fraction",
        "filter.fraction": 0.5,
        "filter.prefer": "smallest",
    }
    arms = {
        f"{name}, {title}": {**chosen, **choice}
        for name, chosen in _ENVIRONMENTS.items()
        for title, choice in choices.items()
    }
    claims = tuple(
        Claim(
            text=f"On {name} {text}.", left=f"{name}, {left}", right=f"{name}, {right}"
        )
        for name in _ENVIRONMENTS
        for text, left, right in _claims()
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
            "last_validation",
            "kept_groups",
            "collapsed",
            "last_entropy",
            "last_reward_std",
        ),
        curves=("validation/success", "filter/kept_fraction"),
        claims=claims,
        paper={"iterations": 400},
        paper_arms={
            arm: {"rollout.actions_per_turn": 2} for arm in arms if "Sokoban" in arm
        },
        notes="PPO without a KL term. A score's unit decides what top-p keeps: a summed"
        " return may be negative, and then nothing is kept and the update is skipped."
        " Of Bandit's eight groups top-p 0.9 keeps 7.2 by the spread of returns and all"
        " 8 by length, which there is no filter; min-p 0.05 and top-p 1 drop the same"
        " groups, those of no spread, and their runs are identical. The learning rate"
        " falls to 0 over the most updates that an arm can make (the paper's is"
        " constant), and top-p may make fewer: by the spread of entropy it makes 155 to"
        " 211 of 240 on Bandit and ends at 4 to 30 % of the highest rate, by the summed"
        " return 227 to 230 and ends at 1 %; the others end at 0. So the claims about"
        " those two scores compare rates as well.",
    )


def _claims() -> list[tuple[str, str, str]]:
    """What is claimed of each environment: in words, and of which two choices."""
    by_spread = "spread of return, top-p 0.9"
    scores = [
        (
            f"filtering by the spread of returns ends above filtering by {title}",
            by_spread,
            f"{title}, top-p 0.9",
        )
        for title in _SCORES
    ]
    return [
        *scores,
        (
            "the upper half by spread ends above the lower half",
            "spread of return, half",
            "spread of return, the lower half",
        ),
        (
            "dropping prompts of little spread ends above dropping only those of none",
            by_spread,
            "spread of return, top-p 1",
        ),
    ]
