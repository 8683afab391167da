"""Names of a workdir's files that others read than the module that writes them.

Here since a study or a report need not load what trains. `checkpoint_files.FOLDER`,
`metrics.FILE`, `episode_log.FILE` and `rollbacks.FILE` are where these are read.
"""

SETTINGS = "settings.json"  # written by training/workdir.py
TEST = "test.json"  # written by training/final_test.py
# What a run writes and reads again, or shows: no other command may replace it.
KEPT = (
    SETTINGS,
    TEST,
    "checkpoints",
    "curves.png",
    "episodes.jsonl.gz",
    "metrics.jsonl",
    "profile",
    "programs",
    "rollbacks.json",
    "tensorboard",
)
