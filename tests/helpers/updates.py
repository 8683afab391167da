"""A record sampled from a small model, and updates compiled for it, shared by tests."""

import dataclasses
import functools
import runpy
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from helpers import models, records
from helpers.paths import CONFIGS
from ragen_jax import settings as run_settings
from ragen_jax import starpo
from ragen_jax.learning import train_state as states
from ragen_jax.learning.train_state import TrainState, UpdateArgs
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.models import lora, transformer
from ragen_jax.models.lora import Adapters
from ragen_jax.models.parameters import Parameters, declare, is_leaf
from ragen_jax.parallel import mesh as meshes
from ragen_jax.settings import Settings
from ragen_jax.training import placement, weights
from ragen_jax.trajectory import END_OF_TURN, ENV_DONE, PADDING, Episodes, Rows

PROMPTS, GROUP_SIZE, TURNS, LENGTH = 4, 4, 3, 24
OPENING = (3, 1, 20)  # what every row begins with
# Compiles in half the time; such small programs run in milliseconds all the same.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}
CONFIG = models.small_config(22, width=16, head_dim=4, mlp_width=24)
# Two updates of all kept rows: the second sees a policy and a critic that have moved.
TWICE = dict(optimizer__epochs=2, optimizer__warmup=2, loss__value_clip=0.01)
_CONFIG_FILE = CONFIGS / "frozenlake.py"


def settings(**overrides) -> Settings:
    """Settings for the record below, with leaves replaced: `loss__kl=0.1`."""
    config = runpy.run_path(str(_CONFIG_FILE))["get_config"]().to_dict()
    usual = dict(
        rollout__prompts=PROMPTS,
        rollout__group_size=GROUP_SIZE,
        rollout__temperature=0.8,
        filter__fraction=0.5,
        advantage__gamma=0.9,
        advantage__lam=0.8,
        loss__entropy=0.02,
        optimizer__actor_lr=1e-3,
        optimizer__critic_lr=2e-3,
        optimizer__warmup=0,
        optimizer__schedule="constant",
        optimizer__clip_norm=0.5,
        optimizer__minibatch=8,
        optimizer__microbatch=8,
        optimizer__weight_decay=0.01,
        # Above the rounding of a gradient whose terms cancel: by 1e-8 some weight of
        # thousands would be moved by rounding alone, and tests could not be strict.
        optimizer__epsilon=1e-6,
        env__size=3,
    )
    for key, value in (usual | overrides).items():
        *section, leaf = key.split("__")
        (config[section[0]] if section else config)[leaf] = value
    return run_settings.from_dict(config)


def parameters() -> tuple[Parameters, Parameters]:
    """(actor, critic), two different models."""
    actor, critic = (models.random_parameters(CONFIG, seed) for seed in (0, 1))
    value_head = critic.pop("head")[:, 0] / 4
    return actor, {**critic, "value_head": value_head}


def adapter_parameters(adapters: Adapters) -> tuple[Parameters, Parameters]:
    """(actor, critic), adapters that already change the model `parameters()[0]`."""
    rng = np.random.default_rng(6)
    return tuple(
        jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32),
            lora.declare_adapters(CONFIG, adapters, value_head=value_head),
            is_leaf=is_leaf,
        )
        for value_head in (False, True)
    )


@functools.cache
def new_state(chosen: Settings, adapters: Adapters | None = None) -> TrainState:
    """The state before the first iteration, on the host."""
    actor, critic = adapter_parameters(adapters) if adapters else parameters()
    critic = critic if chosen.has_critic else {}
    return jax.device_get(states.new_state(actor, critic, chosen))


def reference(chosen: Settings) -> Parameters:
    """A policy near that of `parameters()`, {} where the loss has no KL term."""
    if chosen.loss.kl == 0:
        return {}
    other = models.random_parameters(CONFIG, seed=2)
    return jax.tree.map(lambda x, y: 0.95 * x + 0.05 * y, parameters()[0], other)


