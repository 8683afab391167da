"""Every config and variant is traced and lowered for GPUs, as a run there would be."""

import re
import runpy
from pathlib import Path

import pytest
from helpers import absent

from ragen_jax.planning import compiling

pytestmark = [pytest.mark.slow, absent.needs_compiler]

ROOT = Path(__file__).parents[2]
# Those of warm_start.py make embedded models and are no runs.
FILES = sorted(
    p for p in (ROOT / "configs").glob("*.py") if not p.stem.startswith("warm_start")
)


def variants(path: Path) -> list[str]:
    """ "" and the variants that the config's docstring lists."""
    listed = runpy.run_path(str(path))["__doc__"]
    found = sorted(set(re.findall(r"(?:\.py|[;,] ):([a-z]\w*)", listed)))
    assert {"smoke", "paper"} <= set(found), path
    return ["", *found]


def sorted_writes(text: str) -> list[str]:
    """The writes, but for sums, that a deterministic program for a GPU sorts first."""
    scatters = re.findall(r'"stablehlo.scatter"\(.*?\}\) : \(.*?\) ->', text, re.DOTALL)
    assert len(scatters) == text.count('"stablehlo.scatter"')
    return [
        scatter
        for scatter in scatters
        if "unique_indices = true" not in scatter
        and not re.search(r"stablehlo\.(add|maximum|minimum)\b", scatter)
    ]


CONFIGS = [f"configs/{p.name}:{variant}" for p in FILES for variant in variants(p)]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_is_lowered_for_a_gpu_with_cudnn_attention(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    device = absent.h100()
    with device.tracing():
        run = absent.prepare(absent.settings(config.removesuffix(":")))
        assert run.model.dtype == "bfloat16"
        names = [compiling.ROLLOUT, compiling.UPDATE]
        lowered = {each.name: each.lowered for each in compiling.lower(run, names)}
    update = lowered[compiling.UPDATE].as_text()
    rollout = lowered[compiling.ROLLOUT].as_text()
    assert re.search(r"custom_call @__cudnn\$fmhaSoftmaxBackward", update)
    assert "fmha" in rollout  # of the prompts
    assert sorted_writes(rollout) == sorted_writes(update) == []


def test_a_run_can_do_without_cudnns_attention(monkeypatch):
    """Where a card or a driver fails at it, two settings leave none of it."""
    monkeypatch.chdir(ROOT)
    plain = {"model__attention": "xla", "rollout__decode_attention": "xla"}
    with absent.h100().tracing():
        run = absent.prepare(absent.settings("configs/frozenlake.py", **plain))
        names = [compiling.ROLLOUT, compiling.UPDATE, compiling.SUMMARY]
        programs = compiling.lower(run, names)
    assert all("fmha" not in each.lowered.as_text() for each in programs)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_no_update_of_several_gpus_names_an_address_of_its_process(sizes, monkeypatch):
    """One that did would never be found in the cache of compiled programs."""
    monkeypatch.chdir(ROOT)
    shared = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), sizes, strict=True))
    shared["optimizer__microbatch"] = 8
    with absent.h100(8).tracing():
        run = absent.prepare(absent.settings("configs/frozenlake.py", **shared))
        (update,) = compiling.lower(run, [compiling.UPDATE])
    text = update.lowered.as_text()
    assert "__cudnn$fmha" in text
    assert "CustomSPMDPartitioning" not in text
