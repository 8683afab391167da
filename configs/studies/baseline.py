"""Plain StarPO over 200 iterations (arXiv:2504.20073, Figures 5 and 6).

python launch/study.py --study=configs/studies/baseline.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {
    "Bandit": "configs/bandit.py",
    "Sokoban": "configs/sokoban.py",
    "FrozenLake": "configs/frozenlake.py",
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {estimator.upper()}": {"config": config, "estimator": estimator}
        for name, config in _ENVIRONMENTS.items()
        for estimator in ("ppo", "grpo")
    }
    # The paper's success is that of fixed evaluation prompts; so is validation's here.
    falls = tuple(
        Claim(
            text=f"{arm}: {what} success rises and then falls, by above 10 points.",
            left=arm,
            measure=measure,
            margin=0.1,
        )
        for what, measure in (
            ("validation", "lost_validation"),
            ("training", "lost_success"),
        )
        for arm in arms
    )
    leads = tuple(
        Claim(
            text=f"{arm}: the in-group standard deviation falls before success does.",
            left=arm,
            measure="std_lead",
        )
        for arm in arms
    )
    return Study(
        name="baseline",
        question="Does plain StarPO rise and then collapse, and does the in-group"
        " standard deviation of the return announce it?",
        source="arXiv:2504.20073, Figures 5 and 6",
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
            "lost_validation",
            "success_onset",
            "std_lead",
            "entropy_lead",
            "gradient_lead",
            "thoughts_lead",
            "alarm_at",
        ),
        curves=(
            "train/success",
            "validation/success",
            "filter/reward_std",
            "rollout/entropy",
            "update/actor_grad_norm",
        ),
        claims=(*falls, *leads),
        paper={"iterations": 200},
        notes="Constant learning rate, as in the paper; 1e-4 for the embedded model."
        " The paper's success is that of fixed evaluation prompts, whose counterpart is"
        " validation: each fall is judged on it first, then on the training episodes."
        " The claims on validation were added after the runs had been seen.",
    )
