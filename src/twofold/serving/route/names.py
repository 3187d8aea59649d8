"""What the blocks of prompts are called here, and in the events of vLLM's prefix caches: the same."""

import secrets

import msgspec

from twofold.kvcache.prefix import prefix_keys, tenant_salt
from twofold.request import Generation


class SharedNames:
    """Names the full blocks of prompts, of `block_tokens` tokens each; of none before that is known.

    vLLM keeps prompts apart by their `cache_salt` alone. So each API key has one, which follows from a secret of this
    start: a key finds what it has asked itself. Where no keys are asked for, the salt is the client's own, or none.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        self._secret = secrets.token_bytes(32)

    def name(self, generation: Generation) -> Generation:
        """The same with the keys of its prompt's blocks, and with the salt that the servers are to be given."""
        salt = self._salt(generation)
        blocks: tuple[bytes, ...] = ()
        if self.block_tokens:
            blocks = tuple(prefix_keys(generation.prompt_token_ids, self.block_tokens, salt.encode()))
        request = msgspec.structs.replace(generation.request, prefix_blocks=blocks)
        return msgspec.structs.replace(generation, request=request, cache_salt=salt)

    def _salt(self, generation: Generation) -> str:
        if not generation.key:
            return generation.cache_salt
        own = tenant_salt(generation.key, secret=self._secret)
        return tenant_salt(generation.cache_salt, secret=own).hex()
