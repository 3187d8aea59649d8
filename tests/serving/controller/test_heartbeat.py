"""A worker without acknowledged heartbeats exits before the controller presumes the worker dead."""

from heapq import heapify, heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.controller.heartbeat import WATCHDOG_MARGIN_S, WATCHDOG_S, ParentWatchdog, presumed_dead

# Heartbeats: interval, delay (None: lost) and delay of the acknowledgement.
DELAYS = st.none() | st.floats(0, 30)
SAID = st.tuples(st.floats(0.01, 8), DELAYS, DELAYS)


class World:
    """A worker and a controller that exchange heartbeats."""

    def __init__(self, registered_s, said, offset, rate):
        # The controller's clock is the true time.
        self.theirs = lambda moment: offset + rate * moment
        self.true = lambda theirs: (theirs - offset) / rate
        self.watchdog = ParentWatchdog(self.theirs(0.0))
        self.events = [(registered_s, 1, "heard", None)]
        moment = 0.0
        for number, (pause, *delays) in enumerate(said):
            moment += pause
            self.events.append((moment, number + 2, "says", delays))
        self.heard_s = None

    def run(self):
        """Return the times at which the worker ends and the controller presumes it dead."""
        heapify(self.events)
        ended = given_up = None
        while self.events:
            now, number, what, value = heappop(self.events)
            if self.heard_s is not None and presumed_dead(self.heard_s, now):
                given_up = given_up or self.heard_s + WATCHDOG_S + WATCHDOG_MARGIN_S
            left = self.watchdog.left_s(self.theirs(now))
            if left == 0.0 and ended is None:
                ended = now  # an upper bound: the worker ended after its last event
            if what == "says" and ended is None:
                there, back = value
                if there is not None:
                    heappush(self.events, (now + there, number, "heard", (self.theirs(now), back)))
            elif what == "heard" and given_up is None:
                self.heard_s = now if self.heard_s is None else max(now, self.heard_s)
                if value is not None and value[1] is not None:
                    heappush(self.events, (now + value[1], number, "answer", value[0]))
            elif what == "answer" and ended is None:
                self.watchdog.acknowledged(value)
        ends = self.true(self.theirs(0.0) + self._until())
        return min(ends, ends if ended is None else ended), given_up or self.heard_s + WATCHDOG_S + WATCHDOG_MARGIN_S

    def _until(self):
        """Return the watchdog's deadline, in s since the worker's start."""
        return self.watchdog._until_s - self.theirs(0.0)


@given(st.floats(0, 5), st.lists(SAID, max_size=40), st.floats(-1e6, 1e6), st.floats(1 - 0.1, 1 + 0.1))
def test_a_live_worker_is_never_presumed_dead(registered_s, said, offset, rate):
    """Despite message delays and losses, a worker ends itself before the controller presumes the worker dead."""
    ended, given_up = World(registered_s, said, offset, rate).run()
    assert ended <= given_up + 1e-6


def test_late_acknowledgements_do_not_shorten_the_term():
    watchdog = ParentWatchdog(0.0)
    watchdog.acknowledged(3.0)
    watchdog.acknowledged(1.0)
    assert watchdog.left_s(3.0) == WATCHDOG_S
    assert watchdog.left_s(3.0 + WATCHDOG_S) == 0.0


def test_an_acknowledgement_counts_from_its_heartbeat():
    watchdog = ParentWatchdog(0.0)
    watchdog.acknowledged(0.5)
    assert watchdog.left_s(4.5) == WATCHDOG_S - 4.0
