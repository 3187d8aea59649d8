"""Which instances have which blocks: what the Conductor asks for the longest prefix of a prompt."""

from collections.abc import Iterator, Sequence

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey

_MOST_LOST = 16  # instances whose bits may lie around before they are swept out
_BITS = [tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256)]  # set in each byte


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixIndex:
    """The blocks of each instance, as one set of bits per block: bit i stands for an instance.

    A question walks the chain of a prompt's keys only as far as some instance has all of it, with one operation on
    such a set per block, however many instances there are. An instance that is lost is masked out at once; what the
    index remembers of it is swept out later, so that the loss of a thousandth of a cluster does not cost a walk over
    all blocks.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._bits: dict[str, int] = {}  # the number of each instance's bit
        self._names: dict[int, str] = {}
        self._live = 0
        self._free: list[int] = []  # numbers that no block has a bit of
        self._lost = 0  # the bits of instances that are gone

    def __len__(self) -> int:
        """How many blocks are known, those of lost instances included until they are swept out."""
        return len(self._holders)

    @property
    def instances(self) -> tuple[str, ...]:
        """The instances that have stored something and were not lost since."""
        return tuple(self._bits)

    def stored(self, instance: str, keys: Sequence[BlockKey]) -> None:
        """An instance has these blocks from now on."""
        holders, bit = self._holders, 1 << self._number(instance)
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def removed(self, instance: str, keys: Sequence[BlockKey]) -> None:
        """An instance does not have these blocks any more."""
        number = self._bits.get(instance)
        if number is None:
            return
        holders, others = self._holders, ~(1 << number)
        for key in keys:
            left = holders.get(key, 0) & others
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def lost(self, instance: str) -> None:
        """An instance is gone with all that it had; under the same name it starts anew."""
        number = self._bits.pop(instance, None)
        if number is None:
            return
        del self._names[number]
        self._live &= ~(1 << number)
        self._lost |= 1 << number
        if self._lost.bit_count() > max(_MOST_LOST, len(self._bits)):
            self._sweep()

    def best(self, keys: Sequence[BlockKey]) -> tuple[int, list[str]]:
        """How many leading blocks of a prompt some instance has at most, and which instances have so many.

        (0, []) where nobody has the first.
        """
        holders, having, length = self._holders, self._live, 0
        for key in keys:
            left = having & holders.get(key, 0)
            if not left:
                break
            having = left
            length += 1
        return (length, self._named(having)) if length else (0, [])

    def prefixes(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """How many leading blocks of a prompt each instance has; those that have none are not in it."""
        holders, having, length = self._holders, self._live, 0
        found: dict[str, int] = {}
        if not having:
            return found
        for key in keys:
            left = having & holders.get(key, 0)
            if left != having:
                if length:
                    for name in self._named(having & ~left):
                        found[name] = length
                having = left
                if not having:
                    return found
            length += 1
        if length:
            for name in self._named(having):
                found[name] = length
        return found

    def prefix(self, instance: str, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a prompt one instance has."""
        number = self._bits.get(instance)
        if number is None:
            return 0
        holders, bit, length = self._holders, 1 << number, 0
        for key in keys:
            if not holders.get(key, 0) & bit:
                break
            length += 1
        return length

    def replicas(self, key: BlockKey) -> int:
        """How many instances have a block."""
        return (self._holders.get(key, 0) & self._live).bit_count()

    def most_replicated(self, count: int) -> list[tuple[BlockKey, int]]:
        """The blocks that most instances have, with how many: at most `count`, the most widespread first.

        Looks at every block: for reports, not for decisions.
        """
        live = self._live
        spread = [(key, (having & live).bit_count()) for key, having in self._holders.items()]
        spread.sort(key=lambda block: -block[1])
        return spread[:count]

    def _number(self, instance: str) -> int:
        number = self._bits.get(instance)
        if number is None:
            number = self._free.pop() if self._free else len(self._bits) + self._lost.bit_count()
            self._bits[instance] = number
            self._names[number] = instance
            self._live |= 1 << number
        return number

    def _named(self, bits: int) -> list[str]:
        """The instances of a set of bits."""
        return [self._names[number] for number in _numbers(bits)]

    def _sweep(self) -> None:
        live = self._live
        self._holders = {key: having & live for key, having in self._holders.items() if having & live}
        self._free += _numbers(self._lost)
        self._lost = 0


def _numbers(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, the lowest first."""
    for place, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) >> 3, "little")):
        for number in _BITS[byte]:
            yield 8 * place + number
