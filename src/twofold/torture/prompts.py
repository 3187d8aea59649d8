"""Prompts of a fault suite: lengths around the edges of KV blocks, and common beginnings."""

from typing import Final

import msgspec
import numpy as np

from twofold.bench.prompts import PromptMaker
from twofold.errors import require
from twofold.request import Request

_EDGES: Final = (-1, 0, 1)  # tokens from the edge of a block


class TorturePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with its number, and the request that has its lengths."""

    number: int
    request: Request
    prompt: list[int] | str

    @property
    def tokens(self) -> int | None:
        """Length in tokens; None for a text, whose length only the server knows."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


def torture_prompts(maker: PromptMaker, count: int, longest: int, output_tokens: int) -> list[TorturePrompt]:
    """Return prompts of at most `longest` tokens, which end at the edge of a block, or one token beside it.

    Every other prompt begins with blocks that these prompts have in common. Raises ConfigurationError if no prompt
    reaches beyond a block.
    """
    block = maker.block_tokens
    require(longest > block, f"--max-prompt-tokens {longest} has no room for a block of {block} tokens and one more")
    draw = np.random.default_rng(maker.seed)
    prompts = []
    for number in range(count):
        blocks = int(draw.integers(1, (longest - 1) // block + 1))
        common = int(draw.integers(1, blocks + 1)) if number % 2 else 0
        request = Request(
            id=f"torture-{number}",
            arrival_s=0.0,
            prompt_tokens=max(1, blocks * block + _EDGES[number % len(_EDGES)]),
            output_tokens=output_tokens,
            prefix_blocks=tuple(range(common)),
        )
        prompts.append(TorturePrompt(number=number, request=request, prompt=maker.prompt(request)))
    return prompts
