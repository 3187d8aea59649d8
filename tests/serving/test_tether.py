"""The tether: a worker that the controller takes for dead has ended, whatever happens to messages."""

from heapq import heapify, heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.controller.heartbeat import WATCHDOG_MARGIN_S, WATCHDOG_S, ParentWatchdog, presumed_dead

# When it is said after the one before, how long it is on its way (None: lost), and how long its answer is.
DELAYS = st.none() | st.floats(0, 30)
SAID = st.tuples(st.floats(0.01, 8), DELAYS, DELAYS)


class World:
    """A worker that says now and then that it lives, and a controller that answers; its clock is the true one."""

    def __init__(self, registered_s, said, offset, rate):
        self.theirs = lambda moment: offset + rate * moment
        self.true = lambda theirs: (theirs - offset) / rate
        self.tether = ParentWatchdog(self.theirs(0.0))
        self.events = [(registered_s, 1, "heard", None)]
        moment = 0.0
        for number, (pause, *delays) in enumerate(said):
            moment += pause
            self.events.append((moment, number + 2, "says", delays))
        self.heard_s = None

    def run(self):
        """When the worker has ended, and when it is taken for dead."""
        heapify(self.events)
        ended = given_up = None
        while self.events:
            now, number, what, value = heappop(self.events)
            if self.heard_s is not None and presumed_dead(self.heard_s, now):
                given_up = given_up or self.heard_s + WATCHDOG_S + WATCHDOG_MARGIN_S
            left = self.tether.left_s(self.theirs(now))
            if left == 0.0 and ended is None:
                ended = now  # it ended earlier, if anything: since its last event
            if what == "says" and ended is None:
                there, back = value
                if there is not None:
                    heappush(self.events, (now + there, number, "heard", (self.theirs(now), back)))
            elif what == "heard" and given_up is None:
                self.heard_s = now if self.heard_s is None else max(now, self.heard_s)
                if value is not None and value[1] is not None:
                    heappush(self.events, (now + value[1], number, "answer", value[0]))
            elif what == "answer" and ended is None:
                self.tether.heard(value)
        ends = self.true(self.theirs(0.0) + self._until())
        return min(
            ends, ends if ended is None else ended
        ), given_up or self.heard_s + WATCHDOG_S + WATCHDOG_MARGIN_S

    def _until(self):
        """On their clock, from its beginning."""
        return self.tether._until_s - self.theirs(0.0)


@given(st.floats(0, 5), st.lists(SAID, max_size=40), st.floats(-1e6, 1e6), st.floats(1 - 0.1, 1 + 0.1))
def test_nobody_is_taken_for_dead_who_lives(registered_s, said, offset, rate):
    """However late, lost, or out of order messages are, and where clocks differ in what they show and how fast they go.

    A tenth is far more than clocks differ by.
    """
    ended, given_up = World(registered_s, said, offset, rate).run()
    assert ended <= given_up + 1e-6


def test_answers_in_any_order_and_late_ones_do_not_shorten_it():
    """The last that was heard counts."""
    tether = ParentWatchdog(0.0)
    tether.heard(3.0)
    tether.heard(1.0)
    assert tether.left_s(3.0) == WATCHDOG_S
    assert tether.left_s(3.0 + WATCHDOG_S) == 0.0


def test_a_late_answer_does_not_count_from_when_it_comes():
    """It counts from what it answers: the controller may have given up on us since."""
    tether = ParentWatchdog(0.0)
    tether.heard(0.5)
    assert tether.left_s(4.5) == WATCHDOG_S - 4.0
