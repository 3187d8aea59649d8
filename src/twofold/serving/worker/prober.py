"""The prober thread of a worker: measures the link to each peer once in the peer's life."""

import threading

from twofold.errors import TwofoldError
from twofold.serving.messages import LinkMeasured
from twofold.serving.worker.measuring import link_speed
from twofold.serving.worker.state import WorkerState


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
