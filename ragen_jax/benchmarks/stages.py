"""The stages of the GPU suite, and what each measures.

Every stage also runs on a CPU in small sizes (SMOKE), so that the suite can be tested
without a GPU. suite.py runs the stages.
"""

import contextlib
import dataclasses
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.benchmarks import training_runs
from ragen_jax.benchmarks.suite import Stage, read
from ragen_jax.benchmarks.suite_sizes import SMOKE, Sizes
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.utils import endings

_CONFIGS = Path(__file__).parents[2] / "configs"

# Titles of tables of the stage "device" that other stages read.
_LIMITS, _ATTENTION = "at best", "cuDNN's attention"

Tables = Iterator[tuple[str, dict]]


def stages(sizes: Sizes) -> tuple[Stage, ...]:
    """The stages, the most important first."""
    compared = sizes.compared
    switches: dict[str, tuple[str, dict]] = {
        "decode_xla": (
            "decoding by plain operations instead of cuDNN",
            {"rollout.decode_attention": "xla"},
        ),
        "plain_attention": (
            "update and prompts by plain operations instead of cuDNN",
            {"model.attention": "xla"},
        ),
        "cuda_graph": (
            "the whole rollout as one CUDA graph",
            {"rollout.cuda_graph": True},
        ),
        "int8": (
            "decoding with weights in 8 bits",
            {"rollout.decode_weights": "int8"},
        ),
        "starpo": ("plain StarPO: every row, and KL", {"algorithm": "starpo"}),
    }
    whole = [
        Stage(
            f"replies_{reply}",
            f"whole iterations with random weights, replies of {reply} tokens",
            "iterations",
            {"reply": reply},
        )
        for reply in sorted(sizes.replies, key=lambda reply: reply != compared)
    ]
    tried = [
        Stage(name, answers, "iterations", {"reply": compared, "changes": changes})
        for name, (answers, changes) in switches.items()
    ]
    return (
        Stage("device", "what is here, its limits, cuDNN's attention", "device",
              others_need_it=True),
        whole[0],
        Stage("smoke_run", "a small training run, evaluation included", "smoke_run"),
        Stage("default_run", "learning, and the sampler's gap to the update", "learns"),
        Stage("attention", "the kernels of decoding side by side", "attention"),
        *tried,
        *whole[1:],
        Stage("int8_gap", "the same gap by decoding with weights in 8 bits", "learns",
              {"changes": {"rollout.decode_weights": "int8"}}),
        Stage("deterministic", "the same numbers twice", "twice"),
        # The device waits while they are made; all that they need of it is its name.
        *(
            Stage(f"forecast_{each.name}", "what --plan says of it", "forecast",
                  each.options, on_cpu=True)
            for each in (*whole, *tried)
        ),
    )  # fmt: skip


def measure(stage: Stage, sizes: Sizes, out: Path) -> Tables:
    """Measures a stage in this process; yields its tables as they become known."""
    yield from MEASURE[stage.kind](sizes, out, stage)


def _settings(sizes: Sizes, out: Path, stage: Stage) -> Settings:
    """The settings for whole iterations, with a stage's reply length and changes."""
    config = cli.load_config(str(_CONFIGS / sizes.config))
    failing = _without_failing(out, sizes.context, sizes.heads)
    changes = failing | stage.options.get("changes", {})
    reply = {"rollout.reply_tokens": stage.options["reply"]}
    config.update_from_flattened_dict(reply | changes)
    return settings_lib.from_dict(config.to_dict())


def _without_failing(
    out: Path, context: int, heads: tuple[int, int, int]
) -> dict[str, str]:
    """The settings, by dotted key, that avoid kernels which failed in stage "device".

    Otherwise one broken kernel of cuDNN would make all stages fail.

    Args:
      out: the folder of results.
      context, heads: of the model that is to be trained.
    """
    from ragen_jax.benchmarks import attention_forms

    tables = read(out, "device").tables
    outcomes = tables.get(_ATTENTION, {})
    # The kernels were not tried yet, or this device does not use them.
    if _LIMITS not in tables or "state" in outcomes:
        return {}
    return attention_forms.settings_without_failing(outcomes, context, heads)


