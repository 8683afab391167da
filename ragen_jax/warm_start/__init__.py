"""Supervised warm starts: make the embedded models from nothing. For warm_start.py."""

# The stages of each embedded model, in order. A config's `model` chooses the row.
STAGES = {
    "tiny": (
        *("lake_boards", "lake_dialogues", "lake_aimed", "lake_mixed"),
        *("sokoban_boards", "sokoban_dialogues", "sokoban_aimed", "sokoban_mixed"),
        *("bandit_dialogues", "bandit_mixed"),
    ),
    "tiny_symbols": ("symbols_legend", "symbols_prompt", "symbols_dialogues"),
    "tiny_rooms": (
        *("rooms_boards", "rooms_frames"),
        *("rooms_dialogues", "rooms_places", "rooms_refined"),
        *("rooms_walls", "rooms_planned", "rooms_walked"),
        *("rooms_relabelled", "rooms_corrected"),
        *("two_boxes", "two_boxes_dialogues"),
    ),
    "tiny_words": ("search_pages", "shop_pages", "both_mixed"),
}
# Models that start from the weights of another one.
GROWN = ("tiny_symbols", "tiny_rooms")
