"""A small random model, a tokenizer and a FrozenLake dialogue, shared by tests.

`make_task` builds them in about a second; nothing is compiled before a rollout is.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from transformers import PreTrainedTokenizerFast

from ragen_jax.envs.base import TRAIN, Environment
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig, RopeScaling
from ragen_jax.models.io import partial_reads
from ragen_jax.models.io.sources import Source
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import plan as plan_lib
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout import tasks as tasks_lib
from ragen_jax.rollout.rollout import Rollout, RolloutContext
from ragen_jax.rollout.types import RolloutArgs, RolloutOptions, RolloutPlan
from ragen_jax.text import chat_template, tiny_tokenizer
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.chat_template import ChatPieces
from ragen_jax.text.prompts import Dialogue, DialogueTokens, TurnLimits

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
class Task:
    """A policy, an environment and what they say to each other."""

    config: ModelConfig
    parameters: Parameters  # float32
    tokenizer: PreTrainedTokenizerFast
    env: Environment
    pieces: ChatPieces
    dialogue: Dialogue
    tokens: DialogueTokens

    def rollout_context(self, mesh: Mesh, layout: str = "replicated") -> RolloutContext:
        """What a rollout on `mesh` needs to know, computing in float32."""
        shares = (self.share(),)
        return RolloutContext(self.config, jnp.float32, shares, mesh, layout)

    def share(self, prompts: int = 4) -> tasks_lib.Task:
        """The environment and its texts, with so many prompts of a batch."""
        return tasks_lib.Task("lake", self.env, self.dialogue, prompts)

    def plan(self, prompts: int = 4, **sizes: Any) -> RolloutPlan:
        """A plan of 4 x 4 episodes on one shard, or of other `sizes`."""
        usual = dict(group_size=4, slots=0, context=0, shards=1)
        usual |= dict(decode_chunk=2, buckets=1)
        share = self.share(prompts)
        return make_plan((share,), (self.tokens,), **(usual | sizes))


def make_plan(tasks, tokens, **sizes: Any) -> RolloutPlan:
    """`plan.make_plan`, with the fields of its options among the sizes."""
    names = [field.name for field in dataclasses.fields(RolloutOptions)]
    options = {name: sizes.pop(name) for name in names if name in sizes}
    return plan_lib.make_plan(tasks, tokens, RolloutOptions(**options), **sizes)


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's kind of tokenizer with `FRAGMENTS` as further tokens.

    It is the same object at each call: do not change it.
    """
    env = frozen_lake.make(frozen_lake.FrozenLake())
    text = prompts_lib.system_prompt(env, TurnLimits(5, 5, 10, 100), True)
    text += "".join(env.phrases) + "Turn 1 of 3. Actions left: 4.\nReward: 0.0\n"
    text += "Your last reply had no valid answer or an unknown action.\n"
    tokenizer = tiny_tokenizer.train_tokenizer([text] * 10)
    tokenizer.add_tokens(list(FRAGMENTS))
    return tokenizer


