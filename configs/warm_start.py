r"""The supervised start of the embedded `tiny` model, from nothing.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny

Trains the tokenizer, then the model, on demonstrated episodes of training lakes. The
result is a Hugging Face folder. Takes about half an hour on two CPU cores;
docs/tiny_model.md says how the shipped file was made and what it scores.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "" or "smoke"."""
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; choose '' or 'smoke'")
    config = ConfigDict()
    config.seed = 0
    # How far from good the demonstrations are (ragen_jax/envs/demonstrations.py); the
    # share of aimless plans is each stage's own.
    config.demonstrator = dict(heedless=0.6, noise=0.05, longest=5)
    config.env = dict(size=4, frozen_probability=0.9, success_probability=0.8)
    config.limits = dict(turns=5, actions_per_turn=5, actions=10, reply_tokens=48)
    # First short rows without the system prompt, cheap and with no aimless plans, until
    # boards are read and the goal is walked to; then whole dialogues in every variant:
    # as they are to be, mostly aimed until the goal is read without fail, and again as
    # they are to be. `rows` of `context` tokens a step; `draws` seeds the data.
    config.boards = _stage(700, lr=3e-3, aimless=0.0, draws=1, rows=64, context=128)
    config.boards.short = True
    config.dialogues = _stage(300, lr=1.5e-3, aimless=0.65, draws=1)
    config.surer = _stage(170, lr=1e-3, aimless=0.2, draws=2)
    config.last = _stage(80, lr=5e-4, aimless=0.65, draws=3)
    if variant == "smoke":
        for name in ("boards", "dialogues", "surer", "last"):
            config[name].steps = 4
    config.optimizer = dict(warmup=100, beta2=0.98, weight_decay=0.01, clip_norm=1.0)
    config.log_every = 1 if variant == "smoke" else 25
    return config


def _stage(steps: int, *, lr, aimless, draws, rows=24, context=640) -> ConfigDict:
    return ConfigDict(
        dict(
            steps=steps,
            rows=rows,
            context=context,
            lr=lr,
            aimless=aimless,
            draws=draws,
            short=False,
        )
    )
