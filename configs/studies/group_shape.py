"""The shape of the batch, with and without a filter (arXiv:2604.06268, Table 5).

python launch/study.py --study=configs/studies/group_shape.py --only=Bandit
"""

from ragen_jax.studies.definition import SMOKE, Claim, Study

# The paper's table is of Sokoban; episodes of Bandit, one turn each, cost far less.
_ENVIRONMENTS = {
    "Sokoban": {"config": "configs/sokoban.py"},
    "Bandit": {"config": "configs/bandit.py", "iterations": 60, "every.evaluate": 10},
}
_SHAPES = ((64, 2), (32, 4), (8, 16))
_FILTERS = {
    "all": {"filter.strategy": "none"},
    "filtered": {"filter.strategy": "top_p", "filter.fraction": 0.9},
}


def get_study() -> Study:
    """The study."""
    arms = {}
    for name, chosen in _ENVIRONMENTS.items():
        for prompts, size in _SHAPES:
            for title, filtered in _FILTERS.items():
                arms[f"{name}, {prompts} x {size}, {title}"] = {
                    **chosen,
                    "rollout.prompts": prompts,
                    "rollout.group_size": size,
                    **filtered,
                }
        arms[f"{name}, 128 x 1, all"] = {
            **chosen,
            "rollout.prompts": 128,
            "rollout.group_size": 1,
            "filter.strategy": "none",
        }
    shapes = [(name, *shape) for name in _ENVIRONMENTS for shape in _SHAPES]
    better = tuple(
        Claim(
            text=f"On {name}, {prompts} prompts x {size} episodes, filtered training"
            " ends above training on all.",
            left=f"{name}, {prompts} x {size}, filtered",
            right=f"{name}, {prompts} x {size}, all",
        )
        for name, prompts, size in shapes
    )
    faster = tuple(
        Claim(
            text=f"On {name}, {prompts} prompts x {size} episodes, it takes less time,"
            " too.",
            left=f"{name}, {prompts} x {size}, filtered",
            right=f"{name}, {prompts} x {size}, all",
            measure="seconds",
            relation="less",
        )
        for name, prompts, size in shapes
    )
    return Study(
        name="group_shape",
        question="Does the filter help whatever the number of prompts and of episodes"
        " of each?",
        source="arXiv:2604.06268, Table 5",
        config="configs/sokoban.py",
        changes={"iterations": 200, "every.evaluate": 20},
        arms=arms,
        measures=(
            "test_success",
            "best_validation",
            "last_validation",
            "kept_groups",
            "last_reward_std",
            "seconds",
        ),
        curves=("validation/success", "filter/kept_fraction"),
        claims=(*better, *faster),
        # The arms' own shapes, which are the question.
        smoke={key: SMOKE[key] for key in SMOKE if not key.startswith("rollout.")},
        paper={"iterations": 400},
        paper_arms={
            arm: {"rollout.actions_per_turn": 2} for arm in arms if "Sokoban" in arm
        },
        notes="PPO without a KL term, clip 0.2 / 0.28; the filter keeps the prompts"
        " that hold 90 % of the summed standard deviations. The source reports the"
        " highest validation success of one run each; the claims here are about the"
        " last weights on test levels. The learning rate falls to 0 over the most"
        " updates that an arm can make (the paper's is constant), and filtered arms"
        " make fewer: on Bandit 64 x 2 makes 113 to 118 of 240 and ends at 54 to 57 %"
        " of the highest rate, 32 x 4 makes 171 to 174 and ends at 19 to 20 %, and"
        " 8 x 16 makes 238 to 240 and ends at 0 as the arms of all do. So the claims"
        " about the former two compare rates as well; on Sokoban 64 x 2 makes 202 of"
        " 800 and ends at 86 %, 32 x 4 makes 310 and ends at 68 %.",
    )
