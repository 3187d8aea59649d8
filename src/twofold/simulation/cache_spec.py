"""What a cluster's description says of the memory that its machines keep KV of prompts in, to reuse it."""

import re
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.kvcache.eviction import create_eviction

_ROOM = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>tokens|[KMGT]?i?B)", re.IGNORECASE)
_POWERS: Final = "KMGT"


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The prefix cache of each machine whose instances prefill: a tier in its memory and, if there is `disk`, another.

    Room is a number of tokens, as in `3000000 tokens`, or of bytes, as in `128GiB`. `eviction` says which block goes
    first. `dram_bytes_per_s` is how quickly an instance gets KV from the memory of its machine, what PCIe 4.0 gives
    each of its accelerators if None; `disk_bytes_per_s` from its disk, what one NVMe drive may give if None.
    Raises ConfigurationError for what cannot be.
    """

    dram: str
    disk: str | None = None
    eviction: str = "lru"
    dram_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        create_eviction(self.eviction)
        for text in (self.dram, self.disk):
            if text is not None:
                room_tokens(text, 1)
        for field in ("dram_bytes_per_s", "disk_bytes_per_s"):
            speed = getattr(self, field)
            if speed is not None and not 1.0 <= speed < float("inf"):
                raise ConfigurationError(f"{field} {speed} moves nothing: give at least 1")

    @property
    def rooms(self) -> tuple[tuple[str, str], ...]:
        """Every tier that there is and its room, the fastest first."""
        return (("dram", self.dram),) if self.disk is None else (("dram", self.dram), ("disk", self.disk))


def room_tokens(text: str, kv_bytes_per_token: int) -> int:
    """Tokens that there is room for; raises ConfigurationError where `text` says neither tokens nor bytes."""
    found = _ROOM.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(
            f"{text!r} is no room for a prefix cache: write 3000000 tokens, or bytes as in 128GiB"
        )
    number, unit = float(found["number"]), found["unit"].lower()
    if unit == "tokens":
        return int(number)
    power = _POWERS.find(unit[0].upper()) + 1
    return int(number * (1024.0 if "i" in unit else 1000.0) ** power) // kv_bytes_per_token


def parse_cache(text: str) -> CacheSpec:
    """The cache of a line such as `128GiB` or `dram=3000000 tokens,disk=2TB,eviction=lfu`."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        field = name.strip() if given else "dram"
        if field in fields or field not in CacheSpec.__struct_fields__:
            known = ", ".join(CacheSpec.__struct_fields__)
            raise ConfigurationError(f"{part.strip()!r} is not understood: give each of {known} at most once")
        fields[field] = (value if given else name).strip()
    try:
        return msgspec.convert(fields, CacheSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{text!r} is no prefix cache: {error}") from error
