"""All choices that depend on the backend, each with its reason.

Facts about devices come from `backend.py`. The evidence for each choice is given in
brackets: "compiled" was read off the program that XLA compiles for an H100, or for a
TPU that is named; "simulated" was counted by the rollout's scheduling rules with random
reply lengths (mean 50, 150 and 400 tokens, 128 slots, 5 turns); "measured" was timed.
"""

import dataclasses

import jax.numpy as jnp

from ragen_jax.errors import SettingsError
from ragen_jax.parallel import backend


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices for one kind of backend; some are defaults that settings override."""

    # The dtype of the transformers: CPUs emulate bfloat16 (measured: a tenth of the
    # speed in products with one row).
    compute_dtype: str
    # Whether attention over whole rows loops over rows: a CPU's cache holds the scores
    # of one row's block (measured: 5 times faster, forward and backward).
    has_row_loop: bool
    # Queries scored at a time by attention in plain operations, which is unrolled over
    # such blocks. Wider ones compile sooner. A GPU times the kernels of each block, all
    # of other lengths, on the card: with blocks of 64 some 120 products for rows of
    # 1,344 tokens, with 256 some 36 (counted, not tried). On a TPU, with blocks of 256
    # an update in rows of up to 768 tokens took 93 s of processor time, tracing
    # included, with 64 140 s; temporaries were 359 and 391 MiB (compiled for a v5e,
    # when bfloat16 had no other attention there).
    query_block: int
    # Slots: episodes of a training batch that are decoded at a time; 0: all. On a CPU
    # the cost of a step grows with the slots, and with a slot for each episode three
    # quarters of them would wait or idle: 128 episodes of FrozenLake took 8.6 s of one
    # core with 128 slots, 4.9 with 64, 4.0 with 32 and 3.5 with 16, and 3.5 with 32 and
    # chunks of 4 (measured, medians of three). A GPU's step costs the same for few and
    # many.
    slots: int
    # Decode steps between two evaluations of the loop's condition. An evaluation costs
    # a GPU some 0.03 ms; a step costs 1 ms, wasted on slots that have finished a reply.
    decode_chunk: int
    # Number of KV-cache lengths that decoding is compiled for. On a CPU it is cheaper
    # to read a shorter one. A GPU first copies the slice: three quarters of the cache
    # cost 1.6 times as much as all of it (compiled). A TPU reads a slice where it
    # stands: a pass of Qwen2.5-0.5B over a quarter of the cache of 128 slots takes 5.7
    # million cycles by XLA's estimate, and over all of it 12.0 (compiled for a v5p).
    buckets: int
    # W = slots / extend_share is the number of waiting slots that get their
    # environment's feedback in one step. On a GPU a decode step costs the same however
    # many slots wait, so waiting is expensive; on a CPU each message costs time
    # (measured). Simulated: W of an eighth, chunks of 4 and `counts_busy` together take
    # 13 %, 18 % and 37 % off the time of a rollout against a quarter, 8 and no count.
    extend_share: int
    # Whether an environment steps once 1 / extend_share of its busy slots wait; if not,
    # only when W wait, so that near the end all wait for the slowest.
    counts_busy: bool
    # Whether GAE loops over tokens. For the loop a GPU launches four kernels a token,
    # 10,503 for rows of 2,624, some 16 ms; with all tokens at once 9 (compiled). On a
    # CPU the loop keeps the order of sums, and so the numbers of earlier runs.
    has_token_loop: bool
    # Whether every program, evaluations included, compiles before the first episodes
    # are sampled. For a GPU XLA times kernels on the card itself: beside other work it
    # would time them wrongly, and take memory that the memory plan does not count. On a
    # CPU the update compiles while the first episodes are sampled, and evaluations when
    # first called. Compiled ahead, they took cores from the sampling: the first
    # iteration was over after 30.6 and 38.4 s instead of 28.3 and 26.3 (measured).
    compiles_all_first: bool
    # Whether sampling reads a large vocabulary's logits once instead of twice. With 128
    # slots and Qwen2.5's vocabulary, sampling and the product that makes the logits
    # then move 435 MB instead of 515, in two kernels less (compiled). A CPU would take
    # the exponentials one by one: 1.4 ms instead of 0.4 to 0.8 (measured, 8 slots,
    # SmolLM2's vocabulary).
    sums_blocks_at_once: bool
    # Lengths of rows and caches are a multiple of this many tokens, so that every row
    # of the cache is aligned for 16-byte loads.
    row_multiple: int


_CPU = Choices(
    compute_dtype="float32",
    has_row_loop=True,
    query_block=64,
    slots=32,
    decode_chunk=4,
    buckets=4,
    extend_share=4,
    counts_busy=False,
    has_token_loop=True,
    compiles_all_first=False,
    sums_blocks_at_once=False,
    row_multiple=1,
)
_ACCELERATOR = Choices(
    compute_dtype="bfloat16",
    has_row_loop=False,
    query_block=256,
    slots=0,
    decode_chunk=4,
    buckets=1,
    extend_share=8,
    counts_busy=True,
    has_token_loop=False,
    compiles_all_first=True,
    sums_blocks_at_once=True,
    row_multiple=64,
)
_TPU = dataclasses.replace(_ACCELERATOR, buckets=4)

# The commands that a CUDA graph of the rollout may hold: XLA's own list, and loops, so
# that the whole rollout is one graph, and the host evaluates no loop condition
# (compiled).
GRAPH_COMMANDS = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
)


def choices() -> Choices:
    """The choices for the backend that programs are compiled for."""
    return {"cpu": _CPU, "tpu": _TPU}.get(backend.name(), _ACCELERATOR)


def row_length(needed: int) -> int:
    """`needed` tokens rounded up to a multiple of `row_multiple`."""
    multiple = choices().row_multiple
    return -(-needed // multiple) * multiple


def has_cudnn_attention(dtype, head_dim: int) -> bool:
    """Whether cuDNN has an attention kernel for these heads on this device."""
    if dtype not in (jnp.bfloat16, jnp.float16) or head_dim % 8 or head_dim > 128:
        return False
    capability = backend.cuda_capability()
    return capability is not None and capability >= (8, 0)  # Ampere and later.


def decode_attention(kernel: str, dtype, head_dim: int) -> str:
    """The kernel of decode attention: "cudnn", "merged" or "xla".

    cuDNN's kernel reads no key beyond a slot's length; plain operations read the whole
    cache of every slot, or one bucket of it. Compiled for Qwen2.5-0.5B and 128 slots of
    2,624 tokens, a decode step has 320 kernels and moves 2.6 GB plus the filled part of
    a cache of 4.1 GB; in plain operations 367 kernels and 8.1 GB. Neither was timed.
    "merged" is plain operations too, on a cache that a TPU writes and reads in one
    layout. With the context last, the temporaries of a rollout of Qwen2.5-0.5B took
    16.3 GiB instead of 5.8, and each round copied the cache twice (compiled, v5p).

    Args:
      kernel: rollout.decode_attention, "auto", "xla" or "cudnn".
      dtype: of the computation.
      head_dim: features of a head.

    Raises:
      SettingsError: if cuDNN is wanted and has no such kernel.
    """
    if _takes_cudnn("rollout.decode_attention", kernel, dtype, head_dim):
        return "cudnn"
    return "merged" if kernel == "auto" and backend.name() == "tpu" else "xla"


def row_attention(kernel: str, dtype, head_dim: int) -> str:
    """The kernel of whole rows, in the update and of prompts.

    "cudnn" and "splash" write no scores to memory. Plain operations, "xla", are for a
    device or a driver on which those fail: with replies of 150 tokens the update of
    Qwen2.5-0.5B moves 5.3 TB an iteration instead of 1.5 on an H100, and the gradient
    of one attention of 8 rows 12.8 GB instead of 1.5 on a v5p (compiled). "rows" is one
    row after the other, for CPUs.

    Args:
      kernel: model.attention, "auto", "xla", "cudnn" or "splash".
      dtype: of the computation.
      head_dim: features of a head.

    Returns:
      "cudnn", "splash", "xla" or "rows".

    Raises:
      SettingsError: if a kernel is wanted that this device does not have.
    """
    if _takes_cudnn("model.attention", kernel, dtype, head_dim):
        return "cudnn"
    if _takes_splash(kernel, dtype):
        return "splash"
    return "rows" if kernel == "auto" and choices().has_row_loop else "xla"


def _takes_cudnn(setting: str, kernel: str, dtype, head_dim: int) -> bool:
    has_cudnn = has_cudnn_attention(dtype, head_dim)
    if kernel == "cudnn" and not has_cudnn:
        raise SettingsError(
            f"{setting} = 'cudnn' needs an NVIDIA GPU of compute"
            " capability 8.0 or later, bfloat16, and heads of at most 128 features, a"
            f" multiple of 8; here are {backend.name()}, {jnp.dtype(dtype).name} and"
            f" {head_dim}: set it to 'auto'"
        )
    return has_cudnn and kernel in ("auto", "cudnn")


def _takes_splash(kernel: str, dtype) -> bool:
    has_splash = backend.name() == "tpu" and dtype == jnp.bfloat16
    if kernel == "splash" and not has_splash:
        raise SettingsError(
            "model.attention = 'splash' needs a TPU and bfloat16; here are"
            f" {backend.name()} and {jnp.dtype(dtype).name}: set it to 'auto'"
        )
    return has_splash and kernel in ("auto", "splash")


def check_cuda_graph(wanted: bool) -> None:
    """Raises SettingsError if `rollout.cuda_graph` is wanted and no GPU could have one.

    Call it for settings that the user chooses now. A run that was trained with a graph
    can be evaluated and diagnosed without a GPU.
    """
    if wanted and backend.cuda_capability() is None:
        raise SettingsError(
            "rollout.cuda_graph = True needs an NVIDIA GPU, and the devices here are"
            f" {backend.name()}: set it to False"
        )


def rollout_compiler_options(cuda_graph: bool) -> dict[str, str] | None:
    """Compiler options of the rollout's program; None: XLA's own."""
    if not cuda_graph or backend.cuda_capability() is None:
        return None
    return {"xla_gpu_enable_command_buffer": GRAPH_COMMANDS}
