"""The figures that come with the package, read once."""

from functools import cache
from importlib.resources import files


@cache
def data_bytes(name: str) -> bytes:
    """The content of performance/data/NAME."""
    return files("twofold.performance").joinpath("data", name).read_bytes()
