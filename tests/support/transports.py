"""Pytest marks for transports that need optional packages."""

import importlib
import importlib.util

import pytest

from twofold.transport.registry import TRANSPORTS


def _loads(module):
    """Return whether a Python package and the system libraries that it needs are installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


HAS_NIXL = any(importlib.util.find_spec(name) for name in TRANSPORTS["nixl"].packages)
NIXL = pytest.mark.skipif(not HAS_NIXL, reason="the nixl extra is not installed")
MOONCAKE = pytest.mark.skipif(
    not _loads("mooncake.engine"), reason="the mooncake extra or its system libraries are not installed"
)
