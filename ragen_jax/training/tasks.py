"""Makes `Task`s: environments with texts and tokens, checked against the model.

And the static part of rollouts, which `run.prepare` and the evaluators need.
"""

from collections.abc import Sequence

from ragen_jax import envs
from ragen_jax.envs.base import Environment
from ragen_jax.errors import UserError
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout.plan import make_plan
from ragen_jax.rollout.rollout import RolloutContext
from ragen_jax.rollout.tasks import Task, TaskTokens
from ragen_jax.rollout.types import RolloutOptions, RolloutPlan
from ragen_jax.settings import TEXTS, Settings, TaskSettings
from ragen_jax.text.prompts import (
    DialogueTokens,
    TurnLimits,
    make_dialogue,
    tokenize_dialogue,
)
from ragen_jax.training import context_checks
from ragen_jax.training.model import Model


def make_task(
    model: Model,
    env_task: TaskSettings,
    section: str = "",
    *,
    is_training: bool = True,
) -> tuple[Task, DialogueTokens]:
    """An environment with its texts and their tokens, checked against the model.

    Args:
      model: that plays it.
      env_task: the environment, with its limits.
      section: "env.mix" or "env.evaluate", where its settings stand; "" for `env`.
      is_training: whether training plays it, in rows of `rollout.context`.

    Raises:
      UserError: if there is no such environment, its settings are wrong, or what may
        be said has no room.
    """
    settings = model.settings
    where = key_of(env_task, section)
    env = envs.make(env_task.name, env_task.options_and_texts, f"{where}.")
    envs.check_file(env, env_task.name, f"{where}.name")
    _check_actions(env, env_task, section)
    limits = TurnLimits(
        env_task.turns,
        env_task.actions_per_turn,
        env_task.actions,
        settings.rollout.reply_tokens,
    )
    dialogue = make_dialogue(env, limits, model.pieces, thinking=settings.env.thinking)
    texts = {
        f"{where}.{key}": text for key in TEXTS if (text := getattr(env_task, key))
    }
    context_checks.check_texts(
        dialogue, model.tokenizer, f"{where}.name", env_task.name, texts
    )
    tokens = tokenize_dialogue(
        dialogue,
        env,
        model.pieces,
        model.tokenizer,
        model.config.vocabulary,
        with_text=settings.reward.grounding > 0,
    )
    task = Task(env_task.label, env, dialogue, env_task.prompts)
    context_checks.check_context(
        settings, model.config, task, tokens, is_training=is_training, texts=texts
    )
    if env.read_action is None:
        context_checks.check_reply(settings, tokens)
    return task, tokens


def key_of(env_task: TaskSettings, section: str) -> str:
    """The dotted key of an environment's settings; `section` as for `make_task`."""
    return f"{section}.{env_task.label}" if section else "env"


def _check_actions(env: Environment, env_task: TaskSettings, section: str) -> None:
    """Raises UserError if a reply is asked for more actions than can be read of it."""
    if 0 < env.most_actions < env_task.actions_per_turn:
        key = key_of(env_task, section) if section else "rollout"
        raise UserError(
            f"{env_task.label}: actions_per_turn = {env_task.actions_per_turn}, and of"
            f" one reply {env.name} reads {env.most_actions} at most: set"
            f" {key}.actions_per_turn to {env.most_actions}"
        )


def check_decoding(model: Model) -> None:
    """Raises SettingsError if this device lacks the kernel `rollout.decode_attention`.

    To be called before anything is compiled or written.
    """
    kernel = model.settings.rollout.decode_attention
    backend_choices.decode_attention(kernel, model.dtype, model.config.head_dim)


def rollout_context(
    model: Model, tasks: Sequence[Task], *, is_training: bool = False
) -> RolloutContext:
    """What all rollouts of some tasks by a model have in common.

    Only training samples with 8-bit weights (`rollout.decode_weights`): evaluations
    play the policy itself.
    """
    rollout = model.settings.rollout
    return RolloutContext(
        config=model.config,
        dtype=model.dtype,
        tasks=tuple(tasks),
        mesh=model.mesh,
        layout=rollout.layout,
        with_grounding=model.settings.reward.grounding > 0,
        decode_attention=rollout.decode_attention,
        row_attention=model.settings.model.attention,
        decode_weights=rollout.decode_weights if is_training else "same",
        cuda_graph=rollout.cuda_graph,
    )


def training_plan(
    model: Model, tasks: Sequence[Task], tokens: TaskTokens
) -> RolloutPlan:
    """Sizes of one shard's rollout of a training batch, as `settings.rollout` says."""
    rollout = model.settings.rollout
    return make_plan(
        tasks,
        tokens,
        rollout_options(model.settings, is_training=True),
        group_size=rollout.group_size,
        slots=rollout.slots or backend_choices.choices().slots,
        shards=meshes.row_shards(model.mesh),
    )


def rollout_options(
    settings: Settings, *, is_training: bool, greedy: bool = False
) -> RolloutOptions:
    """How the settings sample episodes.

    With full history, `rollout.context` is for training: evaluations give each
    environment exactly the row that it needs.
    """
    rollout = settings.rollout
    has_context = is_training or rollout.window_turns > 0
    return RolloutOptions(
        context=rollout.context if has_context else 0,
        window=rollout.window_turns,
        decode_chunk=rollout.decode_chunk,
        buckets=rollout.buckets,
        greedy=greedy,
        stop_at_answer=rollout.stop_at_answer,
    )
