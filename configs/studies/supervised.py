"""A supervised start, and reinforcement after it.

python launch/study.py --study=configs/studies/supervised.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {
    "Bandit": "configs/bandit.py",
    "Sokoban": "configs/sokoban.py",
    "FrozenLake": "configs/frozenlake.py",
}


def get_study() -> Study:
    """The study."""
    claims = tuple(
        Claim(
            text=f"On {name} reinforcement ends above the demonstrations that the model"
            " started from.",
            left=name,
            measure="test_gain",
        )
        for name in _ENVIRONMENTS
    )
    return Study(
        name="supervised",
        question="What does imitating demonstrations reach, and what does reinforcement"
        " add to it?",
        source="of this project; arXiv:2504.20073, Appendix C, compares other things",
        config="configs/frozenlake.py",
        changes={"iterations": 60},
        arms={name: {"config": config} for name, config in _ENVIRONMENTS.items()},
        measures=(
            "test_before",
            "test_success",
            "test_gain",
            "last_validation",
            "last_entropy",
        ),
        curves=("validation/success", "rollout/entropy"),
        claims=claims,
        paper={"iterations": 200},
        notes="StarPO-S with PPO. The claims are this project's: the paper sets one"
        " method against the other, imitating a perfect solver (74.6 % on Sokoban)"
        " against reinforcement from a pretrained model (20.3 %), and imitation ends"
        " higher. The embedded model knows no reply format before its supervised start,"
        " whose demonstrations are imperfect on purpose (docs/tiny_model.md): so this"
        " asks what reinforcement adds to it. The paper's scale is reinforcement"
        " alone.",
    )
