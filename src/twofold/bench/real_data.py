"""Location of public traces, profiles and reference results, which are not in the repository (see `make data`)."""

import os
from pathlib import Path

_CHECKOUT = Path(__file__).parents[3]


def data_folder() -> Path:
    """Return the folder of public data: TWOFOLD_DATA, else `data` in the checkout, else `shared/data` next to it."""
    downloaded = _CHECKOUT / "data"
    usual = downloaded if downloaded.is_dir() else _CHECKOUT.parent / "shared" / "data"
    return Path(os.environ.get("TWOFOLD_DATA") or usual)


def find_data(relative: str) -> Path | None:
    """Return the path of a file in the data folder, or None if the file does not exist."""
    path = data_folder() / relative
    return path if path.is_file() else None
