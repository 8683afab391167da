"""What the programs of an iteration take, as shapes; compiling them ahead of use."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import threading
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax import weights
from ragen_jax.rollout.sample import Call, Rollout

if TYPE_CHECKING:  # loop.py builds the programs.
    from ragen_jax.loop import Programs, Run


def rollout_arguments(run: "Run") -> tuple:
    """What `Programs.rollout` takes, without the arrays."""
    call = Call(
        seed=_scalar(run, jnp.uint32),
        split=_scalar(run, jnp.int32),
        iteration=_scalar(run, jnp.int32),
        first_prompt=_scalar(run, jnp.int32),
        temperature=_scalar(run, jnp.float32),
        policy_version=_scalar(run, jnp.int32),
    )
    return weights.abstract_parameters(run), run.tokens, call


def update_arguments(run: "Run", sampling: jax.stages.Lowered) -> tuple:
    """What `Programs.update` takes, without the arrays.

    Args:
      run: what is static.
      sampling: the rollout, lowered for `rollout_arguments`.
    """
    model = weights.abstract_parameters(run)
    frozen = {} if run.adapters is None else model
    reference = model if run.settings.loss.kl > 0 else {}
    state, record = weights.abstract_state(run), record_shapes(run, sampling)
    seed = _scalar(run, jnp.uint32)
    return state, frozen, reference, record.rows, record.episodes, seed


def _scalar(run: "Run", dtype) -> jax.ShapeDtypeStruct:
    """One number, on every device."""
    whole = NamedSharding(run.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((), dtype, sharding=whole)


def record_shapes(run: "Run", sampling: jax.stages.Lowered) -> Rollout:
    """What the rollout returns, without the arrays. Args as for `update_arguments`."""
    shared = NamedSharding(run.mesh, meshes.ROWS)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shared),
        sampling.out_info,
    )


def compile_ahead(run: "Run", programs: "Programs") -> "Programs":
    """The programs, with the update compiling in a thread while episodes are sampled.

    The update takes longest to compile, or to load from the cache; without this the
    first rollout would be over before either began. Several processes compile one
    program after the other, in the same order.
    """
    if jax.process_count() > 1:
        return programs
    sampling = programs.rollout.lower(*rollout_arguments(run))
    arguments = update_arguments(run, sampling)
    compiled: concurrent.futures.Future = concurrent.futures.Future()

    def compile_update() -> None:
        try:
            update = programs.update.lower(*arguments).compile()
            return_free_memory()
            compiled.set_result(update)
        except BaseException as error:  # Raised where the update is first called.
            compiled.set_exception(error)

    # A daemon: a run that ends before its first update does not wait for it.
    threading.Thread(target=compile_update, daemon=True).start()
    return dataclasses.replace(
        programs,
        rollout=sampling.compile(),
        update=lambda *given: compiled.result()(*given),
    )


def return_free_memory() -> None:
    """Hands what the compiler has freed back to the system, where glibc is in use.

    It keeps such memory to itself otherwise: 1.6 of the 2.5 GiB that a run on a CPU
    held when its update was compiled, and then the update's own arrays came on top.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
