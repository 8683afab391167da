"""What every world must keep to, whatever the game. Call `check_contract` on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base


def check_contract(
    world: base.World, *, episodes: int = 48, steps: int = 40, must_end: bool = True
) -> None:
    """Fails unless the world keeps to `base.World`; plays random games to find out.

    Args:
      world: any world.
      episodes: B, games played, spread over the splits.
      steps: T, random actions in each.
      must_end: whether random play must end some games, so that the absorbing end is
        really seen. Off only where chance never ends one.
    """
    base.check_world(world)
    unknown = set(world.example_actions) - set(world.action_names)
    assert not unknown, f"example_actions holds no actions: {unknown}"

    keys = jax.random.split(jax.random.key(5), episodes)
    splits = jnp.arange(episodes, dtype=jnp.int32) % len(base.SPLITS)
    play = jax.jit(jax.vmap(functools.partial(_play, world, steps)))
    game = jax.tree.map(np.asarray, play(keys, splits))

    _check_types(world)
    _check_finite(game)
    _check_observations(world, game["observation"])
    _check_end(game, must_end)
    _check_no_action(game)

    again = jax.tree.map(np.asarray, play(keys, splits))
    _assert_same(game, again, "the same key must give the same episode")
    alone = jax.jit(functools.partial(_play, world, steps))(keys[1], splits[1])
    inside = jax.tree.map(lambda leaf: leaf[1], game)
    _assert_same(inside, alone, "an episode must not depend on the batch it is in")


def _play(world, steps, key, split):
    """One random game: leaves [T + 1, ...] of states, [T, ...] of what happened."""
    reset_key, step_key, action_key = jax.random.split(key, 3)
    first = world.reset(reset_key, split)
    # NO_ACTION is drawn as often as any other action.
    actions = jax.random.randint(
        action_key, (steps,), base.NO_ACTION, len(world.action_names)
    )

    def one_step(state, inputs):
        key, action = inputs
        after, outcome = world.step(key, state, action)
        return after, (after, outcome)

    # The scan is also the proof that a step keeps the state's types and shapes.
    inputs = (jax.random.split(step_key, steps), actions)
    _, (later, outcome) = jax.lax.scan(one_step, first, inputs)
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    return {
        "states": states,
        "outcome": outcome,
        "actions": actions,
        "observation": jax.vmap(world.observe)(states),
    }


def _check_types(world):
    """`step` compiles once for fresh and for later states; outcomes are scalars."""
    reset, step = jax.jit(world.reset), jax.jit(world.step)
    state = reset(jax.random.key(0), jnp.int32(base.TRAIN))
    for turn in range(3):
        state, outcome = step(jax.random.key(turn), state, jnp.int32(turn % 2))
    reset(jax.random.key(9), jnp.int32(base.TEST))
    assert reset._cache_size() == 1, "reset compiled more than once"
    assert step._cache_size() == 1, "step compiled more than once"
    types = {"reward": jnp.float32, "success": jnp.bool_, "done": jnp.bool_}
    for name, dtype in types.items():
        value = getattr(outcome, name)
        assert (value.shape, value.dtype) == ((), dtype), f"outcome.{name}: {value}"


def _check_finite(game):
    for leaf in jax.tree.leaves((game["states"], game["outcome"])):
        if np.issubdtype(leaf.dtype, np.floating):
            assert np.isfinite(leaf).all(), "a number is not finite"


def _check_observations(world, ids):
    """int32[B, T + 1, M] phrase ids: in range, filled up at the end, readable."""
    assert ids.dtype == np.int32, f"observe gave {ids.dtype}"
    assert ids.shape[2:] == (world.observation_phrases,), f"observe gave {ids.shape}"
    in_range = (ids >= base.NO_PHRASE) & (ids < len(world.phrases))
    assert in_range.all(), "an id without a phrase"
    is_phrase = ids != base.NO_PHRASE
    assert is_phrase[..., 0].all(), "an observation is empty"
    assert (is_phrase[..., 1:] <= is_phrase[..., :-1]).all(), "a gap inside"
    for row in np.unique(ids.reshape(-1, ids.shape[2]), axis=0):
        text = base.text_of(world.phrases, row)
        assert text == "".join(world.phrases[i] for i in row[row >= 0]), text
        assert text.endswith("\n") and not text[0].isspace(), text
    _check_longest(world, ids)


def _check_longest(world, ids):
    """No observation needs more tokens than the world says, however phrases are cut."""
    if world.longest_observation is None:
        return
    random = np.random.default_rng(0)
    for _ in range(20):
        lengths = random.integers(1, 9, len(world.phrases))
        tokens = np.where(ids == base.NO_PHRASE, 0, lengths[ids]).sum(axis=2)
        longest = world.longest_observation(lengths)
        assert tokens.max() <= longest, "longest_observation is too small"
        most = world.observation_phrases * lengths.max()
        assert longest <= most, "longest_observation wastes tokens"


def _check_end(game, must_end):
    """After `done` nothing changes and nothing is earned; success comes once, at it."""
    outcome = game["outcome"]
    done = outcome.done  # bool[B, T]
    assert not must_end or done[:, -1].any(), "no game ended: play more or longer"
    assert not done.all(), "games must not be over when they begin"
    assert (done[:, :-1] <= done[:, 1:]).all(), "an ended game went on"
    assert (outcome.success.sum(axis=1) <= 1).all(), "success came twice"
    was_done = np.pad(done[:, :-1], [(0, 0), (1, 0)])
    assert not (outcome.success & (was_done | ~done)).any(), "success but no end"
    assert (outcome.reward[was_done] == 0).all(), "reward after the end"
    _assert_unchanged(game["states"], was_done)


def _check_no_action(game):
    is_idle = game["actions"] == base.NO_ACTION
    assert is_idle.any(), "no idle step was played: play more or longer"
    assert (game["outcome"].reward[is_idle] == 0).all(), "reward for nothing"
    assert not game["outcome"].success[is_idle].any(), "success for nothing"
    _assert_unchanged(game["states"], is_idle)


def _assert_unchanged(states, where):
    """Every leaf [B, T + 1, ...] is the same before and after the steps `where`."""
    for leaf in jax.tree.leaves(states):
        np.testing.assert_array_equal(leaf[:, :-1][where], leaf[:, 1:][where])


def _assert_same(left, right, message):
    compare = functools.partial(np.testing.assert_array_equal, err_msg=message)
    jax.tree.map(compare, left, right)
