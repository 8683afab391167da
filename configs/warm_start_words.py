r"""The supervised start of the embedded `tiny_words` model, from nothing.

  python launch/warm_start.py --config=configs/warm_start_words.py --out=my_words

Trains the tokenizer, then the model, on demonstrated episodes of training levels of
SearchQA and WebShop. The result is a Hugging Face folder; docs/tiny_model.md says how
the shipped file was made and what it scores.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "" or "smoke"."""
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; choose '' or 'smoke'")
    config = ConfigDict()
    config.seed = 0
    config.model = "tiny_words"  # The embedded model, its shape, words and stages.
    # As in the variants tiny_words of configs/search_qa.py and configs/webshop.py.
    config.search_qa = ConfigDict(
        dict(
            env=dict(people=200, hops="one", passages=3),
            limits=dict(turns=4, actions_per_turn=1, actions=4, reply_tokens=48),
            demonstrator=dict(random_plan=0.0),
            context=448,
            short_context=320,
            rows_for_one=2,  # Rows are short: 2 for each of a stage's `rows`.
        )
    )
    config.webshop = ConfigDict(
        dict(
            env=dict(products=50),
            limits=dict(turns=6, actions_per_turn=1, actions=6, reply_tokens=32),
            demonstrator=dict(random_plan=0.0),
            context=896,
            short_context=704,
        )
    )
    # First short rows without the system prompt and with careful demonstrations, until
    # the model copies names; then whole dialogues, careful and careless.
    config.search_pages = _stage(300, lr=2e-3, random_plan=0.0, draws=1, rows=16)
    config.search_pages.update(short=True, kinds="search", context=176)
    config.shop_pages = _stage(150, lr=2e-3, random_plan=0.1, draws=2, rows=8)
    config.shop_pages.update(short=True, kinds="shop_and_search")
    config.both_mixed = _stage(80, lr=1e-3, random_plan=0.5, draws=3, rows=8)
    if variant == "smoke":
        for section in config.values():
            if isinstance(section, ConfigDict) and "steps" in section:
                section.steps = 4
    config.optimizer = dict(warmup=100, beta2=0.98, weight_decay=0.01, clip_norm=1.0)
    config.log_every = 1 if variant == "smoke" else 25
    return config


def _stage(steps: int, *, lr, random_plan, draws, rows, context=896) -> ConfigDict:
    """A stage of supervised training; configs/warm_start.py explains its keys."""
    return ConfigDict(
        dict(
            steps=steps,
            rows=rows,
            context=context,
            lr=lr,
            random_plan=random_plan,
            draws=draws,
            short=False,
            kinds="search_and_shop",
            new_words=False,
            read_layers=0,
            turns=0,
            noise=placeholder(float),
            relabel=False,
            midway=0,
            misread=0.0,
            places_weight=1.0,
            walls_weight=0.0,
            regret_weight=0.0,
            random_places=0.0,
        )
    )
