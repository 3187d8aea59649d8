"""The router seam: which instance prefills a request, and which decodes it?"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.instance import InstanceLoad
from twofold.request import Request


class Route(msgspec.Struct, frozen=True):
    """Instance ids; equal ones mean that the request is not handed off."""

    prefill: str
    decode: str

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode


class Router(Protocol):
    """Picks a route for a request from what is known of the instances, which it must not change."""

    def route(self, request: Request, instances: Sequence[InstanceLoad], now: float) -> Route | None:
        """None when no instance can take one of the phases."""
        ...
