"""The points that `splitwise_published` draws its lines through. Not compiled, as all structs of msgspec."""

from functools import cache

import msgspec

from twofold.performance.data_files import data_bytes


class Knots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The medians of one pair: seconds of prompt and token time at each number of batched tokens."""

    model: str
    accelerator: str
    tensor_parallel: int
    tokens: list[int]
    prompt_s: list[float]
    token_s: list[float]

    @property
    def pair(self) -> str:
        """For people: `bloom-176b on h100-80gb TP8`."""
        return f"{self.model} on {self.accelerator} TP{self.tensor_parallel}"


class KnotsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bench/splitwise/derive_knots.py writes."""

    source: str
    date: str
    knots: list[Knots]


@cache
def published_knots() -> KnotsFile:
    """Those that come with the package."""
    return msgspec.toml.decode(data_bytes("splitwise-published.toml"), type=KnotsFile)
