"""Which transports can be tested here."""

import importlib.util

import pytest

from twofold.transport.registry import TRANSPORTS

HAS_NIXL = any(importlib.util.find_spec(name) for name in TRANSPORTS["nixl"].packages)
NIXL = pytest.mark.skipif(not HAS_NIXL, reason="the nixl extra is not installed")
