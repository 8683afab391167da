"""How many prompts the uncertainty filter keeps (arXiv:2504.20073, Figure 7).

python launch/study.py --study=configs/studies/kept_share.py --jobs=2 --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {"Bandit": "configs/bandit.py", "FrozenLake": "configs/frozenlake.py"}
_SHARES = {
    "25": {"filter.strategy": "top_fraction", "filter.fraction": 0.25},
    "50": {"filter.strategy": "top_fraction", "filter.fraction": 0.5},
    "75": {"filter.strategy": "top_fraction", "filter.fraction": 0.75},
    "100": {},  # No filter; so far the runs of the study "baseline".
}
_PARTS = {"25": "quarter", "50": "half", "75": "three quarters"}


def get_study() -> Study:
    """The study."""
    groups = [
        (name, config, estimator)
        for name, config in _ENVIRONMENTS.items()
        for estimator in ("ppo", "grpo")
    ]
    arms = {
        f"{name}, {estimator.upper()}, {share} %": {
            "config": config,
            "estimator": estimator,
            **chosen,
        }
        for name, config, estimator in groups
        for share, chosen in _SHARES.items()
    }
    better = tuple(
        Claim(
            text=f"{name}, {estimator.upper()}: the {part} of the prompts that vary"
            " most teach more than all of them.",
            left=f"{name}, {estimator.upper()}, {share} %",
            right=f"{name}, {estimator.upper()}, 100 %",
        )
        for name, _, estimator in groups
        for share, part in _PARTS.items()
    )
    faster = tuple(
        Claim(
            text=f"{name}, {estimator.upper()}: with a quarter an iteration takes"
            " less time.",
            left=f"{name}, {estimator.upper()}, 25 %",
            right=f"{name}, {estimator.upper()}, 100 %",
            measure="seconds",
            relation="less",
        )
        for name, _, estimator in groups
    )
    return Study(
        name="kept_share",
        question="Does keeping only the prompts whose returns vary most delay the"
        " collapse, and how few are best?",
        source="arXiv:2504.20073, Figure 7",
        config="configs/frozenlake.py",
        changes={
            "algorithm": "starpo",
            "iterations": 200,
            "optimizer.schedule": "constant",
        },
        arms=arms,
        measures=(
            "test_success",
            "peak_success",
            "lost_success",
            "collapsed",
            "best_validation",
            "last_validation",
            "drop",
            "last_reward_std",
            "seconds",
        ),
        curves=(
            "train/success",
            "validation/success",
            "filter/reward_std",
            "rollout/entropy",
        ),
        claims=(*better, *faster),
        paper={"iterations": 200},
        notes="Plain StarPO but for the filter, as in the paper; constant learning"
        " rate. 100 % keeps groups of equal returns too. On Bandit seeds 3 and 4 were"
        " added for two arms alone, half of the prompts with PPO and three quarters"
        " with GRPO, and for what they are compared with, because their claims were the"
        " two that held by the bootstrap alone with three seeds.",
    )
