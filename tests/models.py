"""A small random model, a tokenizer and a FrozenLake dialogue, shared by tests.

`make_scene` builds them in about a second; nothing is compiled before a rollout is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from transformers import PreTrainedTokenizerFast

from ragen_jax import mesh as meshes
from ragen_jax.envs import frozen_lake
from ragen_jax.envs.base import TRAIN, World
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig, RopeScaling
from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import sample, scenes
from ragen_jax.rollout.sample import Call, Rollout, Setting
from ragen_jax.rollout.slots import Plan
from ragen_jax.text import chat, dialogue, tiny_tokenizer
from ragen_jax.text.chat import ChatPieces
from ragen_jax.text.dialogue import Dialogue, DialogueTokens, TurnLimits

# What `small_config` changes for the other families. Scaled, the four pairs of a head
# turn 10, 1.02, 0.1 and 0.01 times in 64 positions: one fast, one between, two slow.
QWEN3 = dict(family="qwen3", qkv_bias=False, qk_norm=True, head_dim=12)
LLAMA3 = dict(
    family="llama",
    qkv_bias=False,
    rope_base=1e4,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
)

# Pieces of replies, one token each, so that a random policy often says something.
FRAGMENTS = (
    "</think><answer>Down || Right</answer>",
    "</think><answer>Left || Left || Up</answer>",
    "</think>\n<answer> up||jump</answer>",
    "</think><answer>",
    "RIGHT ",
    "|| Down",
)
FAVOURED = (*FRAGMENTS, "</answer>", tiny_tokenizer.END)


@dataclasses.dataclass(frozen=True)
class Scene:
    """A policy, a world and what they say to each other."""

    config: ModelConfig
    parameters: Parameters  # float32
    tokenizer: PreTrainedTokenizerFast
    world: World
    pieces: ChatPieces
    dialogue: Dialogue
    tokens: DialogueTokens

    def setting(self, mesh: Mesh, layout: str = "replicated") -> Setting:
        """What a rollout on `mesh` needs to know, computing in float32."""
        shares = (self.share(),)
        return Setting(self.config, jnp.float32, shares, mesh, layout)

    def share(self, prompts: int = 4) -> scenes.Scene:
        """The world and its texts, with so many prompts of a batch."""
        return scenes.Scene("lake", self.world, self.dialogue, prompts)

    def plan(self, prompts: int = 4, **sizes: Any) -> Plan:
        """A plan of 4 x 4 episodes on one shard, or of other `sizes`."""
        usual = dict(group_size=4, slots=0, context=0, shards=1)
        usual |= dict(decode_chunk=2, buckets=1)
        share = self.share(prompts)
        return sample.make_plan((share,), (self.tokens,), **(usual | sizes))


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's kind of tokenizer with `FRAGMENTS` as further tokens.

    It is the same object at each call: do not change it.
    """
    world = frozen_lake.world(frozen_lake.FrozenLake())
    text = dialogue.system_prompt(world, TurnLimits(5, 5, 10, 100), True)
    text += "".join(world.phrases) + "Turn 1 of 3. Actions left: 4.\nReward: 0.0\n"
    text += "Your last reply had no valid answer or an unknown action.\n"
    tokenizer = tiny_tokenizer.train_tokenizer([text] * 10)
    tokenizer.add_tokens(list(FRAGMENTS))
    return tokenizer


def make_scene(
    limits: TurnLimits = TurnLimits(3, 2, 4, 5),  # noqa: B008  (frozen)
    *,
    settings: frozen_lake.FrozenLake = frozen_lake.FrozenLake(3, 0.7),  # noqa: B008
    thinking: bool = True,
    **shape: Any,
) -> Scene:
    """A scene in which random replies are often valid and episodes end in every way.

    Args:
      limits: of turns, actions a turn, actions, reply tokens.
      settings: of the lake, 3 x 3 and slippery by default.
      thinking: whether replies have a thought.
      shape: fields of the model's `ModelConfig` that are to differ.
    """
    tokenizer = make_tokenizer()
    # Wider than the tokenizer, as most models are: such ids stand for no text.
    config = small_config(len(tokenizer) + 3, **shape)
    world = frozen_lake.world(settings)
    pieces = chat.cut_pieces(tokenizer, "the test's tokenizer")
    texts = dialogue.make_dialogue(world, limits, pieces, thinking=thinking)
    favoured = tokenizer.convert_tokens_to_ids(list(FAVOURED))
    return Scene(
        config=config,
        parameters=talkative_parameters(config, favoured),
        tokenizer=tokenizer,
        world=world,
        pieces=pieces,
        dialogue=texts,
        tokens=dialogue.tokenize_dialogue(
            texts, world, pieces, tokenizer, config.vocabulary
        ),
    )


