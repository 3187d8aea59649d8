"""Actions that a router can request before the prefill: role changes of instances, and the fetch of a prefix."""

import msgspec

from twofold.instance import Role


class RoleMove(msgspec.Struct, frozen=True):
    """Move of an instance to the pool of a role."""

    instance: str
    role: Role


class PrefixFetch(msgspec.Struct, frozen=True):
    """Fetch of the first `blocks` blocks of a prompt from the cache `source` to the prefill instance."""

    source: str
    blocks: int  # of these, only blocks that the instance lacks are fetched
