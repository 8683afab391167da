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
    smoke = variant == "smoke"

    config = ConfigDict()
    config.seed = 0
    # How far from good the demonstrations are (ragen_jax/envs/demonstrations.py).
    config.demonstrator = dict(heedless=0.6, aimless=0.65, noise=0.05, longest=5)
    config.env = dict(size=4, frozen_probability=0.9, success_probability=0.8)
    config.limits = dict(turns=5, actions_per_turn=5, actions=10, reply_tokens=48)
    # First short rows without the system prompt, cheap and with no aimless plans, until
    # boards are read and the goal is walked to; then whole dialogues in every variant,
    # by the demonstrator above. `rows` of `context` tokens a step.
    config.boards = dict(steps=4 if smoke else 700, rows=64, context=128, lr=3e-3)
    config.dialogues = dict(steps=4 if smoke else 300, rows=24, context=640, lr=1.5e-3)
    config.optimizer = dict(warmup=100, beta2=0.98, weight_decay=0.01, clip_norm=1.0)
    config.log_every = 1 if smoke else 25
    return config
