"""The shape of the batch, with and without a filter (arXiv:2604.06268, Table 5).

python launch/study.py --study=configs/studies/group_shape.py --jobs=2
"""

from ragen_jax.studies.definition import SMOKE, Claim, Study

_SHAPES = ((64, 2), (32, 4), (8, 16))
_FILTERS = {
    "all": {"filter.strategy": "none"},
    "filtered": {"filter.strategy": "top_p", "filter.fraction": 0.9},
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{prompts} x {size}, {title}": {
            "rollout.prompts": prompts,
            "rollout.group_size": size,
            **chosen,
        }
        for prompts, size in _SHAPES
        for title, chosen in _FILTERS.items()
    }
    arms["128 x 1, all"] = {
        "rollout.prompts": 128,
        "rollout.group_size": 1,
        "filter.strategy": "none",
    }
    better = tuple(
        Claim(
            text=f"{prompts} prompts x {size} episodes: filtered training ends above"
            " training on all.",
            left=f"{prompts} x {size}, filtered",
            right=f"{prompts} x {size}, all",
        )
        for prompts, size in _SHAPES
    )
    faster = tuple(
        Claim(
            text=f"{prompts} prompts x {size} episodes: it takes less time, too.",
            left=f"{prompts} x {size}, filtered",
            right=f"{prompts} x {size}, all",
            measure="seconds",
            relation="less",
        )
        for prompts, size in _SHAPES
    )
    return Study(
        name="group_shape",
        question="Does the filter help whatever the number of prompts and of episodes"
        " of each?",
        source="arXiv:2604.06268, Table 5",
        config="configs/sokoban.py",
        changes={"iterations": 200, "every.evaluate": 20},
        arms=arms,
        measures=("test_success", "best_validation", "last_reward_std", "seconds"),
        curves=("validation/success", "filter/kept_fraction"),
        claims=(*better, *faster),
        # The arms' own shapes, which are the question.
        smoke={key: SMOKE[key] for key in SMOKE if not key.startswith("rollout.")},
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        notes="PPO without a KL term, clip 0.2 / 0.28; the filter keeps the prompts"
        " that hold 90 % of the summed standard deviations. The source reports the"
        " highest validation success of one run each; the claims here are about the"
        " last weights on test rooms.",
    )
