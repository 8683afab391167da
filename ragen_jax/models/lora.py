"""Low-rank adapters (LoRA, arXiv:2106.09685): W' = W + alpha / rank * A B.

Actor and critic have adapters of their own on one frozen base. The forward pass adds
them to a layer's weights inside the scan over layers, in the weights' own precision, so
that the update computes with exactly the weights that the sampler was given.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.errors import UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import AXES_IN, Leaf, Parameters, declare

TARGETS = tuple(AXES_IN)
_GROUPS = {
    "all": TARGETS,
    "attention": ("query", "key", "value", "output"),
    "mlp": ("gate", "up", "down"),
}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which weights are adapted, and how strongly. Static."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of TARGETS

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank


@struct.dataclass
class Adapted:
    """A weight of the base beside its adapter; stands where the weight would."""

    base: jax.Array  # [L, in..., out...] or, in one layer, [in..., out...]
    a: jax.Array  # float32[L, in..., rank]
    b: jax.Array  # float32[L, rank, out...]
    scale: float = struct.field(pytree_node=False)


def read_targets(text: str) -> tuple[str, ...]:
    """The weights that "all", "attention", "mlp" or a list such as "query,value" names.

    Raises:
      UserError: for a name that matches nothing.
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part not in _GROUPS and part not in TARGETS:
            raise UserError(
                f"lora.targets = {text!r}: {part!r} matches no weight; choose some of"
                f" {', '.join((*_GROUPS, *TARGETS))}, separated by commas"
            )
        names += _GROUPS.get(part, (part,))
    return tuple(name for name in TARGETS if name in names)


def declare_adapters(
    config: ModelConfig, adapters: Adapters, *, value_head: bool = False
) -> Parameters:
    """The tree of trainable `Leaf`s: {"layers": {target: {"a", "b"}}}.

    B begins as zeros, so that training begins with the base model. A critic's value
    head is trained whole.
    """
    declared = declare(config, value_head=value_head)
    layers = {}
    for name in adapters.targets:
        leaf: Leaf = declared["layers"][name]
        split = 1 + AXES_IN[name]
        inputs, outputs = leaf.shape[1:split], leaf.shape[split:]
        layers[name] = {
            "a": Leaf(
                (config.layers, *inputs, adapters.rank),
                (*leaf.axes[:split], None),
                (3 * math.prod(inputs)) ** -0.5,  # The std of PEFT's uniform values.
            ),
            "b": Leaf(
                (config.layers, adapters.rank, *outputs),
                (leaf.axes[0], None, *leaf.axes[split:]),
                0,
            ),
        }
    tree: Parameters = {"layers": layers}
    if value_head:
        tree["value_head"] = declared["value_head"]
    return tree


def assemble(trainable: Parameters, base: Parameters, adapters: Adapters) -> Parameters:
    """Parameters whose adapted weights are `Adapted`; costs nothing.

    Args:
      trainable: as `declare_adapters` lays it out; of a critic if it has a value head.
      base: the model's own parameters, as `parameters.declare` lays them out.
      adapters: of the trainable tree.
    """
    layers = dict(base["layers"])
    for name, pair in trainable["layers"].items():
        layers[name] = Adapted(layers[name], pair["a"], pair["b"], adapters.scale)
    tree = {**base, "layers": layers}
    if "value_head" in trainable:
        tree.pop("head", None)
        tree["value_head"] = trainable["value_head"]
    return tree


def weight(leaf: Any, *, stacked: bool = False) -> jax.Array:
    """A weight with its adapter added, if it has one.

    Args:
      leaf: an array or an `Adapted`.
      stacked: whether a leading axis of layers is still there.
    """
    if not isinstance(leaf, Adapted):
        return leaf

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tensordot(a, b, axes=1)

    if stacked:
        product = jax.vmap(product)
    return leaf.base + leaf.scale * product(leaf.a, leaf.b)


def is_adapted(leaf: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_adapted)` over assembled parameters."""
    return isinstance(leaf, Adapted)


def merge(parameters: Parameters) -> Parameters:
    """Assembled parameters as plain arrays, in the base's dtype; for the sampler."""
    return jax.tree.map(
        lambda leaf: (
            weight(leaf, stacked=True).astype(leaf.base.dtype)
            if is_adapted(leaf)
            else leaf
        ),
        parameters,
        is_leaf=is_adapted,
    )
