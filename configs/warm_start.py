r"""The supervised start of the embedded `tiny` model, from nothing.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny

Trains the tokenizer, then the model, on demonstrated episodes of training levels of
FrozenLake, Sokoban and Bandit. The result is a Hugging Face folder. Takes above an hour
on two CPU cores; docs/tiny_model.md says how the shipped file was made and what it
scores. One variant:

  python launch/warm_start.py --config=configs/warm_start.py:solver --start=tiny \
      --first_stage=sokoban_boards --last_stage=sokoban_dialogues --out=my_solver

continues from the embedded model with what a solver does in rooms of Sokoban, and
forgets the other environments. Another,

  python launch/warm_start.py --config=configs/warm_start.py:symbols --start=my_solver \
      --out=my_tiny_symbols

adds three layers, which learn to read rooms in whatever symbols the prompt explains.
The variant "rooms" adds them to learn rooms of any size up to 9, and two boxes.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke" or one of those above."""
    if variant not in ("", "smoke", "solver", "symbols", "rooms"):
        raise ValueError(
            f"unknown variant {variant!r}; choose '', 'smoke', 'solver', 'symbols' or"
            " 'rooms'"
        )
    config = ConfigDict()
    config.seed = 0
    config.model = "tiny"  # The embedded model, its shape, words and stages.
    # The environments, their limits, and how imperfect the demonstrations are: the
    # fields of Demonstrator in ragen_jax/envs/*/demonstrations.py, of which each stage
    # overrides random_plan. `context` is the most tokens of a dialogue,
    # `short_context` that without the system prompt; the longest seen fit into them.
    config.frozen_lake = ConfigDict(
        dict(
            env=dict(size=4, frozen_probability=0.9, success_probability=0.8),
            limits=dict(turns=5, actions_per_turn=5, actions=10, reply_tokens=48),
            demonstrator=dict(ignore_holes=0.6, noise=0.05, longest=5, random_plan=0.0),
            context=640,
            short_context=176,
        )
    )
    config.sokoban = ConfigDict(
        dict(
            env=dict(size=6, boxes=1),
            limits=dict(turns=5, actions_per_turn=5, actions=10, reply_tokens=64),
            demonstrator=dict(
                ignore_target=0.3,
                noise=0.1,
                longest=5,
                random_plan=0.0,
                midway=0,
                misread=0.0,
            ),
            context=704,
            short_context=176,
        )
    )
    config.bandit = ConfigDict(
        dict(
            env=dict(low_reward=0.15, high_probability=0.25),
            limits=dict(turns=1, actions_per_turn=1, actions=1, reply_tokens=48),
            demonstrator=dict(risky=0.5),
            context=192,
            short_context=64,
            rows_for_one=3,  # Rows are short: 3 for each of a stage's `rows`.
        )
    )
    # Four stages for FrozenLake. "boards": short rows without the system prompt, which
    # are cheap, and without random plans, until the model reads boards and walks to
    # the goal. "dialogues": whole dialogues in every variant, with the share of random
    # plans that the result is to have. "aimed": fewer random plans, until the model
    # never misreads the goal. "mixed": again the share of "dialogues". Then the same
    # four for Sokoban and two for Bandit, each with the earlier environments kept in.
    # `_stage` lists what a stage can set.
    config.lake_boards = _stage(
        700, lr=3e-3, random_plan=0.0, draws=1, rows=64, context=128
    )
    config.lake_boards.update(short=True, kinds="lake")
    config.lake_dialogues = _stage(300, lr=1.5e-3, random_plan=0.65, draws=1)
    config.lake_aimed = _stage(170, lr=1e-3, random_plan=0.2, draws=2)
    config.lake_mixed = _stage(80, lr=5e-4, random_plan=0.65, draws=3)
    config.sokoban_boards = _stage(
        700, lr=2e-3, random_plan=0.0, draws=4, rows=48, context=176
    )
    config.sokoban_boards.update(short=True, kinds="sokoban_and_lake")
    config.sokoban_dialogues = _stage(
        400, lr=1e-3, random_plan=0.65, draws=5, rows=16, context=704
    )
    config.sokoban_dialogues.kinds = "lakes_and_sokoban"
    config.sokoban_aimed = _stage(340, lr=1e-3, random_plan=0.2, draws=6, rows=16)
    config.sokoban_aimed.update(context=704, kinds="mostly_sokoban")
    config.sokoban_mixed = _stage(80, lr=5e-4, random_plan=0.65, draws=7, rows=16)
    config.sokoban_mixed.update(context=704, kinds="lakes_and_sokoban")
    config.bandit_dialogues = _stage(
        240, lr=2e-3, random_plan=0.2, draws=8, rows=48, context=176
    )
    config.bandit_dialogues.update(
        short=True, kinds="bandit_and_others", new_words=True
    )
    config.bandit_mixed = _stage(170, lr=1e-3, random_plan=0.65, draws=9, rows=16)
    config.bandit_mixed.update(context=704, kinds="all")
    if variant in ("solver", "symbols", "rooms"):
        config.sokoban.demonstrator.update(ignore_target=0.0, noise=0.05)
        config.sokoban_boards = _stage(
            1100, lr=2e-3, random_plan=0.0, draws=21, rows=48, context=176
        )
        config.sokoban_boards.update(short=True, kinds="sokoban")
        config.sokoban_dialogues = _stage(
            240, lr=7e-4, random_plan=0.0, draws=22, rows=16, context=704
        )
        config.sokoban_dialogues.kinds = "sokoban"
    if variant == "symbols":
        _read_symbols(config)
    if variant == "rooms":
        _all_rooms(config)
    if variant == "smoke":
        for section in config.values():
            if isinstance(section, ConfigDict) and "steps" in section:
                section.steps = 4
    config.optimizer = dict(warmup=100, beta2=0.98, weight_decay=0.01, clip_norm=1.0)
    config.log_every = 1 if variant == "smoke" else 25
    return config


