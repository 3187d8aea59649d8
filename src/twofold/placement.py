"""Placements: the instances a router picked for a request and how its KV cache travels between them."""

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.request import Request


class RoleMove:
    """Moves an instance to the pool of `role`."""

    __slots__ = ("instance", "role")

    def __init__(self, instance: str, role: Role) -> None:
        self.instance = instance
        self.role = role

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoleMove) and self.instance == other.instance and self.role is other.role

    def __hash__(self) -> int:
        return hash((self.instance, self.role))

    def __repr__(self) -> str:
        return f"RoleMove({self.instance!r}, {self.role!r})"


class PrefixFetch:
    """Copies missing blocks among the first `blocks` of a prompt from the cache `source` to the prefill instance's."""

    __slots__ = ("blocks", "source")

    def __init__(self, source: str, blocks: int) -> None:
        self.source = source
        self.blocks = blocks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixFetch) and self.source == other.source and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash((self.source, self.blocks))

    def __repr__(self) -> str:
        return f"PrefixFetch({self.source!r}, {self.blocks})"


class Route:
    """The prefill and decode instance of a request; equal ids mean that there is no hand-off.

    `moves` are role changes to make first. `reused_tokens` is the number of prompt tokens expected in the prefix cache
    once `fetch` has completed. `ttft_s` is the predicted time to first token, if the router predicts it; it is ignored
    when routes are compared.
    """

    __slots__ = ("decode", "fetch", "moves", "prefill", "reused_tokens", "ttft_s")

    def __init__(
        self,
        prefill: str,
        decode: str,
        moves: tuple[RoleMove, ...] = (),
        reused_tokens: int = 0,
        fetch: PrefixFetch | None = None,
        ttft_s: float | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.moves = moves
        self.reused_tokens = reused_tokens
        self.fetch = fetch
        self.ttft_s = ttft_s

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Route)
            and (self.prefill, self.decode) == (other.prefill, other.decode)
            and self.moves == other.moves
            and self.reused_tokens == other.reused_tokens
            and self.fetch == other.fetch
        )

    def __hash__(self) -> int:
        return hash((self.prefill, self.decode, self.moves))

    def __repr__(self) -> str:
        reuse = f", {self.reused_tokens}, {self.fetch!r}" if self.reused_tokens or self.fetch else ""
        return f"Route({self.prefill!r}, {self.decode!r}, {self.moves!r}{reuse})"


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacedRequest:
    """A request with its route and, if it is split, its hand-off mode.

    `id` is the id under which the instances know the request. A live service places a request again when an instance is
    lost, under a new `id`; `request_id` stays that of the client's request.
    """

    __slots__ = ("id", "mode", "request", "request_id", "route")

    def __init__(self, request: Request, route: Route, mode: HandoffMode | None = None) -> None:
        self.id = request.id
        self.request_id = request.id
        self.request = request
        self.route = route
        self.mode = mode
