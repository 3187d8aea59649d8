"""Which cores of a host the workers of a service get, and its gateway: the same live and simulated."""

from collections.abc import Iterable, Sequence

from twofold.instance import Role


def share_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Equal shares for so many workers; with more workers than cores they take turns.

    Dealt out there and back again: routers prefer the first among equals, and those who come first, prefill before
    decode, should be the last to get company on their core.
    """
    each = len(cores) // workers
    if each:
        return [tuple(cores[i * each : (i + 1) * each]) for i in range(workers)]
    there_and_back = [*cores, *reversed(cores)]
    return [(there_and_back[i % len(there_and_back)],) for i in range(workers)]


def gateway_cores(cores: Iterable[int], workers: Iterable[tuple[Role, Sequence[int]]]) -> tuple[int, ...]:
    """Cores for the gateway: those that no decoding worker is pinned to, if there are any, else all.

    Where the cores do not suffice for everybody it is prefill that shares: a few milliseconds taken from a
    prompt are lost in its length, while the same taken from a decode step show as a gap in every stream.
    """
    everywhere = set(cores)
    decoding = {core for role, own in workers if role.decodes for core in own}
    return tuple(sorted(everywhere - decoding or everywhere))
