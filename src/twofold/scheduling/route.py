"""Where a request runs."""

from twofold.handoff import HandoffMode
from twofold.instance import Role


class Move:
    """An instance is to go to the pool of `role`."""

    __slots__ = ("instance", "role")

    def __init__(self, instance: str, role: Role) -> None:
        self.instance = instance
        self.role = role

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Move) and self.instance == other.instance and self.role is other.role

    def __hash__(self) -> int:
        return hash((self.instance, self.role))

    def __repr__(self) -> str:
        return f"Move({self.instance!r}, {self.role!r})"


class Route:
    """Instance ids; equal ones mean that the request is not handed off. `moves` are made first."""

    __slots__ = ("decode", "moves", "prefill")

    def __init__(self, prefill: str, decode: str, moves: tuple[Move, ...] = ()) -> None:
        self.prefill = prefill
        self.decode = decode
        self.moves = moves

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Route)
            and (self.prefill, self.decode) == (other.prefill, other.decode)
            and self.moves == other.moves
        )

    def __hash__(self) -> int:
        return hash((self.prefill, self.decode, self.moves))

    def __repr__(self) -> str:
        return f"Route({self.prefill!r}, {self.decode!r}, {self.moves!r})"


class Placement:
    """Where a request runs and, if it is split, how its KV cache travels."""

    __slots__ = ("mode", "route")

    def __init__(self, route: Route, mode: HandoffMode | None) -> None:
        self.route = route
        self.mode = mode
