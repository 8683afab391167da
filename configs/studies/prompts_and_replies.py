"""P prompts with N episodes each, P x N fixed (arXiv:2504.20073, Table 2).

python launch/study.py --study=configs/studies/prompts_and_replies.py --jobs=2
"""

from ragen_jax.studies.definition import SMOKE, Claim, Study

_EPISODES = 128
_GROUPS = (32, 16, 8, 4, 2, 1)


def get_study() -> Study:
    """The study."""
    arms = {
        f"{size} each": {
            "rollout.prompts": _EPISODES // size,
            "rollout.group_size": size,
            # One episode has no spread to filter by.
            **({"filter.strategy": "none"} if size == 1 else {}),
        }
        for size in _GROUPS
    }
    claims = tuple(
        Claim(
            text=f"Four episodes of each prompt carry more over to {title} than one.",
            left="4 each",
            right="1 each",
            measure=f"test_success/{label}",
        )
        for label, title in (("newvocab", "new symbols"), ("frozen_lake", "FrozenLake"))
    )
    return Study(
        name="prompts_and_replies",
        question="At 128 episodes an iteration, how many different prompts, and how"
        " many episodes of each, generalize best from Sokoban?",
        source="arXiv:2504.20073, Table 2",
        config="configs/sokoban.py:generalize",
        changes={"iterations": 200, "every.evaluate": 20},
        arms=arms,
        measures=(
            "test_success/sokoban",
            "test_success/newvocab",
            "test_success/frozen_lake",
            "test_gain/sokoban",
            "test_gain/newvocab",
            "test_gain/frozen_lake",
            "last_reward_std",
        ),
        curves=("train/success", "filter/reward_std"),
        claims=claims,
        # The arms' own shapes, which are the question.
        smoke={key: SMOKE[key] for key in SMOKE if not key.startswith("rollout.")},
        paper={"iterations": 200},
        notes="StarPO-S with PPO. One episode of each prompt cannot be filtered and"
        " learns from all. The embedded model's supervised start knows FrozenLake"
        " already, which the paper's model does not, and cannot read the new symbols.",
    )
