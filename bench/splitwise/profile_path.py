"""Paths of the Splitwise profile and of the data files derived from it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "twofold" / "performance" / "data"


def default_profile() -> Path:
    """Under TWOFOLD_DATA, else under shared/data beside the checkout."""
    configured = os.environ.get("TWOFOLD_DATA")
    root = Path(configured) if configured else ROOT.parent / "shared" / "data"
    return root / "profiles" / "splitwise-perf-model.csv"