def _read_symbols(config: ConfigDict) -> None:
    """The stages of `tiny_symbols`.

    New first layers learn to translate each cell's symbol into its meaning: on short
    rows that begin with a sentence about the symbols, then with the whole system
    prompt. At last the whole model imitates the solver again.
    """
    config.model = "tiny_symbols"
    config.symbols_legend = _stage(
        1800, lr=3e-3, random_plan=0.0, draws=31, rows=64, context=88
    )
    config.symbols_legend.update(short=True, read_layers=3)
    config.symbols_prompt = _stage(
        600, lr=2e-3, random_plan=0.0, draws=32, rows=32, context=320
    )
    config.symbols_prompt.read_layers = 3
    config.symbols_dialogues = _stage(
        45, lr=2e-4, random_plan=0.0, draws=33, rows=16, context=704
    )
    for name in ("symbols_legend", "symbols_prompt", "symbols_dialogues"):
        config[name].kinds = "sokoban_in_any_symbols"


def _all_rooms(config: ConfigDict) -> None:
    """The stages of `tiny_rooms`.

    boards                     rooms of 6, 7 and 9 rows with one box or two, on short
                               rows without the system prompt
    frames                     the same rooms somewhere within larger drawings, so that
                               the model has to count rows and columns
    dialogues, places,         the same in whole dialogues; the last two with more
    refined                    weight on the places that a reply names
    walls                      extra heads read the walls and boxes around places, most
                               of which are random, on short rows
    planned, walked            the same while planning, which is unlearned meanwhile: on
                               short rows, then in dialogues
    relabelled, corrected      a share of the actions is random, and the best ones are
                               imitated in their place: on short rows, then in dialogues
    two_boxes,                 mostly two boxes; the loss also counts the actions that
    two_boxes_dialogues        the model's choices are expected to lose
    """
    config.model = "tiny_rooms"
    config.sokoban_large = ConfigDict(
        dict(
            env=dict(size=6, boxes=2),
            limits=dict(turns=10, actions_per_turn=5, actions=20, reply_tokens=64),
            demonstrator=config.sokoban.demonstrator.to_dict(),
            context=1536,
            short_context=240,
        )
    )
    config.rooms_boards = _stage(
        1500, lr=2e-3, random_plan=0.0, draws=41, rows=48, context=192
    )
    config.rooms_boards.update(short=True, turns=2)
    config.rooms_frames = _stage(
        1400, lr=1.5e-3, random_plan=0.0, draws=43, rows=32, context=240
    )
    config.rooms_frames.update(short=True, turns=2)
    config.rooms_dialogues = _stage(
        300, lr=6e-4, random_plan=0.0, draws=42, rows=12, context=1152
    )
    config.rooms_places = _stage(
        450, lr=8e-4, random_plan=0.0, draws=44, rows=12, context=1152
    )
    config.rooms_refined = _stage(
        450, lr=4e-4, random_plan=0.0, draws=45, rows=12, context=1152
    )
    config.rooms_walls = _stage(
        3000, lr=1.5e-3, random_plan=0.0, draws=46, rows=16, context=240
    )
    config.rooms_walls.update(short=True, turns=2, noise=0.3)
    config.rooms_walls.update(walls_weight=1.0, random_places=0.75)
    config.rooms_planned = _stage(
        1500, lr=1.2e-3, random_plan=0.0, draws=48, rows=16, context=240
    )
    config.rooms_planned.update(short=True, turns=2)
    config.rooms_planned.update(walls_weight=0.3, random_places=0.1)
    config.rooms_walked = _stage(
        600, lr=8e-4, random_plan=0.0, draws=47, rows=12, context=1152
    )
    config.rooms_walked.update(noise=0.1, walls_weight=0.6, places_weight=3.0)
    config.rooms_relabelled = _stage(
        450, lr=8e-4, random_plan=0.0, draws=61, rows=32, context=200
    )
    config.two_boxes = _stage(
        700, lr=7e-4, random_plan=0.0, draws=81, rows=32, context=200
    )
    for name in ("rooms_relabelled", "two_boxes"):
        config[name].update(short=True, turns=1, noise=0.25, midway=10)
        config[name].random_places = 0.05
    config.two_boxes.places_weight = 3.0
    config.rooms_corrected = _stage(
        100, lr=5e-4, random_plan=0.0, draws=71, rows=12, context=1152
    )
    config.two_boxes_dialogues = _stage(
        400, lr=6e-4, random_plan=0.0, draws=91, rows=12, context=1152
    )
    config.rooms_corrected.update(noise=0.2, places_weight=3.0)
    config.two_boxes_dialogues.update(noise=0.2, places_weight=5.0)
    for name in ("two_boxes", "two_boxes_dialogues"):
        config[name].regret_weight = 1.0
    config.two_boxes_dialogues.misread = 0.9
    relabelled = ("rooms_relabelled", "rooms_corrected")
    for name in (*relabelled, "two_boxes", "two_boxes_dialogues"):
        config[name].update(relabel=True, walls_weight=0.2)
    for name in ("rooms_places", "rooms_refined"):
        config[name].places_weight = 5.0
    config.rooms_boards.kinds = "rooms"
    config.two_boxes.kinds = "two_boxes_in_frames"
    config.two_boxes_dialogues.kinds = "two_boxes_in_named_frames"
    in_frames = ("rooms_frames", "rooms_walls", "rooms_planned", "rooms_relabelled")
    for name in in_frames:
        config[name].kinds = "rooms_in_frames"
    in_dialogues = ("rooms_dialogues", "rooms_places", "rooms_refined", "rooms_walked")
    for name in (*in_dialogues, "rooms_corrected"):
        config[name].kinds = "rooms_in_named_frames"


