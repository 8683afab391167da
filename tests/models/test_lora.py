"""Adapters: what they add, what of them is trained and saved, and how they leave."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, runs
from helpers.paths import ROOT
from safetensors.numpy import load_file

from ragen_jax.errors import UserError
from ragen_jax.models import lora, parameters, transformer
from ragen_jax.models.io import partial_reads, peft, sources
from ragen_jax.training import checkpoints, weights
from ragen_jax.training import programs as programs_lib

CONFIG = models.small_config(22, width=16, head_dim=4, mlp_width=24)
ADAPTERS = lora.Adapters(rank=3, alpha=1.5, targets=lora.TARGETS)


@pytest.fixture(scope="module")
def base():
    return models.random_parameters(CONFIG, seed=0)


@pytest.fixture(scope="module")
def trained():
    """Adapters whose B is not zero any more."""
    declared = lora.declare_adapters(CONFIG, ADAPTERS)
    shapes = parameters.shapes(declared)
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.array(rng.normal(0, 0.3, x.shape), jnp.float32), shapes
    )


def test_names_and_groups_of_weights_are_read_in_one_order():
    assert lora.read_targets("all") == lora.TARGETS
    assert lora.read_targets(" down, attention") == (
        *("query", "key", "value", "output"),
        "down",
    )
    with pytest.raises(UserError, match="'q_proj' matches no weight; choose some of"):
        lora.read_targets("query,q_proj")


def test_an_adapter_adds_its_scaled_product_to_the_weight(base, trained):
    """Written out for the two weights whose heads go in and come out."""
    assembled = lora.assemble(trained, base, ADAPTERS)["layers"]
    for name, product in (("output", "hkr,rd->hkd"), ("query", "dr,rhk->dhk")):
        layer = jax.tree.map(lambda x: x[1], assembled[name])
        pair = trained["layers"][name]
        added = 0.5 * np.einsum(product, pair["a"][1], pair["b"][1])
        wanted = base["layers"][name][1] + added
        np.testing.assert_allclose(lora.weight(layer), wanted, rtol=1e-5, atol=1e-6)


def test_a_forward_pass_with_adapters_is_that_of_the_merged_weights(base, trained):
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocabulary, (2, 9))
    assembled = lora.assemble(trained, base, ADAPTERS)
    merged = lora.merge(assembled)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, base)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    copy = jax.eval_shape(lora.merge, lora.assemble(trained, half, ADAPTERS))
    assert {x.dtype for x in jax.tree.leaves(copy)} == {jnp.dtype("bfloat16")}
    hidden, plain, before = (
        transformer.hidden_states(tree, tokens, CONFIG)
        for tree in (assembled, merged, base)
    )
    np.testing.assert_allclose(hidden, plain, atol=1e-5)
    assert np.abs(hidden - before).max() > 0.1


def test_fresh_adapters_change_nothing_and_a_critic_keeps_its_own_head(base):
    declared = lora.declare_adapters(CONFIG, ADAPTERS, value_head=True)
    output = declared["layers"]["output"]  # Of four heads of four features.
    assert output["a"].axes == ("layers", "heads", None, None)
    assert output["b"].axes == ("layers", None, "embed")
    assert output["a"].scale == pytest.approx(48**-0.5) and output["b"].scale == 0
    fresh = parameters.initialize(jax.random.key(0), declared)
    critic = lora.merge(lora.assemble(fresh, base, ADAPTERS))
    wanted = parameters.shapes(parameters.declare(CONFIG, value_head=True))
    assert jax.tree.map(jnp.shape, critic) == jax.tree.map(lambda x: x.shape, wanted)
    jax.tree.map(np.testing.assert_array_equal, critic["layers"], base["layers"])


@pytest.mark.slow
def test_gradients_of_adapters_follow_from_those_of_the_merged_weights(base, trained):
    """dA = scale dW B^T and dB = scale A^T dW, for a weight of one axis in and out."""
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocabulary, (2, 7))

    def loss(tree):
        return (transformer.hidden_states(tree, tokens, CONFIG) ** 3).sum()

    given = jax.grad(lambda t: loss(lora.assemble(t, base, ADAPTERS)))(trained)
    whole = jax.grad(loss)(lora.merge(lora.assemble(trained, base, ADAPTERS)))
    pair, got = trained["layers"]["gate"], given["layers"]["gate"]
    dense = np.asarray(whole["layers"]["gate"])
    wanted_a = 0.5 * np.einsum("lio,lro->lir", dense, pair["b"])
    wanted_b = 0.5 * np.einsum("lir,lio->lro", pair["a"], dense)
    np.testing.assert_allclose(got["a"], wanted_a, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got["b"], wanted_b, rtol=1e-3, atol=1e-3)


# A run ------------------------------------------------------------------------------

CHANGES = dict(lora__rank=2, lora__targets="attention", iterations=2, loss__kl=0.01)


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare(**CHANGES)


@pytest.fixture(scope="module")
def workdir(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    console = runs.train(run, folder)
    assert "before and after training" in console
    return folder


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_and_no_base(run, workdir):
    leaves = runs.leaves(workdir, 2)
    actor = [name for name in leaves if name.startswith("actor.")]
    targets = ("key", "output", "query", "value")
    wanted = {f"actor.layers.{name}.{x}" for name in targets for x in "ab"}
    assert set(actor) == wanted
    assert "critic.value_head" in leaves
    assert all(np.abs(leaves[f"actor.layers.{name}.b"]).max() > 0 for name in targets)
    largest = max(leaf.size for leaf in leaves.values())
    assert largest < run.model.config.vocabulary * run.model.config.width


@pytest.mark.slow
def test_the_update_computes_with_the_weights_of_the_sampler(workdir):
    for record in runs.records(workdir)[:2]:
        assert record["update/logprob_gap"] < 1e-5
        assert record["update/kl"] < 1e-2


@pytest.mark.slow
def test_a_checkpoints_actor_is_played_with_its_adapters(run, workdir):
    directory = workdir / checkpoints.FOLDER
    actor = weights.restore_actor(run.model, directory, 2)
    base = weights.load_parameters(run.model)
    moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), actor, base)
    assert moved["layers"]["query"] > 0 and moved["layers"]["gate"] == 0
    leaves = runs.leaves(workdir, 2)
    a, b = (leaves[f"actor.layers.value.{x}"] for x in "ab")
    added = run.model.adapters.scale * np.einsum("lir,lrhk->lihk", a, b)
    wanted = base["layers"]["value"] + added
    np.testing.assert_allclose(actor["layers"]["value"], wanted, atol=1e-6)


@pytest.mark.slow
def test_peft_reads_the_same_products(run, workdir, tmp_path):
    trained = weights.restore_trained(run.model, workdir / checkpoints.FOLDER, 2)
    trained = jax.device_get(trained)
    peft.write_folder(
        tmp_path / "out", run.model.config, trained, run.model.adapters, "base"
    )
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * run.model.config.layers
    prefix = "base_model.model.model.layers.1.self_attn.o_proj"
    up, down = (tensors[f"{prefix}.lora_{x}.weight"] for x in "BA")
    pair = trained["layers"]["output"]
    wanted = np.einsum("hkr,rd->dhk", pair["a"][1], pair["b"][1])
    np.testing.assert_allclose(up @ down, wanted.reshape(len(wanted), -1), atol=1e-6)
    with pytest.raises(UserError, match="exists and is not empty"):
        peft.write_folder(
            tmp_path / "out", run.model.config, trained, run.model.adapters, "base"
        )


@pytest.mark.slow
def test_exported_adapters_name_their_base_so_that_they_are_read_as_trained(
    run, workdir, tmp_path
):
    base, out = runs.model(), tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "launch" / "export.py"), "--adapter"),
            *(f"--checkpoint={workdir}", f"--model=./{base.name}", f"--out={out}"),
        ],
        cwd=base.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((out / "adapter_config.json").read_text())
    assert Path(written["base_model_name_or_path"]) == base.absolute()
    assert "peft reads no GGUF" not in done.stdout
    assert "end prompts with '<think>', with which" in done.stdout
    read = sources.locate(str(out)).open_parameters(
        run.model.config, run.model.declared
    )
    found = partial_reads.read_tree(read, run.model.declared)
    merged = weights.restore_actor(run.model, workdir / checkpoints.FOLDER, 2)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, found, jax.device_get(merged))


def test_only_adapters_wait_for_an_optimizer(run):
    state = weights.abstract_state(run)
    programs = programs_lib.make_programs(run)
    assert programs.reference is programs.frozen  # The KL term needs no second copy.
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.actor))
    momenta = sum(leaf.size for leaf in jax.tree.leaves(state.actor_optimizer))
    assert momenta < 2 * trained + 10