def small_config(vocabulary: int, **changes: Any) -> ModelConfig:
    """Two layers of width 32, 4 query heads and 2 key/value heads."""
    config = ModelConfig(
        family="qwen2",
        vocabulary=vocabulary,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=48,
        rope_base=1e4,
        norm_epsilon=1e-6,
        tied=False,
        qkv_bias=True,
        longest_context=1024,
    )
    return dataclasses.replace(config, **changes)


def random_parameters(config: ModelConfig, seed: int = 0) -> Parameters:
    """Far from the usual start: no leaf is 0 or 1, and attention is sharp.

    So that an error in any leaf or position shows in the logits.
    """
    declared = model_parameters.declare(config)
    leaves, tree = jax.tree.flatten(declared, is_leaf=model_parameters.is_leaf)
    chance = np.random.default_rng(seed)
    drawn = []
    for leaf in leaves:
        noise = chance.normal(size=leaf.shape)
        value = 1 + 0.2 * noise if leaf.scale < 0 else (10 * leaf.scale or 0.3) * noise
        drawn.append(jnp.asarray(value, jnp.float32))
    return tree.unflatten(drawn)


def talkative_parameters(
    config: ModelConfig, favoured: list[int], share: float = 0.9, seed: int = 0
) -> Parameters:
    """Random parameters whose policy says the `favoured` ids about `share` of the time.

    The first feature is large in every token's embedding and untouched by the layers,
    and the head reads a preference from it; all other features depend on the context.
    """
    parameters = random_parameters(config, seed)
    layers = parameters["layers"]
    embedding = parameters["embedding"].at[:, 0].set(8.0)
    quiet = {name: layers[name].at[..., 0].set(0) for name in ("output", "down")}
    # The first feature makes up most of the norm and comes out near 0.83 sqrt(D).
    odds = share / (1 - share) * (config.vocabulary / len(favoured) - 1)
    head = parameters["head"].at[0].set(0)
    head = head.at[0, jnp.array(favoured)].set(
        np.log(odds) / (0.83 * config.width**0.5)
    )
    final_norm = parameters["final_norm"].at[0].set(1.0)
    return {
        **parameters,
        "embedding": embedding,
        "layers": {**layers, **quiet},
        "final_norm": final_norm,
        "head": head,
    }


def compile_rollout(
    scene: Scene, plan: Plan, mesh: Mesh | None = None, layout: str = "replicated"
) -> jax.stages.Compiled:
    """`sample.make_rollout`, compiled for (parameters, tokens, call)."""
    setting = scene.setting(mesh or one_device(), layout)
    rollout = sample.make_rollout(setting, plan)
    return rollout.lower(scene.parameters, (scene.tokens,), call()).compile()


@functools.cache
def usual_scene() -> Scene:
    """`make_scene()`, the same object at each call."""
    return make_scene()


@functools.cache
def usual_program() -> jax.stages.Compiled:
    """16 episodes of the usual scene on one device: a slot each, one bucket."""
    return compile_rollout(usual_scene(), usual_scene().plan())


def sample_usual(**changes: Any) -> Rollout:
    """Runs the usual program; `changes` are arguments of `call`."""
    scene = usual_scene()
    return usual_program()(scene.parameters, (scene.tokens,), call(**changes))


def check_same_record(one: Rollout, other: Rollout, tolerance: float = 2e-5) -> None:
    """Fails unless two records agree: exactly, and floats of the sampler nearly.

    Args:
      tolerance: in nats; programs of other shapes add in another order.
    """
    for name in ("logprobs", "entropy"):
        values = getattr(one.rows, name), getattr(other.rows, name)
        np.testing.assert_allclose(*values, rtol=0, atol=tolerance, err_msg=name)
    exact = [
        (record.rows.replace(logprobs=None, entropy=None), record.episodes)
        for record in (one, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *exact)


def one_device() -> Mesh:
    """A mesh of the first device alone."""
    types = (AxisType.Auto,) * 3
    return jax.make_mesh((1, 1, 1), meshes.AXES, types, devices=jax.devices()[:1])


def call(seed: int = 0, **changes: Any) -> Call:
    """The arguments of a training rollout at temperature 1."""
    usual = Call(
        seed=np.uint32(seed),
        split=np.int32(TRAIN),
        iteration=np.int32(2),
        first_prompt=np.int32(0),
        temperature=np.float32(1),
        policy_version=np.int32(7),
    )
    return usual.replace(**changes)