def _stage(steps: int, *, lr, random_plan, draws, rows=24, context=640) -> ConfigDict:
    """A stage of supervised training, as ragen_jax/warm_start/stages.py reads it."""
    return ConfigDict(
        dict(
            steps=steps,  # Optimizer steps.
            rows=rows,  # Rows of a step.
            context=context,  # Most tokens of a row.
            lr=lr,
            random_plan=random_plan,  # Share of demonstrated plans that are random.
            draws=draws,  # Seed of the demonstrations.
            short=False,  # Leave the system prompt out.
            kinds="lakes",  # A key of KINDS in ragen_jax/warm_start/recipe.py.
            new_words=False,  # First draw new embeddings for the added words.
            read_layers=0,  # Train only this many first layers, to read symbols.
            turns=0,  # Most turns of an episode; 0: those of the limits.
            noise=placeholder(float),  # Of the demonstrator; None: its own section's.
            relabel=False,  # Imitate the best actions in place of those taken.
            midway=0,  # Most actions that are played before a room is shown.
            misread=0.0,  # Largest share of plans that take walls for floor.
            places_weight=1.0,  # Weight of the tokens that say where things are.
            walls_weight=0.0,  # Weight of reading the walls around places.
            regret_weight=0.0,  # Weight of the actions that a choice may lose.
            random_places=0.0,  # Share of batches with random places to read.
        )
    )
