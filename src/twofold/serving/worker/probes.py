"""How fast this worker prefills, and what its links carry: measured once, as they are when the service starts.

The prober thread of a worker: measures the link to each peer once in the peer's life.
"""

import statistics
import threading
import time
from collections.abc import Callable

from twofold.engine.base import Engine, SequenceStep
from twofold.errors import TwofoldError
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.serving.messages import LinkMeasured
from twofold.serving.worker.state import WorkerState
from twofold.transport.base import SCRATCH_BYTES, Connection

SHORT_TOKENS, LONG_TOKENS = 32, 512
ENOUGH_S = 0.25  # a prefill, or a transfer, that takes this long tells enough
FEW_BYTES, FEW_TIMES = 16 << 10, 9
MANY_BYTES, MANY_TIMES = 256 << 10, 3

Clock = Callable[[], float]


def prefill_speed(engine: Engine, most_tokens: int, clock: Clock = time.perf_counter) -> PrefillSpeed:
    """From a short and a longer prompt, into blocks that nobody has yet. The first run warms the engine up."""
    short = max(1, min(SHORT_TOKENS, most_tokens // 2))
    _prefill_s(engine, short, clock)
    short_s = min(_prefill_s(engine, short, clock) for _ in range(2))
    tokens, taken_s = short, short_s
    while tokens < min(LONG_TOKENS, most_tokens) and taken_s < ENOUGH_S:
        tokens = min(4 * tokens, LONG_TOKENS, most_tokens)
        taken_s = _prefill_s(engine, tokens, clock)
    if taken_s < ENOUGH_S:
        taken_s = min(taken_s, _prefill_s(engine, tokens, clock))
    if tokens == short:
        return PrefillSpeed(fixed_s=0.0, s_per_token=short_s / short)
    s_per_token = max(taken_s - short_s, 0.0) / (tokens - short)
    return PrefillSpeed(fixed_s=max(0.0, short_s - short * s_per_token), s_per_token=s_per_token)


def _prefill_s(engine: Engine, tokens: int, clock: Clock) -> float:
    blocks = range(-(-tokens // engine.layout.block_size))
    step = SequenceStep("", [0] * tokens, start=0, block_table=tuple(blocks), sampling=None)
    began = clock()
    engine.run([step])
    return clock() - began


def link_speed(connection: Connection, clock: Clock = time.perf_counter) -> LinkSpeed:
    """From small transfers, and from larger ones that grow until one takes long enough, or is the largest there is."""
    _probe_s(connection, FEW_BYTES, clock)  # memory is slow when it is touched for the first time
    few_s = statistics.median(_probe_s(connection, FEW_BYTES, clock) for _ in range(FEW_TIMES))
    size = MANY_BYTES
    while _probe_s(connection, size, clock) < ENOUGH_S / 10 and size < SCRATCH_BYTES:
        size *= 4
    times = [_probe_s(connection, size, clock) for _ in range(MANY_TIMES)]
    return LinkSpeed.fit((FEW_BYTES, few_s), (size, statistics.median(times)))


def _probe_s(connection: Connection, nbytes: int, clock: Clock) -> float:
    began = clock()
    connection.probe(nbytes)
    return clock() - began


class LinkProber:
    """Looks for peers that were not measured yet whenever there may be some. Connections are open from then on."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._measured: set[tuple[str, int]] = set()
        self._news = threading.Event()

    def start(self) -> None:
        self._state.peers.on_update = self._news.set
        threading.Thread(target=self._run, name="link-prober", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            for peer in self._state.peers.others():
                self._measure(peer.instance, peer.epoch)

    def _measure(self, instance: str, epoch: int) -> None:
        if (instance, epoch) in self._measured:
            return
        self._measured.add((instance, epoch))
        try:
            with self._state.peers.connected(instance, epoch) as connection:
                speed = link_speed(connection)
        except TwofoldError:
            return  # it is gone, or cannot be reached: hand-offs will say so
        self._state.tell(LinkMeasured(source=self._state.instance, target=instance, speed=speed))
