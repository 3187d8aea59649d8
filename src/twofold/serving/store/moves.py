"""What a store does on its disk, one thing after the other."""

from typing import NamedTuple


class Write(NamedTuple):
    """Write what is in this slot of the memory, block `position` of its prompt, unless it is on the disk already.

    `spare`: as below.
    """

    key: bytes
    position: int
    slot: int
    checksum: int
    spare: bool


class Read(NamedTuple):
    """Read a block into this slot of the memory."""

    key: bytes
    slot: int


class Spare(NamedTuple):
    """The memory has this block too: on the disk it may stay as long as its room is not needed for another."""

    key: bytes


class Forget(NamedTuple):
    """A block is wanted no more."""

    key: bytes


Move = Write | Read | Spare | Forget
