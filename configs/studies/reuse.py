"""Online-k: one batch of episodes used for k updates (arXiv:2504.20073, Figure 10).

python launch/study.py --study=configs/studies/reuse.py --jobs=2 --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {"Bandit": "configs/bandit.py", "FrozenLake": "configs/frozenlake.py"}
_UPDATES = 200


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, Online-{k}": {
            "config": config,
            "optimizer.reuse": k,
            "iterations": _UPDATES // k,
            "every.evaluate": 20 // k,
        }
        for name, config in _ENVIRONMENTS.items()
        for k in (1, 2, 5, 10)
    }
    claims = tuple(
        Claim(
            text=f"On {name}, after {_UPDATES} updates, a fresh batch for each ends"
            f" above one for {k} of them.",
            left=f"{name}, Online-1",
            right=f"{name}, Online-{k}",
        )
        for name in _ENVIRONMENTS
        for k in (2, 5, 10)
    )
    return Study(
        name="reuse",
        question="How often may one batch of episodes be learned from?",
        source="arXiv:2504.20073, Figure 10",
        config="configs/frozenlake.py",
        changes={"optimizer.schedule": "constant"},
        arms=arms,
        measures=(
            "test_success",
            "peak_success",
            "lost_success",
            "last_validation",
            "last_entropy",
        ),
        curves=("train/success", "rollout/entropy", "update/ratio_max"),
        claims=claims,
        notes="StarPO-S with PPO; as many updates in all arms, so fewer episodes where"
        " k is larger: the x-axis counts iterations, each of k updates. The paper"
        " samples k batches at once and updates on one after the other; here the same"
        " batch is updated on k times, and each episode is seen k times. Seeds 3 and 4"
        " of Bandit were added after the first three had been seen.",
    )
