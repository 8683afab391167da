"""An iteration, put together of its parts, and what a record's score depends on."""

import functools
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates

from ragen_jax import starpo
from ragen_jax.envs.base import TRAIN
from ragen_jax.errors import UserError
from ragen_jax.learning.batch import OldScores
from ragen_jax.learning.summary import Summaries
from ragen_jax.learning.train_state import UpdateCounts
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.rollout.rollout import Rollout


def test_episodes_are_sampled_once_and_learned_from_as_often_as_is_asked_for(
    monkeypatch,
):
    chosen = updates.settings(seed=3, optimizer__reuse=3)
    state = SimpleNamespace(iteration=np.int32(4), updates=np.int32(9), actor="actor")
    calls, too_long = {"rollout": [], "update": []}, [0]

    def rollout(actor, tokens, args):
        calls["rollout"].append((actor, tokens, args))
        return Rollout("rows", "episodes", "passes", too_long)

    def update(before, *given):
        calls["update"].append((before, given))
        use = len(calls["update"])
        counts = UpdateCounts(np.int32(use), np.int32(1), np.int32(use - 1))
        return SimpleNamespace(updates=use), SimpleNamespace(counts=counts)

    def report(counts, learned, seen, passes, rate):
        assert (seen["sampled_tokens"], passes) == (8.0, "passes")
        return {"uses": len(learned), "rate": rate}

    lake = SimpleNamespace(label="lake")
    programs = starpo.Programs(
        rollout=rollout,
        update=update,
        summarize=lambda record: Summaries(
            {"sampled_tokens": 8.0}, {}, record.too_long
        ),
        report=report,
        merge=lambda *trees: trees,
        frozen="frozen",
        reference="reference",
    )
    run = SimpleNamespace(settings=chosen, tasks=(lake,), tokens="tokens")
    monkeypatch.setattr(starpo.summary, "counts_so_far", lambda state: {})
    after, metrics, _ = starpo.iterate(run, programs, state)
    ((actor, tokens, args),) = calls["rollout"]
    assert (actor, tokens) == (("actor", "frozen"), "tokens")
    assert (args.seed, args.split, args.iteration) == (3, TRAIN, 4)
    assert args.policy_version == 9
    assert after.updates == metrics["uses"] == 3
    befores = [before for before, _ in calls["update"]]
    assert befores[0] is state and [one.updates for one in befores[1:]] == [1, 2]
    for use, (_, (*record, given)) in enumerate(calls["update"]):
        assert record == ["frozen", "reference", "rows", "episodes"]
        assert (given.use, given.earlier.real) == (use, use)
        assert given.earlier.attempted == sum(range(use + 1))
    # What an environment showed in part is not learned from.
    too_long[0] = 2
    with pytest.raises(UserError, match="^lake shows more tokens .* lost, 2 of them"):
        starpo.iterate(run, programs, state)
    assert (len(calls["rollout"]), len(calls["update"])) == (2, 3)


def test_the_samplers_weights_are_gone_when_the_update_begins():
    """Merged adapters are a whole model, for which its memory has no room."""

    class Weights:
        pass

    made = []

    def merge(*_):
        weights = Weights()
        made.append(weakref.ref(weights))
        return weights

    def update(*_):
        assert made[0]() is None
        raise StopIteration

    programs = starpo.Programs(
        rollout=lambda *_: Rollout("rows", "episodes", "passes", [0]),
        update=update,
        summarize=lambda record: Summaries({}, {}, record.too_long),
        report=None,
        merge=merge,
        frozen={},
        reference={},
    )
    lake = SimpleNamespace(label="lake")
    run = SimpleNamespace(settings=updates.settings(), tasks=(lake,), tokens="tokens")
    state = SimpleNamespace(iteration=np.int32(0), updates=np.int32(0), actor="actor")
    with pytest.raises(StopIteration):
        starpo.iterate(run, programs, state)


def test_filter_and_penalty_of_a_record_take_the_iteration_of_the_state(monkeypatch):
    chosen = updates.settings(loss__kl=0.1)
    plan = UpdatePlan(
        chosen, updates.CONFIG, None, jnp.float32, None, (updates.LENGTH,)
    )
    taken = []

    def watch(module, name, at):
        compute = getattr(module, name)

        def watched(*given):
            taken.append(given[at])
            return compute(*given)

        monkeypatch.setattr(module, name, watched)

    watch(starpo, "uncertainty_filter", 3)
    watch(starpo.shaping, "token_rewards", 4)
    blank = jnp.zeros(updates.record()[0].tokens.shape)[:8]
    before = OldScores(*[blank] * 3)
    monkeypatch.setattr(starpo.forward, "old_scores", lambda *_: before)

    def score(state):
        starpo.score(plan, state, {}, {}, *updates.record())
        assert len(taken) == 2 and all(one is state.iteration for one in taken)

    jax.eval_shape(score, updates.new_state(chosen))


@pytest.mark.slow
def test_a_record_is_scored_by_the_coefficients_of_the_states_iteration():
    chosen = updates.settings(
        estimator="grpo",
        iterations=5,
        filter__fraction=0.25,
        filter__fraction_end=0.75,
        filter__loss_scale="linear",
        advantage__whiten=False,
    )
    plan = UpdatePlan(
        chosen, updates.CONFIG, None, jnp.float32, None, (updates.LENGTH,)
    )
    state, (rows, episodes) = updates.new_state(chosen), updates.record()

    @functools.partial(jax.jit, compiler_options=updates.QUICK_TO_COMPILE)
    def score(iteration):
        at = state.replace(iteration=iteration)
        return starpo.score(plan, at, {}, {}, rows, episodes)

    for iteration, groups in ((0, 1), (2, 2), (4, 3)):
        found = score(jnp.int32(iteration))
        assert found.selection.kept_groups.sum() == groups
        assert found.batch.weight.sum() == groups * updates.GROUP_SIZE
        # GRPO's advantages of a group have a deviation of 1, times the kept share.
        first = jnp.argmax(found.batch.is_reply, axis=1)
        gains = np.asarray(found.batch.advantages)[np.arange(len(first)), first]
        gains = gains[np.asarray(found.batch.weight) > 0]
        square = (gains**2).sum() / (groups * (updates.GROUP_SIZE - 1))
        np.testing.assert_allclose(square, (groups / 4) ** 2, rtol=1e-4)
