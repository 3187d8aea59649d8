"""Index from each cached block to the instances that cache this block, for prefix-aware routing."""

from collections.abc import Iterator, Sequence

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey

_MAX_LOST = 16  # lost instances that may have bits in the index before a sweep
_BITS = [tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256)]  # set bits of each byte


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixIndex:
    """Index that maps each cached block to the instances that cache it."""

    def __init__(self) -> None:
        # Bitmaps of instances, so that a lookup needs one bit operation per block for all instances.
        self._holders: dict[BlockKey, int] = {}
        self._bits: dict[str, int] = {}  # bit number of each instance
        self._names: dict[int, str] = {}
        self._live = 0
        self._free: list[int] = []  # bit numbers that no block uses
        self._lost = 0  # bits of lost instances

    def __len__(self) -> int:
        """Number of indexed blocks."""
        return len(self._holders)  # with the blocks of lost instances until the next sweep

    def stored(self, instance: str, keys: Sequence[BlockKey]) -> None:
        """Record that an instance has stored the blocks `keys`."""
        holders, bit = self._holders, 1 << self._number(instance)
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def removed(self, instance: str, keys: Sequence[BlockKey]) -> None:
        """Record that an instance has removed the blocks `keys`."""
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
        """Forget an instance and all its blocks."""
        number = self._bits.pop(instance, None)
        if number is None:
            return
        del self._names[number]
        self._live &= ~(1 << number)  # lookups ignore the instance at once; a sweep clears its bits
        self._lost |= 1 << number
        if self._lost.bit_count() > max(_MAX_LOST, len(self._bits)):
            self._sweep()

    def prefixes(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Map each instance to the number of leading blocks of the prompt that it caches."""
        holders, having, length = self._holders, self._live, 0
        found: dict[str, int] = {}  # without instances that cache no block
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
        """Return the number of leading blocks of a prompt that are cached on one instance."""
        number = self._bits.get(instance)
        if number is None:
            return 0
        holders, bit, length = self._holders, 1 << number, 0
        for key in keys:
            if not holders.get(key, 0) & bit:
                break
            length += 1
        return length

    def _number(self, instance: str) -> int:
        number = self._bits.get(instance)
        if number is None:
            number = self._free.pop() if self._free else len(self._bits) + self._lost.bit_count()
            self._bits[instance] = number
            self._names[number] = instance
            self._live |= 1 << number
        return number

    def _named(self, bits: int) -> list[str]:
        """Return the names of the instances in the bitmap `bits`."""
        return [self._names[number] for number in _numbers(bits)]

    def _sweep(self) -> None:
        live = self._live
        self._holders = {key: having & live for key, having in self._holders.items() if having & live}
        self._free += _numbers(self._lost)
        self._lost = 0


def _numbers(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits of `bits` in ascending order."""
    for place, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) >> 3, "little")):
        for number in _BITS[byte]:
            yield 8 * place + number
