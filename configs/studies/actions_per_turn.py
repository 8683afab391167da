"""One to seven actions a turn (arXiv:2504.20073, Table 3).

python launch/study.py --study=configs/studies/actions_per_turn.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_TURNS = 5


def get_study() -> Study:
    """The study."""
    arms = {
        f"{count} a turn": {
            "rollout.actions_per_turn": count,
            "rollout.actions": _TURNS * count,
        }
        for count in range(1, 8)
    }
    claims = (
        Claim(
            text="Five actions a turn end above one.",
            left="5 a turn",
            right="1 a turn",
            measure="test_success/sokoban",
        ),
        Claim(
            text="Seven actions a turn end below six: too many harm.",
            left="7 a turn",
            right="6 a turn",
            measure="test_success/sokoban",
            relation="less",
        ),
        Claim(
            text="On new symbols five actions a turn end above one.",
            left="5 a turn",
            right="1 a turn",
            measure="test_success/newvocab",
        ),
        # With five actions in all the untrained model solves less as well.
        Claim(
            text="Training adds more with five actions a turn than with one.",
            left="5 a turn",
            right="1 a turn",
            measure="test_gain/sokoban",
        ),
        # Not the paper's: asked after two seeds of two actions had been seen.
        Claim(
            text="On FrozenLake, which is not trained on, two actions a turn end above"
            " five.",
            left="2 a turn",
            right="5 a turn",
            measure="test_success/frozen_lake",
        ),
    )
    return Study(
        name="actions_per_turn",
        question="How many actions should one reply be allowed to name?",
        source="arXiv:2504.20073, Table 3",
        config="configs/sokoban.py:generalize",
        changes={
            "iterations": 60,
            "rollout.reply_tokens": 96,
            "every.evaluate": 20,
        },
        arms=arms,
        measures=(
            "test_success/sokoban",
            "test_success/newvocab",
            "test_success/larger",
            "test_success/frozen_lake",
            "test_gain/sokoban",
            "test_gain/newvocab",
            "test_gain/frozen_lake",
            "last_reply_tokens",
        ),
        curves=("train/success", "rollout/reply_tokens", "rollout/entropy"),
        claims=claims,
        paper={"iterations": 200, "rollout.reply_tokens": 400},
        notes="StarPO-S with PPO; five turns, and five times as many actions an"
        " episode as a turn, as in RAGEN's script. A turn with few actions so has fewer"
        " in all: part of the difference is that. Demonstrated plans have at most five"
        " actions. The claim on FrozenLake is not the paper's: it was added when two"
        " seeds of two actions had been seen. Replies may be longer than usual, 96"
        " tokens, in all arms. 60 iterations, after which the learning rate has fallen"
        " to its lowest; the paper has 200.",
    )
