"""Sizes as flags have them: a number with a unit, or one sentence."""

import pytest

from twofold.cli.options import parse_size
from twofold.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("2KiB", 2048), ("2k", 2000), ("1.5GiB", 3 * 2**29), ("500MB", 500_000_000)],
)
def test_sizes(text, size):
    """Binary and decimal units."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "GiB", "1X", "1e400"])
def test_sizes_that_are_none(text):
    """Said in one sentence."""
    with pytest.raises(ConfigurationError, match="not a size"):
        parse_size(text)
