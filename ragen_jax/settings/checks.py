"""Checks of settings that depend on one another, and of settings against devices.

`check_combinations` is called by reader.py, `check_devices` once the devices are known.
Each check raises SettingsError with one sentence: the keys, the numbers, and a remedy
computed from these numbers.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

from ragen_jax.errors import SettingsError
from ragen_jax.settings.environment import MIX, TEXTS
from ragen_jax.settings.learning_checks import check_learning
from ragen_jax.settings.record_sizes import check_sizes, evaluations, longest_turns
from ragen_jax.settings.schema import MeshSettings, Settings
from ragen_jax.utils.words import counted


@dataclasses.dataclass(frozen=True)
class _Rollout:
    """The size of one kind of rollout, and the keys that set it."""

    prompts_key: str
    prompts: int
    group_key: str
    group_size: int
    slots_key: str
    slots: int

    @property
    def episodes(self) -> int:
        return self.prompts * self.group_size

    @property
    def zero_slots(self) -> str:
        """What 0 slots mean; for messages."""
        is_training = self.slots_key == "rollout.slots"
        return "what suits CPU or GPU" if is_training else "one slot an episode"


def check_combinations(settings: Settings) -> None:
    """Raises SettingsError for the first combination that cannot be used."""
    _check_mesh(settings)
    _check_mix(settings)
    check_sizes(settings)
    _check_episodes(settings)
    _check_rewards(settings)
    check_learning(settings)
    _check_batches(settings)


def check_devices(settings: Settings, device_count: int) -> dict[str, int]:
    """The sizes of the mesh axes that the settings ask for, on these devices.

    Args:
      settings: as `settings.from_dict` returned them.
      device_count: devices of all processes together.

    Returns:
      The sizes of the axes data, fsdp and tensor; their product is `device_count`.

    Raises:
      SettingsError: if the axes do not use exactly all devices, or if episodes, slots
        or microbatches cannot be split evenly over data * fsdp.
    """
    sizes = _mesh_sizes(settings.mesh, device_count)
    check_even_split(settings, sizes)
    return sizes


def check_even_split(settings: Settings, sizes: Mapping[str, int]) -> None:
    """Raises SettingsError unless a run's work splits evenly over a mesh.

    `sizes` are those of the axes data, fsdp and tensor; the work is split over the
    first two.
    """
    shards = sizes["data"] * sizes["fsdp"]
    if settings.rollout.layout == "tensor" and sizes["tensor"] == 1:
        raise SettingsError(
            "rollout.layout = 'tensor' needs devices on the tensor axis, but"
            " mesh.tensor = 1: raise mesh.tensor or set rollout.layout to 'replicated'"
        )
    for rollout in _rollouts(settings):
        _check_episode_split(rollout, shards)
        if rollout.slots % shards:
            better = _evenly_split_slots(rollout, shards)
            raise SettingsError(
                f"{rollout.slots_key} = {rollout.slots} slots, which {_over(shards)}"
                f" cannot share evenly: set it to {better} or to 0 for"
                f" {rollout.zero_slots}"
            )
    if (rows := settings.optimizer.microbatch) % shards:
        micro = _last_multiple(rows, shards)
        mini = _last_multiple(settings.optimizer.minibatch, micro)
        raise SettingsError(
            f"optimizer.microbatch = {rows} rows, which {_over(shards)} cannot share"
            f" evenly: set optimizer.microbatch to {micro} and optimizer.minibatch to"
            f" {mini}"
        )


def fit_mesh(chosen: MeshSettings, device_count: int) -> dict[str, int]:
    """The sizes of a mesh on all devices, as close to the chosen one as possible.

    That is the chosen mesh if it uses exactly all devices; else the same with the data
    axis adjusted; else data parallelism alone. For evaluation, export and diagnosis,
    which may run on other devices than training did.
    """
    stretched = MeshSettings(-1, max(chosen.fsdp, 1), max(chosen.tensor, 1))
    for mesh in (chosen, stretched):
        with contextlib.suppress(SettingsError):
            return _mesh_sizes(mesh, device_count)
    return {"data": device_count, "fsdp": 1, "tensor": 1}


def _rollouts(settings: Settings) -> Iterator[_Rollout]:
    """Of training, whole and by environment, of validation if there is one, of test."""
    rollout, evaluation = settings.rollout, settings.evaluation
    yield _Rollout(
        prompts_key="rollout.prompts",
        prompts=rollout.prompts,
        group_key="rollout.group_size",
        group_size=rollout.group_size,
        slots_key="rollout.slots",
        slots=rollout.slots,
    )
    for task in settings.env.mix:
        yield _Rollout(
            prompts_key=f"env.mix.{task.label}.prompts",
            prompts=task.prompts,
            group_key="rollout.group_size",
            group_size=rollout.group_size,
            slots_key="rollout.slots",
            slots=0,  # Checked for the whole batch.
        )
    for test in evaluations(settings):
        prompts, rollouts = (
            getattr(evaluation, f"{test}{name}") for name in ("prompts", "rollouts")
        )
        yield _Rollout(
            prompts_key=f"evaluation.{test}prompts",
            prompts=prompts,
            group_key=f"evaluation.{test}rollouts",
            group_size=rollouts,
            slots_key="evaluation.slots",
            slots=min(evaluation.slots, prompts * rollouts),
        )


def _check_mesh(settings: Settings) -> None:
    mesh = settings.mesh
    free = [axis for axis in ("data", "fsdp", "tensor") if getattr(mesh, axis) == -1]
    if len(free) > 1:
        raise SettingsError(
            f"mesh.{free[0]} = -1 and mesh.{free[1]} = -1 both ask for every device"
            f" left: set mesh.{free[1]} to a number of devices, such as 1"
        )


def _check_mix(settings: Settings) -> None:
    env, prompts = settings.env, settings.rollout.prompts
    if (env.name == MIX) != bool(env.mix):
        remedy = (
            "give env.mix a section for each environment"
            if env.name == MIX
            else f"set env.name to {MIX!r}"
        )
        raise SettingsError(
            f"env.name = {env.name!r} with {len(env.mix)} environments in env.mix:"
            f" {remedy}"
        )
    own = [*dict(env.options), *(key for key in TEXTS if getattr(env, key))]
    if env.mix and own:
        names = ", ".join(f"env.{name}" for name in own)
        raise SettingsError(
            f"{names} belongs to no environment, since env.name = {MIX!r}: move it to"
            f" env.mix.{env.mix[0].label}, or to the environment that it is meant for"
        )
    if env.mix and sum(task.prompts for task in env.mix) != prompts:
        shares = " + ".join(f"{task.label} {task.prompts}" for task in env.mix)
        whole = sum(task.prompts for task in env.mix)
        raise SettingsError(
            f"rollout.prompts = {prompts} is not the sum of env.mix's prompts ({shares}"
            f" = {whole}): set rollout.prompts to {whole} or change the shares"
        )
    for task in env.mix:
        if task.prompts == 0:
            raise SettingsError(
                f"env.mix.{task.label}.prompts = 0 leaves that environment without"
                " episodes: set it to 1 or more, or take the environment out"
            )
    if unread := [task.label for task in env.evaluate if task.prompts]:
        raise SettingsError(
            f"env.evaluate.{unread[0]}.prompts is not read: every environment is"
            " evaluated on evaluation.prompts levels: take it out"
        )
    # A single environment has the limits of `rollout`, which `_check_episodes` checks.
    trained = settings.tasks() if env.mix else ()
    evaluated = settings.evaluated_tasks() if env.evaluate else ()
    for task in (*trained, *evaluated):
        if task.actions_per_turn > task.actions:
            raise SettingsError(
                f"{task.label}: actions_per_turn = {task.actions_per_turn} is more"
                f" than actions = {task.actions}: lower actions_per_turn"
            )


def _check_episodes(settings: Settings) -> None:
    rollout = settings.rollout
    for each in _rollouts(settings):
        if each.slots > each.episodes:
            raise SettingsError(
                f"{each.slots_key} = {each.slots} is more than the {each.prompts} *"
                f" {each.group_size} = {each.episodes} episodes of {each.prompts_key} *"
                f" {each.group_key}: lower {each.slots_key} or set it to 0 for"
                f" {each.zero_slots}"
            )
    if rollout.actions_per_turn > rollout.actions:
        raise SettingsError(
            f"rollout.actions_per_turn = {rollout.actions_per_turn} is more than"
            f" rollout.actions = {rollout.actions}, the actions of a whole episode: set"
            f" rollout.actions_per_turn to at most {rollout.actions}"
        )
    if 0 < rollout.context <= rollout.reply_tokens:
        raise SettingsError(
            f"rollout.context = {rollout.context} leaves no room for a prompt beside a"
            f" reply of rollout.reply_tokens = {rollout.reply_tokens}: set"
            " rollout.context to 0 for exactly what prompt and turns can need"
        )


def _check_rewards(settings: Settings) -> None:
    reward = settings.reward
    if reward.length_bonus > 0 and reward.length_low > reward.length_high:
        raise SettingsError(
            f"reward.length_low = {reward.length_low} is more than reward.length_high ="
            f" {reward.length_high}, so no thought earns the bonus: raise"
            " reward.length_high"
        )
    budget = settings.rollout.reply_tokens  # `</think>` takes a part of it, too.
    if reward.length_bonus > 0 and reward.length_low >= budget:
        raise SettingsError(
            f"reward.length_low = {reward.length_low} is not less than"
            f" rollout.reply_tokens = {budget}, so no thought earns the bonus: lower"
            " reward.length_low"
        )
    if (reward.length_bonus > 0 or reward.grounding > 0) and not settings.env.thinking:
        raise SettingsError(
            "reward.length_bonus and reward.grounding are for thoughts, but"
            " env.thinking = False: set them to 0 or env.thinking to True"
        )
    is_set_of_one = reward.normalize_by == "state" and settings.rollout.group_size == 1
    if reward.normalize != "none" and is_set_of_one:
        raise SettingsError(
            f"reward.normalize = {reward.normalize!r} takes each return's distance from"
            " its group's mean, which is 0 with rollout.group_size = 1: raise it to 2"
            " or more, or set reward.normalize_by to 'batch'"
        )


def _check_batches(settings: Settings) -> None:
    mini, micro = settings.optimizer.minibatch, settings.optimizer.microbatch
    rollout, rows = settings.rollout, "episodes"
    sizes = {
        "rollout.prompts": rollout.prompts,
        "rollout.group_size": rollout.group_size,
    }
    if rollout.window_turns:
        sizes, rows = sizes | longest_turns(settings), "turns"
    if mini > (most := math.prod(sizes.values())):
        raise SettingsError(
            f"optimizer.minibatch = {mini} rows is more than the"
            f" {' * '.join(map(str, sizes.values()))} = {most} {rows} of"
            f" {' * '.join(sizes)}: lower"
            " optimizer.minibatch (and optimizer.microbatch, which must divide it) to"
            f" at most {most}"
        )
    if mini % micro:
        small = [d for d in range(1, math.isqrt(mini) + 1) if mini % d == 0]
        divisors = (*small, *(mini // d for d in small))
        divisor = max(d for d in divisors if d <= micro)
        raise SettingsError(
            f"optimizer.minibatch = {mini} is not a multiple of optimizer.microbatch ="
            f" {micro}: set optimizer.microbatch to {divisor}, which divides it"
        )


def _mesh_sizes(mesh: MeshSettings, device_count: int) -> dict[str, int]:
    """Sizes of the axes with -1 resolved; SettingsError unless they use all devices."""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    names = " * ".join(f"mesh.{axis}" for axis in fixed)
    numbers = " * ".join(str(size) for size in fixed.values())
    if len(fixed) < len(sizes):
        if device_count % product:
            divisors = [d for d in range(1, device_count + 1) if device_count % d == 0]
            raise SettingsError(
                f"{names} = {numbers} = {product}, which does not divide the"
                f" {counted(device_count, 'device')}: choose sizes whose product is"
                f" one of {', '.join(map(str, divisors))}"
            )
        return {axis: fixed.get(axis, device_count // product) for axis in sizes}
    if product != device_count:
        others = mesh.fsdp * mesh.tensor
        remedy = (
            "set mesh.data to -1"
            if device_count % others == 0
            else f"set mesh.data to -1 and mesh.fsdp * mesh.tensor to a divisor of"
            f" {device_count}"
        )
        raise SettingsError(
            f"{names} = {numbers} = {product}, but there"
            f" {'is' if device_count == 1 else 'are'}"
            f" {counted(device_count, 'device')}: {remedy}"
        )
    return sizes


def _check_episode_split(rollout: _Rollout, shards: int) -> None:
    """Raises SettingsError unless episodes split evenly over the shards."""
    prompts, group_size = rollout.prompts, rollout.group_size
    if _splits_evenly(prompts, group_size, shards):
        return
    # Any multiple of `shards` prompts works, so the search ends.
    enough = prompts
    while not _splits_evenly(enough, group_size, shards):
        enough += 1
    fewer = max(
        count
        for count in range(1, shards + 1)
        if _splits_evenly(prompts, group_size, count)
    )
    raise SettingsError(
        f"{rollout.prompts_key} * {rollout.group_key} = {prompts} * {group_size} ="
        f" {rollout.episodes} episodes, which {_over(shards)} cannot share evenly, in"
        f" whole groups or equal parts of one: raise {rollout.prompts_key} to {enough}"
        f" or use {counted(fewer, 'device')} for mesh.data * mesh.fsdp"
    )


def _splits_evenly(prompts: int, group_size: int, shards: int) -> bool:
    """Whether each shard gets as many whole groups, or an equal part of one group."""
    per_shard, rest = divmod(prompts * group_size, shards)
    if rest or not per_shard:
        return False
    return per_shard % group_size == 0 or group_size % per_shard == 0


def _evenly_split_slots(rollout: _Rollout, shards: int) -> int:
    """The next multiple of `shards`, or the last one that the episodes can fill."""
    most = rollout.episodes // shards * shards
    return min(_next_multiple(rollout.slots, shards), most)


def _last_multiple(number: int, of: int) -> int:
    """The largest multiple of `of` that is not above `number`, but at least `of`."""
    return max(number // of, 1) * of


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _over(shards: int) -> str:
    return f"{counted(shards, 'device')} (mesh.data * mesh.fsdp)"
