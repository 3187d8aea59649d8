"""How much there is on an instance, apart from the instance: what reports carry, and what sums are made of."""

from twofold.instance import InstanceLoad


class Amounts:
    """The numbers of an `InstanceLoad`, as they were at one moment."""

    __slots__ = ("decodes", "pending_prefill_tokens", "prefills", "requests", "reserved_tokens")

    def __init__(
        self,
        pending_prefill_tokens: int = 0,
        reserved_tokens: int = 0,
        prefills: int = 0,
        decodes: int = 0,
        requests: int = 0,
    ) -> None:
        self.pending_prefill_tokens = pending_prefill_tokens
        self.reserved_tokens = reserved_tokens
        self.prefills = prefills
        self.decodes = decodes
        self.requests = requests

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Amounts)
            and self.pending_prefill_tokens == other.pending_prefill_tokens
            and self.reserved_tokens == other.reserved_tokens
            and (self.prefills, self.decodes) == (other.prefills, other.decodes)
            and self.requests == other.requests
        )

    def __hash__(self) -> int:
        return hash((self.pending_prefill_tokens, self.reserved_tokens, self.requests))

    def __repr__(self) -> str:
        return (
            f"Amounts({self.pending_prefill_tokens}, {self.reserved_tokens}, {self.prefills}, {self.decodes}, "
            f"{self.requests})"
        )

    def less(self, other: "Amounts") -> "Amounts":
        """The difference of each number."""
        return Amounts(
            self.pending_prefill_tokens - other.pending_prefill_tokens,
            self.reserved_tokens - other.reserved_tokens,
            self.prefills - other.prefills,
            self.decodes - other.decodes,
            self.requests - other.requests,
        )


NONE = Amounts()


def amounts_of(load: InstanceLoad) -> Amounts:
    """What there is on an instance now."""
    return Amounts(
        load.pending_prefill_tokens, load.reserved_tokens, load.prefills, load.decodes, load.requests
    )


def exchange(load: InstanceLoad, old: Amounts, new: Amounts) -> None:
    """Count `new` on an instance in the place of `old`, which is part of what is counted there."""
    load.pending_prefill_tokens += new.pending_prefill_tokens - old.pending_prefill_tokens
    load.reserved_tokens += new.reserved_tokens - old.reserved_tokens
    load.prefills += new.prefills - old.prefills
    load.decodes += new.decodes - old.decodes
    load.requests += new.requests - old.requests
