"""A run: a model, and the environments that it is trained and evaluated in.

`prepare` turns settings into a `Run`: everything static, checked, nothing compiled.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.envs import first_levels
from ragen_jax.envs.base import TEST, TRAIN, VALIDATION
from ragen_jax.errors import SettingsError
from ragen_jax.learning import shaping
from ragen_jax.learning.train_state import TrainState
from ragen_jax.models import lora, parameters
from ragen_jax.models.io.sources import Source
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend, backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout.rollout import RolloutContext
from ragen_jax.rollout.tasks import Task, TaskTokens
from ragen_jax.rollout.types import RolloutPlan
from ragen_jax.settings import Settings, check_devices, check_even_split
from ragen_jax.text.prompts import DialogueTokens
from ragen_jax.training import placement
from ragen_jax.training import tasks as tasks_lib
from ragen_jax.training.model import Model, check_axes, make_model


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything static about a run. Made by `prepare`."""

    model: Model
    tasks: tuple[Task, ...]  # the environments of a training batch
    tokens: TaskTokens  # of their texts
    # What validation and test play, with the tokens of their texts.
    evaluated: tuple[tuple[Task, DialogueTokens], ...]
    plan: RolloutPlan  # of a training batch

    @property
    def settings(self) -> Settings:
        """The settings that all of it was made from."""
        return self.model.settings

    @functools.cached_property
    def trained_critic(self) -> Parameters:
        """Declared parameters that training changes of the critic; {} without one."""
        if not self.settings.has_critic:
            return {}
        if self.model.adapters is None:
            return parameters.declare(self.model.config, value_head=True)
        return lora.declare_adapters(
            self.model.config, self.model.adapters, value_head=True
        )

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """NamedShardings of the TrainState."""
        return placement.state_shardings(
            self.settings, self.model.mesh, self.model.trained, self.trained_critic
        )

    @property
    def rollout_context(self) -> RolloutContext:
        """The static part of training rollouts."""
        return tasks_lib.rollout_context(self.model, self.tasks, is_training=True)


def texts_fingerprint(tokens: Any) -> str:
    """A digest by which processes compare their environments' texts.

    Args:
      tokens: a pytree of `DialogueTokens`.
    """
    digest = hashlib.sha256()
    for array in map(np.asarray, jax.tree.leaves(tokens)):
        digest.update(f"{array.shape} {array.dtype} ".encode() + array.tobytes())
    return digest.hexdigest()


def prepare(
    settings: Settings, mesh: Mesh | None = None, source: Source | None = None
) -> Run:
    """Reads texts and shapes, and checks all that can be checked before compiling.

    Args:
      settings: of the run.
      mesh: None: one of all devices, as `settings.mesh` says.
      source: of the model; None: what `settings.model.path` names.

    Raises:
      UserError: if devices, model, tokenizer, environments and settings do not fit
        together.
    """
    if mesh is None:
        count = backend.device_count()
        mesh = meshes.make_mesh(**check_devices(settings, count))
    else:
        check_even_split(settings, mesh.shape)
    model = make_model(settings, mesh, source)
    check_axes(model, mesh.shape)
    rollout = settings.rollout
    tasks_lib.check_decoding(model)
    backend_choices.check_cuda_graph(rollout.cuda_graph)
    if settings.reward.hook:
        count = rollout.prompts * rollout.group_size
        shaping.check_hook(settings.reward.hook, count, settings.most_turns())
    section = "env.mix" if settings.env.mix else ""
    tasks_and_tokens = [
        tasks_lib.make_task(model, env, section) for env in settings.tasks()
    ]
    tasks, tokens = zip(*tasks_and_tokens, strict=True)
    if settings.reward.grounding > 0 and not any(task.env.landmarks for task in tasks):
        names = ", ".join(env.name for env in settings.tasks())
        raise SettingsError(
            f"reward.grounding = {settings.reward.grounding:g} does nothing with"
            f" env.name = {names!r}, which has no landmarks that a thought could name:"
            " set reward.grounding to 0"
        )
    evaluated = tuple(tasks_and_tokens)
    if settings.env.evaluate:
        evaluated = tuple(
            tasks_lib.make_task(model, env, "env.evaluate", is_training=False)
            for env in settings.evaluated_tasks()
        )
    plan = tasks_lib.training_plan(model, tasks, tokens)
    return Run(model, tasks, tokens, evaluated, plan)


def check_levels_of_run(run: Run) -> None:
    """Draws a level of each split that a run will play. To be called before training.

    Raises:
      SettingsError: if a user's environment never draws one: the run would wait for it
        for ever, at the latest in its final test.
    """
    settings, env = run.settings, run.settings.env
    mix = "env.mix" if env.mix else ""
    evaluated = [task for task, _ in run.evaluated]
    other = "env.evaluate" if env.evaluate else mix
    for tasks, named, section, splits in (
        (run.tasks, settings.tasks(), mix, (TRAIN,)),
        (evaluated, settings.evaluated_tasks(), other, (VALIDATION, TEST)),
    ):
        for task, chosen in zip(tasks, named, strict=True):
            key = f"{tasks_lib.key_of(chosen, section)}.name"
            first_levels.check_levels_come(task.env, splits, chosen.name, key)
