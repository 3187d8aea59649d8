"""Which cores of a host the workers of a service get, and its gateway: the same live and simulated."""

from collections.abc import Iterable, Sequence

from twofold.instance import Role


def share_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Equal shares for so many workers; with more workers than cores they take turns."""
    each = max(1, len(cores) // workers)
    return [tuple(cores[(i * each + k) % len(cores)] for k in range(each)) for i in range(workers)]


def gateway_cores(cores: Iterable[int], workers: Iterable[tuple[Role, Sequence[int]]]) -> tuple[int, ...]:
    """Cores for the gateway: those that no decoding worker is pinned to, if there are any, else all.

    Where the cores do not suffice for everybody it is prefill that shares: a few milliseconds taken from a
    prompt are lost in its length, while the same taken from a decode step show as a gap in every stream.
    """
    everywhere = set(cores)
    decoding = {core for role, own in workers if role.decodes for core in own}
    return tuple(sorted(everywhere - decoding or everywhere))
