"""A record sampled from a small model, and updates compiled for it, shared by tests."""

import dataclasses
import functools
import runpy
import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
from jax.sharding import Mesh

from ragen_jax import loop
from ragen_jax import settings as run_settings
from ragen_jax.learning import state as states
from ragen_jax.learning import update
from ragen_jax.learning.state import TrainState
from ragen_jax.models import transformer
from ragen_jax.models.parameters import Parameters
from ragen_jax.settings import Settings
from ragen_jax.trajectory import END_OF_TURN, PADDING, WORLD_DONE, Episodes, Rows

PROMPTS, GROUP_SIZE, TURNS, LENGTH = 4, 4, 3, 24
CONFIG = models.small_config(22, width=16, head_dim=4, mlp_width=24)
_CONFIG_FILE = Path(__file__).parents[1] / "configs" / "frozenlake.py"


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
        optimizer__clip_norm=0.5,
        optimizer__minibatch=8,
        optimizer__microbatch=8,
        optimizer__weight_decay=0.01,
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


def new_state(chosen: Settings) -> TrainState:
    """The state before the first iteration."""
    actor, critic = parameters()
    return states.new_state(actor, critic if chosen.estimator == "ppo" else {}, chosen)


@functools.cache
def record(gap: float = 0.3) -> tuple[Rows, Episodes]:
    """Episodes of 1 to 3 turns; returns of group 2 are all equal.

    Args:
      gap: nats, how far the recorded log-probs lie from those of `parameters()`.
    """
    chance = np.random.default_rng(5)
    count = PROMPTS * GROUP_SIZE
    played = chance.integers(1, TURNS + 1, count)
    turn = np.full((count, LENGTH), PADDING)
    is_reply, turn_end = (np.zeros((count, LENGTH), bool) for _ in range(2))
    for row in range(count):
        at = 0
        for index in range(played[row]):
            fed, said = chance.integers(1, 4), chance.integers(1, 5)
            turn[row, at : at + fed + said] = index
            is_reply[row, at + fed : at + fed + said] = True
            at += fed + said
            turn_end[row, at - 1] = True
    tokens = chance.integers(0, CONFIG.vocabulary, (count, LENGTH))
    tokens = np.where(turn == PADDING, 0, tokens)
    logprobs = log_policy(parameters()[0], tokens, 0.8)
    logprobs = np.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    logprobs = logprobs + gap * chance.normal(size=tokens.shape)
    group = np.repeat(np.arange(PROMPTS), GROUP_SIZE)
    reward = chance.integers(0, 3, (count, TURNS)) * np.array([[1.0], [0.4], [0], [2]])[
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
        end=jnp.full(count, WORLD_DONE, jnp.int32),
        turns=jnp.asarray(played, jnp.int32),
        reward=jnp.asarray(reward, jnp.float32),
        is_valid=jnp.asarray(chance.random((count, TURNS)) < 0.7),
        actions=jnp.asarray(everywhere),
        reply_tokens=jnp.asarray(everywhere),
        reply_end=jnp.asarray(everywhere * END_OF_TURN),
    )
    return rows, episodes


def log_policy(weights: Parameters, tokens, temperature: float) -> jax.Array:
    """float32[R, T, V], log softmax(logits / temperature) before each token.

    Position 0 has nothing before it and holds 0.
    """
    hidden = transformer.hidden_states(weights, jnp.asarray(tokens), CONFIG)
    logits = transformer.vocabulary_logits(weights, hidden) / temperature
    shifted = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
    return jnp.pad(shifted, ((0, 0), (1, 0), (0, 0)))


@functools.cache
def compiled(
    chosen: Settings, lengths: tuple[int, ...] = (LENGTH,), mesh: Mesh | None = None
) -> Callable:
    """(rows, episodes, state=None, reference={}) -> (state, Learned), on the host."""
    mesh = mesh or models.one_device()
    parts = types.SimpleNamespace(settings=chosen, mesh=mesh, config=CONFIG)
    shardings = loop.state_shardings(parts)
    plan = update.UpdatePlan(chosen, CONFIG, mesh, jnp.float32, lengths)
    program = update.make_update(plan, shardings)

    def run(rows, episodes, state=None, reference=None):
        # Put anew: the program reuses the memory of the state that it is given.
        state = jax.device_get(new_state(chosen) if state is None else state)
        shared = jax.NamedSharding(mesh, loop.meshes.ROWS)
        whole = jax.NamedSharding(mesh, jax.P())
        return jax.device_get(
            program(
                jax.device_put(state, shardings),
                {},
                jax.device_put(jax.device_get(reference or {}), whole),
                *jax.device_put(jax.device_get((rows, episodes)), shared),
            )
        )

    return run


def replace_episodes(episodes: Episodes, order: np.ndarray) -> Episodes:
    """The same episodes in another order."""
    return jax.tree.map(lambda x: x[order], episodes)


def fields(learned) -> dict[str, float]:
    """Every reported number by name."""
    sums = learned.sums
    named = {
        field.name: getattr(sums, field.name) for field in dataclasses.fields(sums)
    }
    means = {
        name: float(x) if name == "logprob_gap_max" else float(x.value())
        for name, x in named.items()
    }
    rest = {
        field.name: float(getattr(learned, field.name))
        for field in dataclasses.fields(learned)
        if field.name != "sums"
    }
    return means | rest
