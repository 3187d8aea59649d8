"""CPU cores of a host for workers and gateway, live and simulated."""

from collections.abc import Iterable, Sequence

from twofold.instance import Role


def share_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Equal shares of the cores; with more workers than cores, workers share a core.

    Shared cores are assigned forwards and then backwards: routers prefer the first of equal instances, so the first
    workers, prefill before decode, should be the last to share their core.
    """
    each = len(cores) // workers
    if each:
        return [tuple(cores[i * each : (i + 1) * each]) for i in range(workers)]
    there_and_back = [*cores, *reversed(cores)]
    return [(there_and_back[i % len(there_and_back)],) for i in range(workers)]


def gateway_cores(cores: Iterable[int], workers: Iterable[tuple[Role, Sequence[int]]]) -> tuple[int, ...]:
    """Cores for the gateway: those without a decode worker, or all cores if there are none.

    Prefill workers share their cores first: a few milliseconds are lost in the length of a prompt, but show as a gap
    in every stream of a decode worker.
    """
    everywhere = set(cores)
    decoding = {core for role, own in workers if role.decodes for core in own}
    return tuple(sorted(everywhere - decoding or everywhere))
