"""Writes sokoban.npz: games of gym-sokoban, for the test of the rules and rewards.

  pip install --no-deps gym==0.26.2 gym-sokoban==0.0.6
  pip install gym-notices cloudpickle imageio
  python tests/golden/make_sokoban.py

The stored file was made with those versions and numpy 2.4.6. Each game begins in a room
of gym-sokoban's own generator. Half of the games are played at random; in the others
random actions interrupt a solution, so that boxes come onto and off targets and games
end. For every action it holds the reward, the end, and where player and boxes are.
Pictures, which gym-sokoban draws at every step, are switched off.
"""

import contextlib
import io
import random
import sys
import warnings
from pathlib import Path

import numpy as np

with contextlib.redirect_stderr(io.StringIO()):  # gym asks to be replaced.
    from gym_sokoban.envs.sokoban_env import SokobanEnv

sys.path.insert(0, str(Path(__file__).parents[2]))
from ragen_jax.envs.sokoban.solver import shortest_solution  # noqa: E402
from ragen_jax.envs.sokoban.types import FLOOR, TARGET, WALL  # noqa: E402

FILE = Path(__file__).with_name("sokoban.npz")
KINDS = ((6, 1, 400, 4), (8, 2, 100, 12), (7, 3, 50, 8))  # size, boxes, rooms, plays
STEPS = 40  # actions in each game; behind its end none is recorded
OFF_PLAN = 0.25  # share of random actions where a solution is followed
NOTHING = 255  # behind the end
_TARGET, _BOXES, _PLAYER = 2, (3, 4), 5  # gym-sokoban's numbers
_FIXED = np.array([WALL, FLOOR, TARGET], np.uint8)  # ours, by gym-sokoban's


class Bare(SokobanEnv):
    """gym-sokoban's environment without pictures and without its limit of steps."""

    def __init__(self, size: int, boxes: int):
        super().__init__((size, size), max_steps=-1, num_boxes=boxes, reset=False)

    def render(self, mode="human", close=None, scale=1):
        return None


def play(env: Bare, actions: np.random.Generator, is_planned: bool) -> dict:
    """One game from where the environment is, to its end or for STEPS actions."""
    boxes = env.num_boxes
    game = {
        "action": np.full(STEPS, NOTHING, np.uint8),
        "reward": np.zeros(STEPS, np.float64),
        "done": np.ones(STEPS, bool),
        "player": np.full(STEPS, NOTHING, np.uint8),
        "boxes": np.full((STEPS, boxes), NOTHING, np.uint8),
    }
    plan = ()
    for step in range(STEPS):
        action = int(actions.integers(4))
        if is_planned and actions.random() > OFF_PLAN:
            plan = plan or _solution(env)
            action, plan = (plan[0], plan[1:]) if plan else (action, ())
        else:
            plan = ()
        # Their actions 1 to 4 push up, down, left and right, or only move.
        _, reward, done, _ = env.step(action + 1)
        state = env.room_state.reshape(-1)
        game["action"][step], game["reward"][step] = action, reward
        game["done"][step] = done
        game["player"][step] = np.flatnonzero(state == _PLAYER)[0]
        game["boxes"][step] = np.flatnonzero(np.isin(state, _BOXES))
        if done:
            break
    return game


def _solution(env: Bare) -> tuple[int, ...]:
    tiles, boxes = _FIXED[env.room_fixed], np.isin(env.room_state, _BOXES)
    return shortest_solution(tiles, boxes, env.player_position) or ()


def main() -> None:
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(10_000)
    random.seed(0)  # gym-sokoban draws from both global generators.
    np.random.seed(0)
    actions, stored = np.random.default_rng(0), {}
    for size, boxes, rooms, plays in KINDS:
        env, games = Bare(size, boxes), []
        for _ in range(rooms):
            with contextlib.redirect_stdout(io.StringIO()):  # It tells of retries.
                env.reset()
            start = env.room_state.copy(), env.player_position.copy()
            for index in range(plays):
                env.room_state, env.player_position = (a.copy() for a in start)
                env.num_env_steps = env.boxes_on_target = 0
                first = {
                    "tiles": _FIXED[env.room_fixed],
                    "start_boxes": np.isin(env.room_state, _BOXES),
                    "start_player": start[1].astype(np.uint8),
                }
                games.append(first | play(env, actions, is_planned=index % 2 == 1))
        for name in games[0]:
            stored[f"{size}x{boxes}_{name}"] = np.stack([g[name] for g in games])
        solved = sum((g["done"] & (g["action"] != NOTHING)).any() for g in games)
        print(f"{size}x{size}, {boxes} boxes: {len(games)} games, {solved} solved")
    np.savez_compressed(FILE, **stored)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
