"""What the blocks of a prompt are called: the same by requests of one tenant, and by nobody else."""

import secrets
from typing import Protocol

import msgspec

from twofold.kvcache.prefix import prefix_keys, tenant_salt
from twofold.request import Generation


class BlockNaming(Protocol):
    """Who names the blocks of prompts."""

    def name(self, generation: Generation) -> Generation:
        """The same with the keys of its prompt's blocks."""
        ...


class PromptKeys:
    """Names the full blocks, of `block_size` tokens, of the prompts of one service.

    A tenant is an API key, by its name; where none are asked for all requests are one tenant's. The keys of each
    begin with a salt that follows from a `secret`, of this start or kept with what is stored on a disk: a tenant finds
    only what it has stored itself, and who sees keys cannot tell which prompts they are of, because they cannot be
    computed without the secret. A tenant that serves several users may keep them apart with salts of its own.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secret or secrets.token_bytes(32)
        self._salts: dict[str, bytes] = {}

    def name(self, generation: Generation) -> Generation:
        """The same with the keys of its prompt's blocks, and without the client's salt, which is in them."""
        salt = self._salt(generation.key)
        if generation.cache_salt:
            salt = tenant_salt(generation.cache_salt, secret=salt)
        blocks = prefix_keys(generation.prompt_token_ids, self._block_size, salt)
        request = msgspec.structs.replace(generation.request, prefix_blocks=tuple(blocks))
        return msgspec.structs.replace(generation, request=request, cache_salt="")

    def _salt(self, tenant: str) -> bytes:
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(tenant, secret=self._secret)
        return salt
