"""Block keys of prompts. Only the requests of one tenant share block keys."""

import secrets

import msgspec

from twofold.kvcache.prefix import prefix_keys, tenant_salt
from twofold.request import Generation


class PromptKeys:
    """Assigns block keys to the full blocks, of `block_size` tokens, of prompts.

    A tenant is the name of an API key; in a service without API keys, all requests belong to one tenant. Block keys are
    salted by tenant and `secret`, so tenants share no blocks, and a block key does not reveal its prompt. The secret is
    new at each start, or kept beside the blocks stored on disk. A tenant may separate its users by cache salts of its
    own.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secret or secrets.token_bytes(32)
        self._salts: dict[str, bytes] = {}

    def name(self, generation: Generation) -> Generation:
        """Return the generation with the block keys of its prompt. The client's cache salt becomes part of the keys."""
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
