"""The hand-off receiver processes hand-offs in order and reports the end of each exactly once."""

import threading

from twofold.serving.worker.receiver import HandoffReceiver, IncomingHandoff


class Recording:
    """A hand-off receiver that logs received and ended hand-offs."""

    def __init__(self):
        self.log = []
        self.gate, self.reading, self.over = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.receiver = HandoffReceiver()
        self.receiver.start(self._receive, self._ended)

    def _receive(self, incoming):
        self.reading.set()
        assert self.gate.wait(600)
        self.log.append(("received", incoming.request_id))

    def _ended(self, incoming):
        self.log.append(("ended", incoming.request_id, incoming.complete))
        self.over.release()

    def finished(self, count):
        for _ in range(count):
            assert self.over.acquire(timeout=600)
        self.receiver.close()
        return self.log


def incoming(name, source="p", *, pulled=True):
    return IncomingHandoff(
        request_id=name, source=source, epoch=1, tokens=[5], blocks=(1,), source_blocks=(2,) if pulled else None
    )


def test_handoffs_are_received_in_order():
    recording = Recording()
    for name in "abc":
        recording.receiver.add(incoming(name))
    expected = [entry for name in "abc" for entry in (("received", name), ("ended", name, True))]
    assert recording.finished(3) == expected


def test_an_aborted_handoff_ends_after_its_pending_read():
    recording = Recording()
    recording.gate.clear()
    for name in "ab":
        recording.receiver.add(incoming(name))
    assert recording.reading.wait(600)
    recording.receiver.cancel("a")
    recording.receiver.cancel("b")
    assert not recording.log
    recording.gate.set()
    assert recording.finished(2) == [("received", "a"), ("ended", "a", False), ("ended", "b", False)]


def test_a_lost_source_fails_its_unread_handoffs():
    recording = Recording()
    recording.gate.clear()
    some = [incoming("a"), incoming("b", "q"), incoming("c", pulled=False), incoming("d")]
    for each in some:
        recording.receiver.add(each)
    assert recording.reading.wait(600)
    recording.receiver.cancel_from("p")
    recording.gate.set()
    recording.finished(4)
    assert [each.error for each in some] == ["p ended during the hand-off", None, None, "p ended during the hand-off"]
