"""The coefficients by which `power.py` estimates watts. Not compiled, as all structs of msgspec."""

from functools import cache

import msgspec

from twofold.performance.data_files import data_bytes


class PowerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of an accelerator's TDP, fitted by bench/splitwise/fit_power.py.

    Decode of one sequence draws `decode + memory · (share of memory bandwidth in use)`, each further one
    `sequence` more; prefill draws TDP from `saturation_tokens` on.
    """

    decode: float
    memory: float
    sequence: float
    saturation_tokens: int
    decode_error: float
    prefill_error: float
    source: str
    date: str


@cache
def power_law() -> PowerLaw:
    """The law that comes with the package."""
    return msgspec.toml.decode(data_bytes("power.toml"), type=PowerLaw)
