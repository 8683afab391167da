"""Draws solvable Countdown puzzles of a split, on device."""

import jax
import jax.numpy as jnp

from ragen_jax.envs import base
from ragen_jax.envs.countdown.expression import LIMIT
from ragen_jax.envs.countdown.types import MOST_NUMBERS, Countdown, State


def draw(key: jax.Array, split: jax.Array, settings: Countdown) -> State:
    """A solvable puzzle that belongs to the split.

    The target is not among the numbers, so that at least one operation is needed.

    Args:
      key: decides the puzzle.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: how many numbers, and how high.
    """

    def draw_puzzle(key):
        numbers, target = random_puzzle(key, settings)
        is_puzzle = (target >= 1) & (target <= settings.highest_target)
        is_puzzle &= (numbers != target).all()
        return (numbers, target), is_puzzle & (split_of(numbers, target) == split)

    # It ends: with any settings that `check` accepts, 1 draw in 60 or more fits.
    numbers, target = base.draw_until_fit(draw_puzzle, key)
    return State(
        numbers=numbers,
        target=target,
        verdict=jnp.full((), base.NO_ACTION, jnp.int32),
        is_paid=jnp.zeros((), bool),
        done=jnp.zeros((), bool),
    )


def split_of(numbers: jax.Array, target: jax.Array) -> jax.Array:
    """int32[], the split of a puzzle, by its numbers in any order and its target.

    It does not depend on `max_numbers`, to which the numbers are padded.

    Args:
      numbers: int32[N], padded with 0.
      target: int32[].
    """
    numbers = jnp.pad(numbers, (0, MOST_NUMBERS - numbers.size))
    return base.split_of(base.content_hash(jnp.sort(numbers), target))


def random_puzzle(key: jax.Array, settings: Countdown) -> tuple[jax.Array, jax.Array]:
    """Random numbers, int32[N], and the value of a random expression of all, int32[].

    Repeatedly two of the remaining values are replaced by one: their sum, difference,
    product (the sum if that is beyond LIMIT) or quotient (the difference if that has a
    remainder). The value may be unfit for a target; one beyond LIMIT stays as it is.
    """
    most = settings.max_numbers
    count_key, number_key, pair_key, operator_key = jax.random.split(key, 4)
    count = jax.random.randint(count_key, (), settings.min_numbers, most + 1)
    numbers = jax.random.randint(number_key, (most,), 1, settings.highest_number + 1)
    place = jnp.arange(most)
    numbers = jnp.where(place < count, numbers, 0)

    def join(carry, inputs):
        values, is_left = carry
        order, operator = inputs
        _, (one, two) = jax.lax.top_k(jnp.where(is_left, order, -1.0), 2)
        high = jnp.maximum(values[one], values[two])
        low = jnp.minimum(values[one], values[two])
        divisor = jnp.maximum(low, 1)
        is_whole = (low > 0) & (high % divisor == 0)
        product = jnp.where(high <= LIMIT // divisor, high * low, high + low)
        quotient = jnp.where(is_whole, high // divisor, high - low)
        results = jnp.stack([high + low, high - low, product, quotient])
        joins = is_left.sum() > 1  # False once a single value is left.
        # The reader refuses it, also on the way to a value that would fit.
        result = jnp.where(high > LIMIT, high, results[operator])
        values = jnp.where(joins & (place == one), result, values)
        return (values, is_left & ~(joins & (place == two))), None

    orders = jax.random.uniform(pair_key, (most - 1, most))
    operators = jax.random.randint(operator_key, (most - 1,), 0, 4)
    start = numbers, place < count
    (values, is_left), _ = jax.lax.scan(join, start, (orders, operators))
    return numbers, jnp.where(is_left, values, 0).sum()
