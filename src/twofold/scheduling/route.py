"""Where a request runs. Not compiled, as all structs of msgspec: it would lose what makes them one."""

import msgspec

from twofold.handoff import HandoffMode
from twofold.instance import Role


class Move(msgspec.Struct, frozen=True):
    """An instance is to go to the pool of `role`."""

    instance: str
    role: Role


class Route(msgspec.Struct, frozen=True):
    """Instance ids; equal ones mean that the request is not handed off. `moves` are made first."""

    prefill: str
    decode: str
    moves: tuple[Move, ...] = ()

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode


class Placement(msgspec.Struct, frozen=True):
    """Where a request runs and, if it is split, how its KV cache travels."""

    route: Route
    mode: HandoffMode | None
