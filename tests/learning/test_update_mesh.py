"""An update shared by eight devices is the update of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates
from jax.sharding import Mesh

from ragen_jax.learning import forward, sharded_forward
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.models import lora, parameters, transformer
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.planning import programs

USUAL = dict(estimator="ppo", algorithm="starpo_s") | updates.TWICE
# Axes data, fsdp, tensor; what else differs from one device's update, which takes all
# 8 rows at once.
HALF_PADDING = dict(optimizer__minibatch=16, optimizer__microbatch=16)
SPLITS = {
    "data and fsdp": ((2, 4, 1), HALF_PADDING, dict(prefix=updates.OPENING)),
    "all three": (
        (2, 2, 2),
        dict(optimizer__microbatch=4),
        dict(prefix=updates.OPENING, lengths=(14, updates.LENGTH)),
    ),
    "data alone": (
        (8, 1, 1),
        HALF_PADDING,
        dict(prefix=updates.OPENING, lengths=(14, updates.LENGTH)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_eight_devices_learn_what_one_device_learns(split):
    sizes, changes, plan = SPLITS[split]
    mesh = meshes.make_mesh(*sizes)
    shared = updates.compiled(updates.settings(**USUAL | changes), mesh=mesh, **plan)
    alone = updates.compiled(updates.settings(**USUAL))
    updates.check_same(shared(*updates.record()), alone(*updates.record()))


@pytest.mark.slow
def test_gradients_of_whole_parameters_cross_devices_once_a_minibatch():
    """Two devices, four microbatches of a row each; the sums stand in no loop."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), meshes.AXES)
    chosen = updates.settings(**USUAL | dict(optimizer__microbatch=2))
    lengths = (14, updates.LENGTH)
    shared = updates.compiled(chosen, mesh=mesh, lengths=lengths)
    alone = updates.compiled(updates.settings(**USUAL))
    updates.check_same(shared(*updates.record()), alone(*updates.record()))
    inside = {"epochs": 1, "minibatches": 2}  # loops, one in the other
    depths = set(_depths_of_collectives(programs.read(shared.as_text())))
    assert max(depths) == inside["minibatches"]


def _depths_of_collectives(block, depth=0):
    """Of each collective, in how many loops it stands."""
    for part in block.without_loops():
        yield from (depth for _ in part.collectives)
        for loop in part.loops:
            yield from _depths_of_collectives(loop.body, depth + 1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_eight_devices_adapt_a_model_as_one_device_does(sizes):
    """Actor's and critic's adapters of every weight, sharing one sharded base."""
    adapters = lora.Adapters(rank=2, alpha=3.0, targets=lora.TARGETS)
    mesh = meshes.make_mesh(*sizes)
    chosen = updates.settings(**USUAL)
    shared = updates.compiled(chosen, mesh=mesh, adapters=adapters)
    alone = updates.compiled(chosen, adapters=adapters)
    found, wanted = shared(*updates.record()), alone(*updates.record())
    updates.check_same(found, wanted)
    before = updates.new_state(chosen, adapters)
    for name in ("actor", "critic"):
        moved = jax.tree.map(
            lambda x, y: np.abs(x - y).max(),
            getattr(found[0], name),
            getattr(before, name),
        )
        assert min(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((1, 8, 1), 16),
        ((1, 8, 1), 1),
        pytest.param((2, 2, 2), 8, marks=pytest.mark.slow),
    ],
)
def test_what_devices_exchange_to_look_tokens_up_is_as_large_as_the_rows(sizes, rows):
    """One row is the prefix's. Over a tensor axis the embedding itself is gathered."""
    chosen, mesh = updates.settings(**USUAL), meshes.make_mesh(*sizes)
    config = dataclasses.replace(updates.CONFIG, vocabulary=400)
    state = updates.shardings(chosen, mesh)
    plan = UpdatePlan(chosen, config, mesh, jnp.float32, state, (2,))
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(config.vocabulary, config.width)).astype(np.float32)
    tokens = rng.integers(0, config.vocabulary, (rows, 2))
    given = rng.normal(size=(rows, 2, config.width))

    def both(look_up):
        def loss(embedding):
            x = look_up({"embedding": embedding}, jnp.asarray(tokens), jnp.float32)
            return (given * x).sum(), x

        return jax.value_and_grad(loss, has_aux=True)

    spec = meshes.training_specs(parameters.declare(config), mesh)["embedding"]
    shards = jax.NamedSharding(mesh, spec)
    shared = jax.jit(
        both(functools.partial(sharded_forward._embed_on_shards, plan, rows == 1)),
        in_shardings=shards,
        out_shardings=(None, shards),
    )
    (_, found), gradient = shared(embedding)
    (_, wanted), slope = both(transformer.embed)(embedding)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-6)
    exchanged = programs.read(shared.lower(embedding).compile().as_text()).collectives
    most = max(each.bytes for each in exchanged)
    assert most <= 4 * (given.size if sizes[2] == 1 else embedding.size // 2)


def test_a_microbatch_of_one_row_is_not_taken_for_the_prefix(monkeypatch):
    """The prefix has plain attention where rows have a TPU's kernel."""
    kernels = []

    def attend(query, *_, kernel):
        kernels.append(kernel)
        return query

    monkeypatch.setattr(sharded_forward, "causal_attention", attend)
    monkeypatch.setattr(backend_choices, "row_attention", lambda *_: "splash")
    chosen = updates.settings(**USUAL)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), meshes.AXES)
    state = updates.shardings(chosen, mesh)
    plan = UpdatePlan(
        chosen, updates.CONFIG, mesh, jnp.float32, state, (5,), updates.OPENING
    )
    _, critic = updates.parameters()
    prefix = jax.eval_shape(lambda: forward.prefix_states(plan, critic))
    assert set(kernels) == {"xla"}
    kernels.clear()
    row = jnp.zeros((1, 5), jnp.int32)
    jax.eval_shape(lambda kv: forward.critic_values(plan, critic, row, kv), prefix)
    assert set(kernels) == {chosen.model.attention} == {"auto"}


def test_each_device_holds_its_share_of_the_parameters():
    chosen = updates.settings(**USUAL)
    shardings = updates.shardings(chosen, meshes.make_mesh(2, 2, 2))
    actor, _ = updates.parameters()
    placed = jax.device_put(actor, shardings.actor)["layers"]["up"]
    shares = [shard.data.shape for shard in placed.addressable_shards]
    layers, width, hidden = placed.shape
    assert shares == [(layers, width // 2, hidden // 2)] * 8
    np.testing.assert_array_equal(placed, actor["layers"]["up"])
