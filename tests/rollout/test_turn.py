"""One turn of one game, worked by hand on a firm and a slippery lake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.envs import base
from ragen_jax.envs.base import NO_ACTION
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.envs.frozen_lake.types import GOAL, HOLE, ICE
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.text import chat_template
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import ENV_DONE, OUT_OF_ACTIONS, OUT_OF_TURNS, UNFINISHED

LEFT, DOWN, RIGHT, UP = range(4)
FIRM = FrozenLake(3, success_probability=1.0)
LIMITS = TurnLimits(turns=3, actions_per_turn=3, actions=5, reply_tokens=9)
#  _ _ O
#  _ _ _      the player starts at (0, 0)
#  O _ G
TILES = [[ICE, ICE, HOLE], [ICE, ICE, ICE], [HOLE, ICE, GOAL]]


def _game(player=(0, 0), turn=0, actions=0):
    state = frozen_lake.State(
        tiles=jnp.array(TILES), player=jnp.array(player), done=jnp.array(False)
    )
    env_episode = turn_lib.start_env_episode(state)
    return env_episode.replace(turn=jnp.int32(turn), actions=jnp.int32(actions))


@jax.jit
def _play_firm(env_episode, actions):
    return turn_lib.play_turn(
        jax.random.key(0), frozen_lake.make(FIRM), LIMITS, env_episode, actions
    )


def _play(env_episode, *actions):
    actions = actions + (NO_ACTION,) * (LIMITS.actions_per_turn - len(actions))
    return jax.device_get(_play_firm(env_episode, jnp.array(actions)))


def test_a_new_game_has_nothing_behind_it():
    env_episode = _game()
    assert (
        env_episode.turn,
        env_episode.actions,
        env_episode.success,
        env_episode.end,
    ) == (0, 0, False, 0)


# Where the player is; turns and actions before; the actions named. Then: where the
# player ends, reward, actions taken, why the episode ended.
CASES = {
    "continues": [(0, 0), 0, 0, (DOWN, RIGHT), (1, 1), 0, 2, UNFINISHED],
    "no action passes a turn": [(1, 1), 0, 2, (), (1, 1), 0, 0, UNFINISHED],
    "the border takes an action": [(0, 0), 0, 0, (LEFT,), (0, 0), 0, 1, UNFINISHED],
    "goal": [(1, 1), 1, 2, (RIGHT, DOWN), (2, 2), 1, 2, ENV_DONE],
    "goal before the rest": [(2, 1), 0, 0, (RIGHT, UP, UP), (2, 2), 1, 1, ENV_DONE],
    "hole": [(1, 0), 0, 0, (DOWN, RIGHT, RIGHT), (2, 0), 0, 1, ENV_DONE],
    "no turn left": [(0, 0), 2, 1, (RIGHT,), (0, 1), 0, 1, OUT_OF_TURNS],
    "no turn left, nothing done": [(0, 0), 2, 4, (), (0, 0), 0, 0, OUT_OF_TURNS],
    "last action": [(0, 0), 0, 3, (DOWN, UP), (0, 0), 0, 2, OUT_OF_ACTIONS],
    "cut": [(0, 0), 1, 4, (DOWN, RIGHT, DOWN), (1, 0), 0, 1, OUT_OF_ACTIONS],
    "actions before turns": [(0, 0), 2, 4, (DOWN,), (1, 0), 0, 1, OUT_OF_ACTIONS],
    "goal on the last action": [(2, 1), 2, 4, (RIGHT, UP), (2, 2), 1, 1, ENV_DONE],
    "goal too late": [(1, 1), 0, 4, (DOWN, RIGHT), (2, 1), 0, 1, OUT_OF_ACTIONS],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_turn_does_what_its_actions_say_within_the_limits(case):
    player, turn, used, actions, reached, reward, taken, end = case
    after, played = _play(_game(player, turn, used), *actions)
    assert after.state.player.tolist() == list(reached)
    assert (played.reward, played.actions) == (reward, taken)
    assert (after.turn, after.actions, after.end) == (turn + 1, used + taken, end)
    assert after.success == (reward == 1)


def test_success_stays_for_the_rest_of_the_game():
    env_episode = _game().replace(success=jnp.array(True))
    assert _play(env_episode, RIGHT)[0].success


def test_actions_of_a_turn_slip_independently_and_as_the_key_says():
    env = frozen_lake.make(FrozenLake(3, success_probability=0.5))
    play = jax.jit(
        jax.vmap(
            lambda key: (
                turn_lib.play_turn(
                    key,
                    env,
                    LIMITS,
                    _game((0, 1)),
                    jnp.array([LEFT, RIGHT, NO_ACTION]),
                )[0].state.player
            )
        )
    )
    players = np.asarray(play(jax.random.split(jax.random.key(5), 4000)))
    # Left from (0, 1): 1/2 to (0, 0); 1/4 stays at the border; 1/4 down to (1, 1).
    # Then right from (0, 0): 1/2 (0, 1), 1/4 (0, 0), 1/4 (1, 0); from (0, 1): 1/2 into
    # the hole, 1/4 (0, 1), 1/4 (1, 1); from (1, 1): 1/2 (1, 2), 1/4 (0, 1), 1/4 (2, 1).
    expected = {
        (0, 1): 1 / 4 + 1 / 16 + 1 / 16,
        (0, 0): 1 / 8,
        (1, 0): 1 / 8,
        (0, 2): 1 / 8,
        (1, 1): 1 / 16,
        (1, 2): 1 / 8,
        (2, 1): 1 / 16,
    }
    for place, share in expected.items():
        seen = np.mean((players == place).all(axis=1))
        assert abs(seen - share) < 4 * (share * (1 - share) / 4000) ** 0.5, place
    again = play(jax.random.split(jax.random.key(5), 4000))
    np.testing.assert_array_equal(players, again)


@pytest.mark.parametrize("is_valid", [True, False])
@pytest.mark.parametrize("stopped_itself", [True, False])
def test_the_feedback_says_what_came_of_the_turn(is_valid, stopped_itself):
    env = frozen_lake.make(FIRM)
    pieces = chat_template.cut_pieces(models.make_tokenizer(), "the test's tokenizer")
    texts = prompts_lib.make_dialogue(env, LIMITS, pieces, thinking=True)
    after, played = _play(_game((1, 0)), RIGHT, DOWN)
    ids = turn_lib.feedback_message(
        env, texts, after, played, jnp.array(is_valid), jnp.array(stopped_itself)
    )
    warning = "Your last reply had no valid answer or an unknown action.\n"
    assert base.text_of(texts.phrases, ids.tolist()) == (
        ("" if stopped_itself else "<|im_end|>")
        + "\n<|im_start|>user\nReward: 0.0\n"
        + ("" if is_valid else warning)
        + "State:\n _ _ O\n _ _ _\n O P G\nTurn 2 of 3. Actions left: 3.<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
