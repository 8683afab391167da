"""How slippery the ice is, with and without a filter (arXiv:2604.06268).

python launch/study.py --study=configs/studies/slip.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_SLIPS = (0, 2, 5, 10, 20, 50, 100)  # percent
_FILTERS = {
    "all": {"filter.strategy": "none"},
    "filtered": {"filter.strategy": "top_p", "filter.fraction": 0.9},
}


def _success(slip: int) -> dict[str, float]:
    """The change of the config, whose own 20 % are the runs of other studies too."""
    return {} if slip == 20 else {"env.success_probability": 1 - slip / 100}


def get_study() -> Study:
    """The study."""
    arms = {
        f"slip {slip} %, {title}": {**_success(slip), **chosen}
        for slip in _SLIPS
        for title, chosen in _FILTERS.items()
    }
    claims = tuple(
        Claim(
            text=f"At {slip} % slip filtered training ends above training on all.",
            left=f"slip {slip} %, filtered",
            right=f"slip {slip} %, all",
        )
        for slip in _SLIPS
    )
    return Study(
        name="slip",
        question="The filter prefers prompts whose returns vary: does it still help"
        " where chance alone makes them vary?",
        source="arXiv:2604.06268, FrozenLake's slip sweep",
        config="configs/frozenlake.py",
        changes={"iterations": 200, "every.evaluate": 20},
        arms=arms,
        measures=("test_success", "test_gain", "best_validation", "last_reward_std"),
        curves=("validation/success", "filter/reward_std"),
        claims=claims,
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        notes="PPO without a KL term. An action that slips goes at a right angle, to"
        " either side alike; at 100 % every action does. The supervised start saw"
        " 20 %. The learning rate falls to 0 over the most updates that an arm can make"
        " (the paper's is constant), and filtered arms make fewer the fewer prompts"
        " vary: they end at a higher rate than the arms of all, which is part of each"
        " claim. At 2, 5, 10 and 50 % they make 360, 405, 485 and 760 of 800 updates"
        " and end at 59, 50, 34 and 1 % of the highest rate; the data of the others do"
        " not say how many prompts were kept.",
    )
