"""What a route asks for before the prefill: role changes of instances, and the fetch of a prefix."""

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
