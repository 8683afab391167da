"""StarPO against StarPO-S (arXiv:2504.20073, Figure 9), on the embedded model.

python launch/study.py --study=configs/studies/stabilized.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {
    "FrozenLake": "configs/frozenlake.py",
    "Sokoban": "configs/sokoban.py",
    "Bandit": "configs/bandit.py",
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {title}": {"config": config, "algorithm": algorithm}
        for name, config in _ENVIRONMENTS.items()
        for algorithm, title in (("starpo", "StarPO"), ("starpo_s", "StarPO-S"))
    }
    claims = tuple(
        Claim(
            text=f"On {name} StarPO-S ends above StarPO after as many iterations.",
            left=f"{name}, StarPO-S",
            right=f"{name}, StarPO",
        )
        for name in _ENVIRONMENTS
    )
    return Study(
        name="stabilized",
        question="Does StarPO-S (uncertainty filter, clip-higher, no KL) train agents"
        " that end better than plain StarPO's?",
        source="arXiv:2504.20073, Figure 9",
        config="configs/frozenlake.py",
        changes={"iterations": 100, "every.evaluate": 10},
        arms=arms,
        measures=(
            "test_success",
            "test_gain",
            "best_validation",
            "last_validation",
            "drop",
            "last_reward_std",
            "seconds",
        ),
        curves=("validation/success", "filter/reward_std", "rollout/entropy"),
        claims=claims,
        paper={"iterations": 200},
        notes="Both by PPO, with a critic. The learning rate falls to 0 over the run"
        " (cosine), as in the configs; the paper's is constant, and its runs twice as"
        " long.",
    )
