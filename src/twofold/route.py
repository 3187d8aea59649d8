"""Routes: the instances that run a request, and the role changes and prefix fetch that precede its prefill."""

import msgspec

from twofold.instance import Role


class RoleMove(msgspec.Struct, frozen=True):
    """A move of an instance to the pool of `role`."""

    instance: str
    role: Role


class PrefixFetch(msgspec.Struct, frozen=True):
    """Fetch of a prompt's first `blocks` blocks from cache `source`, except blocks already on the prefill instance."""

    source: str
    blocks: int


class Route(msgspec.Struct, frozen=True):
    """The prefill and decode instance of a request; equal ids mean that there is no hand-off.

    `moves` are role changes to make first. `reused_tokens` is the number of prompt tokens expected in the prefix cache
    once `fetch` has completed. `ttft_s` is the predicted time to first token, if the router predicts it.
    """

    prefill: str
    decode: str
    moves: tuple[RoleMove, ...] = ()
    reused_tokens: int = 0
    fetch: PrefixFetch | None = None
    ttft_s: float | None = None

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode
