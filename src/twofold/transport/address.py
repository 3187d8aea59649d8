"""What a transport writes into `MemoryDescriptor.address`, and reads from that of a peer."""

from typing import ClassVar, Self

import msgspec

from twofold.errors import ConfigurationError


class Address(msgspec.Struct, frozen=True):
    """Root of those that are more than a name; `transport` is what the command line calls theirs."""

    transport: ClassVar[str]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, address: str) -> Self:
        """Raises ConfigurationError for what another transport wrote."""
        try:
            return msgspec.json.decode(address, type=cls)
        except msgspec.MsgspecError as error:
            name = cls.transport
            raise ConfigurationError(
                f"a peer's address is not one of {name}'s: both need --transport {name}"
            ) from error
