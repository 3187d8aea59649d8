"""Public traces, profiles and reference results, which are not part of the project (`make data` downloads some)."""

import os
from pathlib import Path

_CHECKOUT = Path(__file__).parents[3]


def data_folder() -> Path:
    """TWOFOLD_DATA, else `data` in the checkout if it exists, else `shared/data` beside it."""
    configured = os.environ.get("TWOFOLD_DATA")
    if configured:
        return Path(configured)
    downloaded = _CHECKOUT / "data"
    return downloaded if downloaded.is_dir() else _CHECKOUT.parent / "shared" / "data"


def find_data(relative: str) -> Path | None:
    """Path of a data file; None where it is absent."""
    path = data_folder() / relative
    return path if path.is_file() else None