@functools.cache
def record(gap: float = 0.3) -> tuple[Rows, Episodes]:
    """Episodes of 1 to 3 turns; returns of group 2 are all equal. Row i is episode i.

    Args:
      gap: nats, how far the recorded log-probs lie from those of `parameters()`.
    """
    rng = np.random.default_rng(5)
    count = PROMPTS * GROUP_SIZE
    played = rng.integers(1, TURNS + 1, count)
    turn = np.full((count, LENGTH), PADDING)
    is_reply, turn_end = (np.zeros((count, LENGTH), bool) for _ in range(2))
    for row in range(count):
        at = 0
        for index in range(played[row]):
            fed, said = rng.integers(1, 4), rng.integers(1, 5)
            fed += len(OPENING) if index == 0 else 0
            turn[row, at : at + fed + said] = index
            is_reply[row, at + fed : at + fed + said] = True
            at += fed + said
            turn_end[row, at - 1] = True
    tokens = rng.integers(0, CONFIG.vocabulary, (count, LENGTH))
    tokens[:, : len(OPENING)] = OPENING
    tokens = np.where(turn == PADDING, 0, tokens)
    score = jax.jit(log_policy, compiler_options=QUICK_TO_COMPILE)
    logprobs = np.asarray(score(parameters()[0], tokens, 0.8))
    logprobs = np.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    logprobs = logprobs + gap * rng.normal(size=tokens.shape)
    group = np.repeat(np.arange(PROMPTS), GROUP_SIZE)
    reward = rng.integers(0, 3, (count, TURNS)) * np.array([[1.0], [0.4], [0], [2]])[
        group
    ].reshape(count, 1)
    everywhere = np.ones((count, TURNS), np.int32)
    rows = Rows(
        tokens=jnp.asarray(tokens, jnp.int32),
        is_reply=jnp.asarray(is_reply),
        logprobs=jnp.asarray(np.where(is_reply, logprobs, 0), jnp.float32),
        entropy=jnp.zeros(tokens.shape),
        episode=jnp.asarray(
            np.where(turn == PADDING, PADDING, np.arange(count)[:, None]), jnp.int32
        ),
        turn=jnp.asarray(turn, jnp.int32),
        turn_end=jnp.asarray(turn_end),
        policy_version=jnp.zeros(count, jnp.int32),
    )
    episodes = Episodes(
        group=jnp.asarray(group, jnp.int32),
        environment=jnp.zeros(count, jnp.int32),
        success=jnp.zeros(count, bool),
        end=jnp.full(count, ENV_DONE, jnp.int32),
        turns=jnp.asarray(played, jnp.int32),
        reward=jnp.asarray(reward, jnp.float32),
        is_valid=jnp.asarray(rng.random((count, TURNS)) < 0.7),
        actions=jnp.asarray(everywhere),
        reply_tokens=jnp.asarray(everywhere),
        reply_end=jnp.asarray(everywhere * END_OF_TURN),
        thought_tokens=jnp.asarray(everywhere),
        grounded=jnp.zeros((count, TURNS), jnp.float32),
    )
    return rows, episodes


@functools.cache
def record_of_turns() -> tuple[Rows, Episodes]:
    """The same episodes, a row for each turn of a window that holds all turns.

    Rows of turns that were never played are padding, and the order is any.
    """
    whole, episodes = record()
    played = records.split_turns(whole)
    count, order = PROMPTS * GROUP_SIZE * TURNS, np.random.default_rng(1)
    room = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), played)
    room = room.replace(episode=room.episode + PADDING, turn=room.turn + PADDING)
    places = order.permutation(count)[: len(played.tokens)]

    def put(room, x):
        room[places] = x
        return jnp.asarray(room)

    return jax.tree.map(put, room, played), episodes


def log_policy(weights: Parameters, tokens, temperature: float) -> jax.Array:
    """float32[R, T, V], log softmax(logits / temperature) before each token.

    Position 0 has nothing before it and holds 0.
    """
    hidden = transformer.hidden_states(weights, jnp.asarray(tokens), CONFIG)
    logits = transformer.vocabulary_logits(weights, hidden) / temperature
    shifted = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
    return jnp.pad(shifted, ((0, 0), (1, 0), (0, 0)))


def first_use(chosen: Settings) -> UpdateArgs:
    """What an update of a record is given besides it."""
    return states.update_arguments(chosen, [])