def make_task(
    limits: TurnLimits = TurnLimits(3, 2, 4, 5),  # noqa: B008  (frozen)
    *,
    settings: frozen_lake.FrozenLake = frozen_lake.FrozenLake(3, 0.7),  # noqa: B008
    thinking: bool = True,
    more_stops: tuple[int, ...] = (),
    **shape: Any,
) -> Task:
    """A task in which random replies are often valid and episodes end in every way.

    Args:
      limits: of turns, actions a turn, actions, reply tokens.
      settings: of the lake, 3 x 3 and slippery by default.
      thinking: whether replies have a thought.
      more_stops: tokens that end a reply beside the template's, as often sampled.
      shape: fields of the model's `ModelConfig` that are to differ.
    """
    tokenizer = make_tokenizer()
    # Wider than the tokenizer, as most models are: such ids stand for no text.
    config = small_config(len(tokenizer) + 3, **shape)
    env = frozen_lake.make(settings)
    pieces = chat_template.cut_pieces(tokenizer, "the test's tokenizer", more_stops)
    texts = prompts_lib.make_dialogue(env, limits, pieces, thinking=thinking)
    favoured = [*tokenizer.convert_tokens_to_ids(list(FAVOURED)), *more_stops]
    return Task(
        config=config,
        parameters=talkative_parameters(config, favoured),
        tokenizer=tokenizer,
        env=env,
        pieces=pieces,
        dialogue=texts,
        tokens=prompts_lib.tokenize_dialogue(
            texts, env, pieces, tokenizer, config.vocabulary
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
    rng = np.random.default_rng(seed)
    drawn = []
    for leaf in leaves:
        noise = rng.normal(size=leaf.shape)
        value = 1 + 0.2 * noise if leaf.mean else (10 * leaf.scale or 0.3) * noise
        drawn.append(jnp.asarray(value, jnp.float32))
    return tree.unflatten(drawn)


def read_model(path: Path) -> tuple[Parameters, ModelConfig]:
    """All weights of a folder or a GGUF file, on the host, and the model's shape."""
    source = Source(path, is_gguf=path.is_file())
    config = source.read_config()
    declared = model_parameters.declare(config)
    read = source.open_parameters(config, declared)
    return partial_reads.read_tree(read, declared), config


def talkative_parameters(config: ModelConfig, favoured: list[int]) -> Parameters:
    """Random parameters whose policy says the `favoured` ids nine times in ten.

    The first feature is large in every token's embedding and untouched by the layers,
    and the head reads a preference from it; all other features depend on the context.
    """
    parameters = random_parameters(config)
    layers = parameters["layers"]
    embedding = parameters["embedding"].at[:, 0].set(8.0)
    quiet = {name: layers[name].at[..., 0].set(0) for name in ("output", "down")}
    # The first feature makes up most of the norm and comes out near 0.83 sqrt(D).
    odds = 9 * (config.vocabulary / len(favoured) - 1)
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
    task: Task,
    plan: RolloutPlan,
    mesh: Mesh | None = None,
    layout: str = "replicated",
    **options: bool,
) -> jax.stages.Compiled:
    """`rollout.make_rollout`, compiled for (parameters, tokens, call).

    Args:
      task, plan: what is played.
      mesh: of the first device alone by default.
      layout: of the weights while sampling.
      options: of XLA, for this program alone.
    """
    context = task.rollout_context(mesh or one_device(), layout)
    rollout = rollout_lib.make_rollout(context, plan)
    lowered = rollout.lower(task.parameters, (task.tokens,), call())
    return lowered.compile(compiler_options=options or None)


@functools.cache
def usual_task() -> Task:
    """`make_task()`, the same object at each call."""
    return make_task()


@functools.cache
def usual_program() -> jax.stages.Compiled:
    """16 episodes of the usual task on one device: a slot each, one bucket."""
    return compile_rollout(usual_task(), usual_task().plan())


def sample_usual(**changes: Any) -> Rollout:
    """Runs the usual program; `changes` are arguments of `call`."""
    task = usual_task()
    return usual_program()(task.parameters, (task.tokens,), call(**changes))


def check_same_record(one: Rollout, other: Rollout) -> None:
    """Fails unless two records agree: exactly, and floats of the sampler nearly."""
    for name in ("logprobs", "entropy"):
        values = getattr(one.rows, name), getattr(other.rows, name)
        # Nats: programs of other shapes add in another order.
        np.testing.assert_allclose(*values, rtol=0, atol=2e-5, err_msg=name)
    exact = [
        (record.rows.replace(logprobs=None, entropy=None), record.episodes)
        for record in (one, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *exact)


def one_device() -> Mesh:
    """A mesh of the first device alone."""
    return first_devices(1, 1, 1)


def first_devices(*sizes: int) -> Mesh:
    """A mesh of so many devices on the axes data, fsdp and tensor."""
    types, devices = (AxisType.Auto,) * 3, jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, meshes.AXES, types, devices=devices)


def call(seed: int = 0, **changes: Any) -> RolloutArgs:
    """The arguments of a training rollout at temperature 1."""
    usual = RolloutArgs(
        seed=np.uint32(seed),
        split=np.int32(TRAIN),
        iteration=np.int32(2),
        first_prompt=np.int32(0),
        temperature=np.float32(1),
        policy_version=np.int32(7),
    )
    return usual.replace(**changes)
