"""Real traces and reference results, which are not part of the project and may be absent."""

import os
from pathlib import Path


def find_data(relative: str) -> Path | None:
    """A file under TWOFOLD_DATA, else under `shared/data` beside the checkout; None where it is absent."""
    configured = os.environ.get("TWOFOLD_DATA")
    root = Path(configured) if configured else Path(__file__).parents[4] / "shared" / "data"
    path = root / relative
    return path if path.is_file() else None
