"""Where the repository's files stand."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden"
LAUNCH = ROOT / "launch"
