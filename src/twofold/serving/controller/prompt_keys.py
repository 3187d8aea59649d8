"""Block keys of prompts: chained hashes of full blocks, salted by tenant so that tenants share no cached blocks."""

import secrets

import msgspec

from twofold.kvcache.prefix import later_keys, root_key, tenant_salt
from twofold.request import BlockChain, Generation


class PromptKeys:
    """Computes the block keys of prompts, salted so that tenants (API keys) share no cached blocks.

    A KV store on disk can be reused after a restart only with the same `secret`, which is random by default.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secret or secrets.token_bytes(32)

    def name(self, generation: Generation) -> Generation:
        """Return a copy with the prompt's block keys; none for a prompt to score, which is computed whole."""
        salt = tenant_salt(generation.key, secret=self._secret)
        if generation.cache_salt or generation.request.adapter:
            salt = tenant_salt(generation.cache_salt, generation.request.adapter, salt)
        if generation.sampling.prompt_logprobs is not None:
            return msgspec.structs.replace(generation, cache_salt="")
        chain = BlockChain(root_key(salt), self._block_size)
        blocks = tuple(later_keys(chain, (), generation.prompt_token_ids))
        request = msgspec.structs.replace(generation.request, prefix_blocks=blocks)
        return msgspec.structs.replace(generation, request=request, chain=chain, cache_salt="")
