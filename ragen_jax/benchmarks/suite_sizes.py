"""The sizes of the GPU suite's stages: FULL for a GPU, SMOKE for tests on a CPU."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all stages.

    They are part of `Result.made_with`, so they hold no absolute path.
    """

    config: str  # of whole iterations: a file in `configs`, with its variant
    shape: str  # of their random weights, a key of SHAPES
    # Limits of reply tokens to measure; random weights end no reply early.
    replies: tuple[int, ...]
    compared: int  # the one of `replies` at which switches are compared
    iterations: int  # to time after one that compiles
    slots: int  # this and the next two: of attention by itself
    context: int
    heads: tuple[int, int, int]  # (query heads, key heads, features of each)
    default: str  # config of the training runs, as `config`
    default_context: int  # about that of its cache, and the heads of its model
    default_heads: tuple[int, int, int]
    default_iterations: int  # of the run that learns
    repeated_iterations: int  # of each of the two runs that must be equal


FULL = Sizes(
    config="frozenlake.py:paper",
    shape="qwen2.5-0.5b",
    replies=(50, 150, 400),
    compared=150,
    iterations=3,
    slots=128,
    context=2624,
    heads=(14, 2, 64),
    default="frozenlake.py",
    default_context=640,
    default_heads=(8, 2, 16),
    default_iterations=12,
    repeated_iterations=3,
)
SMOKE = Sizes(
    config="frozenlake.py:smoke",
    shape="tiny",
    replies=(6, 12),
    compared=6,
    iterations=1,
    slots=4,
    context=96,
    heads=(8, 2, 16),
    default="frozenlake.py:smoke",
    default_context=96,
    default_heads=(8, 2, 16),
    default_iterations=2,
    repeated_iterations=1,
)
