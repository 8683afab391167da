"""A record made by hand is scored whole, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import models, updates

from ragen_jax import starpo
from ragen_jax.learning.update_plan import UpdatePlan, check_record


@pytest.mark.parametrize(
    ("more", "groups", "message"),
    [
        (0, updates.PROMPTS, None),
        (3, updates.PROMPTS, "rows have T = 27 tokens and the plan 24"),
        (-22, updates.PROMPTS, "rows have T = 2 tokens and the plan 24"),
        (0, 3, r"there are B = 12 episodes, and rollout.prompts \* .* = 4 \* 4: make"),
    ],
)
def test_a_record_of_other_sizes_than_the_plans_is_refused(more, groups, message):
    chosen = updates.settings()
    mesh = models.one_device()
    placed = updates.shardings(chosen, mesh, None)
    plan = UpdatePlan(
        chosen, updates.CONFIG, mesh, jnp.float32, placed, (updates.LENGTH,)
    )
    rows, episodes = jax.tree.map(
        lambda x: x[: groups * updates.GROUP_SIZE], updates.record()
    )
    rows = jax.tree.map(
        lambda x: x if x.ndim == 1 else jnp.resize(x, (len(x), x.shape[1] + more)), rows
    )
    score = functools.partial(jax.eval_shape, functools.partial(starpo.score, plan))
    record = updates.new_state(chosen), {}, updates.reference(chosen), rows, episodes
    if message is None:
        score(*record)
        return
    with pytest.raises(ValueError, match=message):
        score(*record)


def test_a_row_that_does_not_begin_with_the_plans_prefix_is_refused():
    chosen = updates.settings()
    plan = UpdatePlan(
        chosen, updates.CONFIG, None, jnp.float32, None, (updates.LENGTH,),
        updates.OPENING,
    )  # fmt: skip
    rows, episodes = updates.record()
    check_record(plan, rows, episodes)
    padding = rows.replace(  # A row of padding may hold anything.
        tokens=rows.tokens.at[3].set(0), is_reply=rows.is_reply.at[3].set(False)
    )
    check_record(plan, padding, episodes)
    other = rows.replace(tokens=rows.tokens.at[5, 1].add(1))
    with pytest.raises(ValueError, match="row 5 does not begin with the 3 tokens of"):
        starpo.score(plan, updates.new_state(chosen), {}, {}, other, episodes)
    check_record(dataclasses.replace(plan, prefix=()), other, episodes)