def _avoided(changes: dict[str, str]) -> Tables:
    """A table of the settings of `_without_failing`, if there are any."""
    if changes:
        yield "without what fails here", changes


def _flags(changes: dict[str, str]) -> list[str]:
    """The settings of `_without_failing` as flags of launch/train.py."""
    return [f"--config.{key}={value}" for key, value in changes.items()]


# The device --------------------------------------------------------------------------


def _device(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    import jax

    from ragen_jax.benchmarks import attention_forms, device

    all_devices = jax.devices()
    yield (
        "device",
        {
            "kind": all_devices[0].device_kind,
            "backend": jax.default_backend(),
            "devices": len(all_devices),
            "jax": jax.__version__,
            **device.cuda_versions(),
        },
    )
    # Attention comes last: a failure there may leave the device unusable.
    yield _LIMITS, device.device_limits().figures()
    cases = (
        (sizes.context, sizes.heads),
        (sizes.default_context, sizes.default_heads),
    )
    earlier = read(out, "device").tables.get(_ATTENTION, {})
    for outcomes in attention_forms.tried(cases, earlier):
        yield _ATTENTION, outcomes


def _attention(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    """One layer's attention of a decode pass, a fifth of the cache filled."""
    from ragen_jax.benchmarks import attention

    yield from attention.compare(sizes.slots, sizes.context, sizes.heads)


# Whole iterations --------------------------------------------------------------------


def _iterations(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    import jax

    from ragen_jax.benchmarks import device, machine
    from ragen_jax.training import run as run_lib

    yield from _avoided(_without_failing(out, sizes.context, sizes.heads))
    settings = _settings(sizes, out, stage)
    cli.use_every_core(settings)
    cli.start_jax(settings)
    if jax.default_backend() == "cpu":  # A test of the suite; CPUs have no CUDA graphs.
        rollout = dataclasses.replace(settings.rollout, cuda_graph=False)
        settings = dataclasses.replace(settings, rollout=rollout)
    with endings.temporary_folder("suite.") as scratch:
        settings = machine.with_shape(settings, sizes.shape, scratch / "shape")
        run = run_lib.prepare(settings)
        # The suite writes these at once, in case the rest does not end in time.
        for title, figures in machine.iteration_figures(run, sizes.iterations):
            yield title, figures
        yield title, machine.with_shares(figures, device.device_limits())


def _forecast(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    from ragen_jax.planning import compiling, devices, model, report, roofline, target

    seen = read(out, "device").tables.get("device")
    if seen is None:
        raise UserError("the stage device has not said yet what is here: run it first")
    named = {devices.read(name).title: name for name in devices.names()}
    name, count = "h100", 1  # For a test of the suite on a CPU.
    if seen["backend"] != "cpu":
        if seen["kind"] not in named:
            missing = f"no description of {seen['kind']} in planning/device_data"
            yield "forecast", {"state": f"unmeasured: {missing}"}
            return
        name, count = named[seen["kind"]], int(seen["devices"])
    try:
        absent = target.make_target(name, count)
    except UserError as error:
        yield "forecast", {"state": f"unmeasured: {error}"}
        return
    reply = stage.options["reply"]
    settings = _settings(sizes, out, stage)
    # As in the measured run; see machine.with_shape.
    keeps = dataclasses.replace(settings.filter, keep_zero=True)
    plan = report.make(
        dataclasses.replace(settings, filter=keeps),
        model.find(settings.model.path, sizes.shape),
        absent,
        replies=[reply],
        names=[compiling.ROLLOUT, compiling.UPDATE],
    )
    (found,) = plan.iterations
    decode = roofline.decode_at(plan.parts, -1, found.passes.filled)
    yield (
        "forecast",
        {
            "device": f"{count} x {absent.device.title}",
            "iteration, s": found.seconds,
            "rollout, s": found.rollout.seconds,
            "update, s": found.update.seconds,
            "decode passes": found.passes.decodes,
            "message passes": found.passes.extends,
            "a decode pass, kernels": decode.kernels,
            "a decode pass, GB moved": decode.bytes / 1e9,
            "peak memory, GiB": plan.needs.total / 2**30,
        },
    )


# Training runs -----------------------------------------------------------------------


def _smoke_run(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    changes = _without_failing(out, sizes.default_context, sizes.default_heads)
    yield from _avoided(changes)
    arguments = f"--config={_CONFIGS / SMOKE.config}", *_flags(changes)
    with _new_folder(out, stage) as folder:
        records = training_runs.train(folder / "run", *arguments)
        yield "training", {"iterations": len(records)} | _last(records)
        script = str(training_runs.SCRIPTS / "evaluate.py")
        command = [sys.executable, script, f"--checkpoint={folder / 'run'}"]
        subprocess.run([*command, "--prompts=16", "--show=1"], check=True)
        yield "evaluation", {"state": "ended well"}


def _learns(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    failing = _without_failing(out, sizes.default_context, sizes.default_heads)
    arguments = (
        f"--config={_CONFIGS / sizes.default}",
        f"--config.iterations={sizes.default_iterations}",
        *_flags(failing | stage.options.get("changes", {})),
    )
    yield from _avoided(failing)
    with _new_folder(out, stage) as folder:
        for records in training_runs.follow(folder / "run", *arguments):
            yield from _learned(records)


def _learned(records: list[dict]) -> Tables:
    """The tables of `_learns` for the iterations so far."""
    # Iterations without an update have no gap.
    learned = [one for one in records if one["update/logprob_gap"] is not None]
    gaps = [record["update/logprob_gap"] for record in learned]
    largest = [record["update/logprob_gap_max"] for record in learned]
    if learned:
        yield (
            "log-probability gap, nats",
            {"mean": statistics.mean(gaps), "largest": max(largest)},
        )
    half = len(records) // 2
    success = [record["train/success"] for record in records]
    if half:
        yield (
            "success",
            {
                "first half": statistics.mean(success[:half]),
                "second half": statistics.mean(success[half:]),
            },
        )
    yield "last iteration", {"iteration": records[-1]["iteration"]} | _last(records)


def _twice(sizes: Sizes, out: Path, stage: Stage) -> Tables:
    """Compares two runs with `deterministic`, in all metrics that are not times.

    Each run has its own compilation cache. With a shared one, both would run kernels
    that XLA had autotuned once, which hides differences in that choice.
    """
    changes = _without_failing(out, sizes.default_context, sizes.default_heads)
    arguments = (
        f"--config={_CONFIGS / sizes.default}",
        "--config.deterministic=True",
        f"--config.iterations={sizes.repeated_iterations}",
        *_flags(changes),
    )
    yield from _avoided(changes)
    # Beside the runs' folder, so that another attempt need not compile again.
    caches = [out / f"{stage.name}.{name}.programs" for name in ("a", "b")]
    with _new_folder(out, stage) as folder:
        one = training_runs.train(folder / "a", *arguments, programs=caches[0])
        yield "the first run", {"iterations": len(one)} | _last(one)
        other = training_runs.train(folder / "b", *arguments, programs=caches[1])
    for cache in caches:
        shutil.rmtree(cache, ignore_errors=True)
    differing = sorted(
        name
        for first, second in zip(one, other, strict=True)
        for name in first
        if not _is_time(name) and first[name] != second.get(name)
    )
    yield (
        "two runs",
        {
            "iterations": len(one),
            "figures that differ": len(differing),
            "which": ", ".join(dict.fromkeys(differing)) or "none",
        },
    )


def _is_time(name: str) -> bool:
    return name.startswith("time/") or "second" in name or "memory" in name


def _last(records: list[dict]) -> dict:
    wanted = ("train/success", "time/rollout_seconds", "time/update_seconds")
    return {name: records[-1][name] for name in wanted if name in records[-1]}


@contextlib.contextmanager
def _new_folder(out: Path, stage: Stage) -> Iterator[Path]:
    """A context with an empty folder for runs; deleted unless the stage fails."""
    folder = out / f"{stage.name}.runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


MEASURE: dict[str, Callable[[Sizes, Path, Stage], Tables]] = {
    "device": _device,
    "attention": _attention,
    "iterations": _iterations,
    "forecast": _forecast,
    "smoke_run": _smoke_run,
    "learns": _learns,
    "twice": _twice,
}
STARTS_RUNS = frozenset({"smoke_run", "learns", "twice"})  # of the kinds in MEASURE
