"""Real traces and reference results, which are not part of the project and may be absent."""

import os
from pathlib import Path


def data_dir() -> Path | None:
    """TWOFOLD_DATA, else `shared/data` beside the checkout; None where there is no such directory."""
    configured = os.environ.get("TWOFOLD_DATA")
    path = Path(configured) if configured else Path(__file__).parents[4] / "shared" / "data"
    return path if path.is_dir() else None


def find_data(relative: str) -> Path | None:
    """A file of the data directory, or None where it is absent."""
    root = data_dir()
    path = root / relative if root is not None else None
    return path if path is not None and path.is_file() else None
