r"""The supervised start of the embedded `tiny` model, from nothing.

  python launch/warm_start.py --config=configs/warm_start.py --out=my_tiny

Trains the tokenizer, then the model, on demonstrated episodes of training levels of
FrozenLake, Sokoban and Bandit (of Bandit with the names of all levels). The result is
a Hugging Face folder. Takes above an hour on two CPU cores; docs/tiny_model.md says how
the shipped file was made and what it scores. One variant:

  python launch/warm_start.py --config=configs/warm_start.py:solver --start=tiny \
      --first_stage=sokoban_boards --last_stage=sokoban_dialogues --out=my_solver

continues from the embedded model with what a solver does in rooms of Sokoban, and
forgets the other environments. Another,

  python launch/warm_start.py --config=configs/warm_start.py:symbols --start=my_solver \
      --out=my_tiny_symbols

adds three layers, which learn to read rooms in whatever symbols the prompt explains.
The variant "rooms" adds seven to learn rooms of any size up to 9, and two boxes.
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
    _environments(config)
    _lake_stages(config)
    _sokoban_stages(config)
    _bandit_stages(config)
    if variant in ("solver", "symbols", "rooms"):
        _solver_stages(config)
    if variant == "symbols":
        _symbols_stages(config)
    if variant == "rooms":
        _rooms_stages(config)
    if variant == "smoke":
        for section in config.values():
            if isinstance(section, ConfigDict) and "steps" in section:
                section.steps = 4
    config.optimizer = dict(warmup=100, beta2=0.98, weight_decay=0.01, clip_norm=1.0)
    config.log_every = 1 if variant == "smoke" else 25
    return config


def _environments(config: ConfigDict) -> None:
    """The environments, their limits, and how imperfect the demonstrations are.

    A `demonstrator` has the fields of Demonstrator in
    ragen_jax/envs/*/demonstrations.py, some of which each stage overrides. `context` is
    the most tokens of a dialogue, `short_context` that without the system prompt; the
    longest seen fit into them.
    """
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


def _lake_stages(config: ConfigDict) -> None:
    """Four stages for FrozenLake.

    boards      short rows without the system prompt, which are cheap, and without
                random plans, until the model reads boards and walks to the goal
    dialogues   whole dialogues in every variant, with the share of random plans that
                the result is to have
    aimed       fewer random plans, until the model never misreads the goal
    mixed       again the share of "dialogues"
    """
    config.lake_boards = _stage(
        "lake", _short(rows=64, context=128), steps=700, lr=3e-3, draws=1
    )
    dialogues = _whole(rows=24, context=640)
    # Drawn like the boards, so its plain rows are again theirs of as many steps: kept
    # because the model in the package was made so.
    config.lake_dialogues = _stage(
        "lakes", dialogues, steps=300, lr=1.5e-3, draws=1, random_plan=0.65
    )
    config.lake_aimed = _stage(
        "lakes", dialogues, steps=170, lr=1e-3, draws=2, random_plan=0.2
    )
    config.lake_mixed = _stage(
        "lakes", dialogues, steps=80, lr=5e-4, draws=3, random_plan=0.65
    )


def _sokoban_stages(config: ConfigDict) -> None:
    """The same four stages for Sokoban, with the lakes kept in."""
    config.sokoban_boards = _stage(
        "sokoban_and_lake", _short(rows=48, context=176), steps=700, lr=2e-3, draws=4
    )
    dialogues = _whole(rows=16, context=704)
    config.sokoban_dialogues = _stage(
        "lakes_and_sokoban", dialogues, steps=400, lr=1e-3, draws=5, random_plan=0.65
    )
    config.sokoban_aimed = _stage(
        "mostly_sokoban", dialogues, steps=340, lr=1e-3, draws=6, random_plan=0.2
    )
    config.sokoban_mixed = _stage(
        "lakes_and_sokoban", dialogues, steps=80, lr=5e-4, draws=7, random_plan=0.65
    )


def _bandit_stages(config: ConfigDict) -> None:
    """Two stages for Bandit, with the other environments kept in."""
    config.bandit_dialogues = _stage(
        "bandit_and_others",
        _short(rows=48, context=176),
        steps=240,
        lr=2e-3,
        draws=8,
        random_plan=0.2,
        new_words=True,
    )
    config.bandit_mixed = _stage(
        "all",
        _whole(rows=16, context=704),
        steps=170,
        lr=1e-3,
        draws=9,
        random_plan=0.65,
    )


def _solver_stages(config: ConfigDict) -> None:
    """Two stages of what a solver does in Sokoban, in place of those above."""
    config.sokoban.demonstrator.update(ignore_target=0.0, noise=0.05)
    config.sokoban_boards = _stage(
        "sokoban", _short(rows=48, context=176), steps=1100, lr=2e-3, draws=21
    )
    config.sokoban_dialogues = _stage(
        "sokoban", _whole(rows=16, context=704), steps=240, lr=7e-4, draws=22
    )


def _symbols_stages(config: ConfigDict) -> None:
    """The stages of `tiny_symbols`.

    New first layers learn to translate each cell's symbol into its meaning: on short
    rows that begin with a sentence about the symbols, then with the whole system
    prompt. At last the whole model imitates the solver again.
    """
    config.model = "tiny_symbols"
    kinds = "sokoban_in_any_symbols"
    config.symbols_legend = _stage(
        kinds,
        _short(rows=64, context=88),
        steps=1800,
        lr=3e-3,
        draws=31,
        read_layers=3,
    )
    config.symbols_prompt = _stage(
        kinds,
        _whole(rows=32, context=320),
        steps=600,
        lr=2e-3,
        draws=32,
        read_layers=3,
    )
    config.symbols_dialogues = _stage(
        kinds, _whole(rows=16, context=704), steps=45, lr=2e-4, draws=33
    )


def _rooms_stages(config: ConfigDict) -> None:
    """The stages of `tiny_rooms`: one box first, then two."""
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
    dialogues = _whole(rows=12, context=1152)
    _read_rooms(config, dialogues)
    _read_walls(config, dialogues)
    _correct_actions(config, dialogues)
    _plan_two_boxes(config, dialogues)


def _read_rooms(config: ConfigDict, dialogues: dict) -> None:
    """Reading rooms of any size.

    boards      rooms of 6, 7 and 9 rows with one box or two, on short rows without the
                system prompt
    frames      such rooms somewhere within larger drawings, so that the model has
                to count rows and columns
    dialogues   the same in whole dialogues
    places,     the same with more weight on the places that a reply names
    refined
    """
    config.rooms_boards = _stage(
        "rooms", _short(rows=48, context=192, turns=2), steps=1500, lr=2e-3, draws=41
    )
    config.rooms_frames = _stage(
        "rooms_in_frames",
        _short(rows=32, context=240, turns=2),
        steps=1400,
        lr=1.5e-3,
        draws=43,
    )
    kinds = "rooms_in_named_frames"
    config.rooms_dialogues = _stage(kinds, dialogues, steps=300, lr=6e-4, draws=42)
    config.rooms_places = _stage(
        kinds, dialogues, steps=450, lr=8e-4, draws=44, places_weight=5.0
    )
    config.rooms_refined = _stage(
        kinds, dialogues, steps=450, lr=4e-4, draws=45, places_weight=5.0
    )


def _read_walls(config: ConfigDict, dialogues: dict) -> None:
    """Reading walls while planning.

    walls             extra heads read the walls and boxes around places, most of which
                      are random, on short rows
    planned, walked   the same while planning, which is unlearned meanwhile: on short
                      rows, then in dialogues
    """
    short_rows = _short(rows=16, context=240, turns=2)
    config.rooms_walls = _stage(
        "rooms_in_frames",
        short_rows,
        steps=3000,
        lr=1.5e-3,
        draws=46,
        noise=0.3,
        walls_weight=1.0,
        random_places=0.75,
    )
    config.rooms_planned = _stage(
        "rooms_in_frames",
        short_rows,
        steps=1500,
        lr=1.2e-3,
        draws=48,
        walls_weight=0.3,
        random_places=0.1,
    )
    config.rooms_walked = _stage(
        "rooms_in_named_frames",
        dialogues,
        steps=600,
        lr=8e-4,
        draws=47,
        noise=0.1,
        places_weight=3.0,
        walls_weight=0.6,
    )


def _correct_actions(config: ConfigDict, dialogues: dict) -> None:
    """A share of the actions is random, and the best ones are imitated in their place:
    on short rows ("relabelled"), then in dialogues ("corrected")."""
    config.rooms_relabelled = _stage(
        "rooms_in_frames",
        _short(rows=32, context=200, turns=1),
        steps=450,
        lr=8e-4,
        draws=61,
        relabel=True,
        noise=0.25,
        midway=10,
        walls_weight=0.2,
        random_places=0.05,
    )
    config.rooms_corrected = _stage(
        "rooms_in_named_frames",
        dialogues,
        steps=100,
        lr=5e-4,
        draws=71,
        relabel=True,
        noise=0.2,
        places_weight=3.0,
        walls_weight=0.2,
    )


def _plan_two_boxes(config: ConfigDict, dialogues: dict) -> None:
    """Mostly two boxes, on short rows, then in dialogues; the loss also counts the
    actions that the model's choices are expected to lose."""
    config.two_boxes = _stage(
        "two_boxes_in_frames",
        _short(rows=32, context=200, turns=1),
        steps=700,
        lr=7e-4,
        draws=81,
        relabel=True,
        noise=0.25,
        midway=10,
        places_weight=3.0,
        walls_weight=0.2,
        regret_weight=1.0,
        random_places=0.05,
    )
    config.two_boxes_dialogues = _stage(
        "two_boxes_in_named_frames",
        dialogues,
        steps=400,
        lr=6e-4,
        draws=91,
        relabel=True,
        noise=0.2,
        misread=0.9,
        places_weight=5.0,
        walls_weight=0.2,
        regret_weight=1.0,
    )


def _whole(rows: int, context: int) -> dict:
    """Whole dialogues: so many rows a step, of at most `context` tokens."""
    return dict(rows=rows, context=context)


def _short(rows: int, context: int, turns: int = 0) -> dict:
    """Rows without the system prompt, of at most so many turns; 0: all."""
    return dict(rows=rows, context=context, turns=turns, short=True)


def _stage(
    kinds: str, form: dict, *, steps: int, lr: float, draws: int, **others
) -> ConfigDict:
    """A stage of supervised training, as ragen_jax/warm_start/stages.py reads it.

    `form` is that of the rows, from `_whole` or `_short`; `others` are values that
    differ from those below.
    """
    stage = ConfigDict(
        dict(
            kinds=kinds,  # A key of KINDS in ragen_jax/warm_start/recipe.py.
            steps=steps,  # Optimizer steps.
            lr=lr,
            draws=draws,  # Seed of the demonstrations.
            rows=0,  # Rows of a step.
            context=0,  # Most tokens of a row.
            short=False,  # Leave the system prompt out.
            turns=0,  # Most turns of an episode; 0: those of the limits.
            random_plan=0.0,  # Share of demonstrated plans that are random.
            noise=placeholder(float),  # Of the demonstrator; None: its own section's.
            midway=0,  # Most actions that are played before a room is shown.
            misread=0.0,  # Largest share of plans that take walls for floor.
            new_words=False,  # First draw new embeddings for the added words.
            read_layers=0,  # Train only this many first layers, to read symbols.
            relabel=False,  # Imitate the best actions in place of those taken.
            places_weight=1.0,  # Weight of the tokens that say where things are.
            walls_weight=0.0,  # Weight of reading the walls around places.
            regret_weight=0.0,  # Weight of the actions that a choice may lose.
            random_places=0.0,  # Share of batches with random places to read.
        )
    )
    stage.lock().update(form, **others)  # Locked: a misspelled key is refused.
    return stage.unlock()
