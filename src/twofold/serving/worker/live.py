"""The tokens of a request that is alive on a worker."""

from dataclasses import dataclass, field

from twofold.request import BlockKey, SamplingParams


@dataclass(slots=True, eq=False)
class LiveSequence:
    """Known token ids of a request from position `offset` on, and how to sample the next.

    An instance that decodes what another prefilled never sees the prompt: its `offset` is the prompt's length.
    `generated` counts the output tokens known here, `prefix_blocks` are the keys of the prompt's full blocks,
    which only those find that have the same `cache_salt`.
    """

    sampling: SamplingParams
    offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    generated: int = 0
    prefix_blocks: tuple[BlockKey, ...] = ()
    cache_salt: str = ""

    def append(self, token_id: int) -> None:
        """The next output token."""
        self.token_ids.append(token_id)
        self.generated += 1

    def slice(self, start: int, count: int) -> list[int]:
        """The tokens at positions `start` … `start + count − 1`."""
        return self.token_ids[start - self.offset : start - self.offset + count]

    def ends_with(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """Whether this sampled token ends the output."""
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        return is_eos or token_id in self.sampling.stop_token_ids
