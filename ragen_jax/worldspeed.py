"""How fast a world is by itself: random play, jitted and vmapped."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import TRAIN, World


def steps_per_second(
    world: World, *, batch: int, steps: int, repeats: int = 3
) -> float:
    """Environment steps a second of random play; a finished game starts again.

    Args:
      world: the rules.
      batch: games side by side.
      steps: of each in one timed call.
      repeats: timed calls, the fastest counts: others only add noise.
    """
    actions = len(world.action_names)

    def play(key: jax.Array) -> jax.Array:
        start = world.reset(jax.random.fold_in(key, steps), TRAIN)

        def one(state: Any, index: jax.Array):
            key_of_step = jax.random.fold_in(key, index)
            action = jax.random.randint(key_of_step, (), 0, actions)
            state, outcome = world.step(key_of_step, state, action)
            again = lambda new, old: jnp.where(outcome.done, new, old)  # noqa: E731
            return jax.tree.map(again, start, state), outcome.reward

        return jax.lax.scan(one, start, jnp.arange(steps))[1].sum()

    run = jax.jit(lambda key: jax.vmap(play)(jax.random.split(key, batch)).sum())
    seconds = _fastest(run, repeats)
    return batch * steps / seconds


def resets_per_second(world: World, *, batch: int, repeats: int = 3) -> float:
    """Levels drawn a second, `batch` of them in one call."""

    def draw(key: jax.Array):
        return jax.vmap(lambda k: world.reset(k, TRAIN))(jax.random.split(key, batch))

    return batch / _fastest(jax.jit(draw), repeats)


def _fastest(run, repeats: int) -> float:
    jax.block_until_ready(run(jax.random.key(0)))
    seconds = []
    for index in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(jax.random.key(index + 1)))
        seconds.append(time.perf_counter() - started)
    return min(seconds)