def shardings(
    chosen: Settings, mesh: Mesh, adapters: Adapters | None = None
) -> TrainState:
    """Where a run keeps its state on `mesh`."""
    of = functools.partial(declare, CONFIG)
    if adapters is not None:
        of = functools.partial(lora.declare_adapters, CONFIG, adapters)
    critic = of(value_head=True) if chosen.estimator == "ppo" else {}
    return placement.state_shardings(chosen, mesh, of(), critic)


@functools.cache
def compiled(
    chosen: Settings,
    lengths: tuple[int, ...] = (LENGTH,),
    prefix: tuple[int, ...] = (),
    mesh: Mesh | None = None,
    adapters: Adapters | None = None,
    sampled: Callable[[], tuple[Rows, Episodes]] = record,
) -> Callable:
    """(rows, episodes, state, args) -> (state, UpdateMetrics), in and out on the host.

    Compiled for records of the shapes of `sampled()`; `as_text()` is the program.
    Without a state the run begins with `new_state`, and without `update_args` the
    update is the `first_use`; the reference is `reference()`, the base of adapters
    `parameters()[0]`.
    """
    mesh = mesh or models.one_device()
    placed = shardings(chosen, mesh, adapters)
    assemble = weights.assembler(adapters)
    plan = UpdatePlan(
        chosen, CONFIG, mesh, jnp.float32, placed, lengths, prefix, assemble
    )
    shared = jax.NamedSharding(mesh, meshes.ROWS)
    whole = jax.NamedSharding(mesh, jax.P())
    compared = jax.device_put(reference(chosen), whole)
    specs = meshes.training_specs(declare(CONFIG), mesh)
    base = jax.device_put(parameters()[0], meshes.shardings(specs, mesh))
    frozen = base if adapters else {}

    def arguments(rows, episodes, state, update_args):
        state = new_state(chosen, adapters) if state is None else state
        # Put again from the host: the program reuses the memory of the state.
        state = jax.device_put(jax.device_get(state), placed)
        episodic = jax.device_put(jax.device_get((rows, episodes)), shared)
        return state, frozen, compared, *episodic, update_args or first_use(chosen)

    program = starpo.make_update(plan).lower(*arguments(*sampled(), None, None))
    program = program.compile(compiler_options=QUICK_TO_COMPILE)

    def run(rows, episodes, state=None, update_args=None):
        return jax.device_get(program(*arguments(rows, episodes, state, update_args)))

    run.as_text = program.as_text
    return run


def reorder(rows: Rows, episodes: Episodes, order) -> tuple[Rows, Episodes]:
    """The same record with episode and row i where `order[i]` was.

    Args:
      rows, episodes: one row an episode, in the order of episodes.
      order: int[B], a permutation that leaves members of a group together.
    """
    rows, episodes = jax.tree.map(lambda x: np.asarray(x)[order], (rows, episodes))
    place = np.arange(len(order))
    rows = rows.replace(
        episode=np.where(rows.episode == PADDING, PADDING, place[:, None])
    )
    group = (place // GROUP_SIZE).astype(np.int32)
    return rows.replace(episode=rows.episode.astype(np.int32)), episodes.replace(
        group=group
    )


def fields(learned) -> dict[str, float]:
    """Every reported number by name."""
    sums = learned.sums
    named = {
        field.name: getattr(sums, field.name) for field in dataclasses.fields(sums)
    }
    means = {
        name: float(x) if name.endswith("_max") else float(x.value())
        for name, x in named.items()
    }
    rest = {
        field.name: float(getattr(learned, field.name))
        for field in dataclasses.fields(learned)
        if field.name not in ("sums", "counts")
    }
    return means | rest | {"made": float(learned.counts.real)}


def counters(state) -> dict[str, int]:
    """The counts of a state by name."""
    names = ("iteration", "updates", "bad_in_row", "empty_in_row", "skipped_bad")
    return {name: int(getattr(state, name)) for name in (*names, "skipped_empty")}


def check_same(found, expected) -> None:
    """Two results of an update, but for the order in which sums were taken."""
    state, learned = found
    chex.assert_trees_all_close(
        (state.actor, state.critic),
        (expected[0].actor, expected[0].critic),
        rtol=0,
        atol=2e-6,
    )
    assert counters(state) == counters(expected[0])
    figures = fields(expected[1])
    for name, value in fields(learned).items():
        np.testing.assert_allclose(
            value, figures[name], rtol=1e-5, atol=1e-5, err_msg=name
        )
