"""The simulated network: transfer times, and contention between transfers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.cluster.timing import PS
from twofold.simulation.kernel import Event, EventOrder, Kernel, MachineLink, VirtualNetwork


class Landed(Event):
    """Event that records the end time of a transfer in seconds."""

    def __init__(self, transfers, number):
        self.order = EventOrder.TRANSFER + number
        self.transfers, self.number_sent = transfers, number

    def happen(self):
        self.transfers.ends[self.number_sent] = self.transfers.kernel.now / PS


class Transfers:
    """A simulated network of equal machines, which records the end time of each transfer."""

    def __init__(self, machines=4, bytes_per_s=100.0, *, contention=True, latency_s=0.0):
        self.kernel = Kernel()
        self.network = VirtualNetwork(self.kernel, contention=contention, latency_s=latency_s)
        self.links = [MachineLink(bytes_per_s, 1000.0) for _ in range(machines)]
        self.ends = {}

    def send(self, number, source, target, size, start_s):
        landed = Landed(self, number)
        self.network.send(self.links[source], self.links[target], size, round(start_s * PS), landed)

    def run(self):
        self.kernel.run(until_events=10**9)
        return self.ends


def test_a_transfer_alone_takes_its_bytes_over_the_bandwidth():
    net = Transfers(latency_s=0.5)
    net.send(0, 0, 1, 200, 1.0)
    assert net.run() == {0: 3.5}


def test_two_transfers_into_one_machine_share_its_network():
    net = Transfers()
    net.send(0, 0, 2, 100, 0.0)
    net.send(1, 1, 2, 100, 0.5)
    assert net.run() == pytest.approx({0: 1.5, 1: 2.0})


def test_disjoint_transfers_do_not_contend():
    net = Transfers()
    net.send(0, 0, 1, 100, 0.0)
    net.send(1, 2, 3, 100, 0.0)
    assert net.run() == {0: 1.0, 1: 1.0}


def test_without_contention_each_transfer_has_its_own_link():
    """With `contention=False`, concurrent transfers do not slow each other down."""
    net = Transfers(contention=False)
    for number in range(3):
        net.send(number, 0, 1, 100, 0.0)
    assert net.run() == {0: 1.0, 1: 1.0, 2: 1.0}


def test_local_transfers_use_the_interconnect():
    net = Transfers()
    net.send(0, 1, 1, 100, 0.0)
    assert net.run() == {0: 0.1}


transfers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 500), st.sampled_from([0.0, 0.5, 1.0, 2.5])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=500)
@given(transfers)
def test_no_port_carries_more_than_it_can_and_everything_lands(wanted):
    """No port exceeds its bandwidth, and every transfer ends."""
    net = Transfers()
    for number, (source, target, size, start) in enumerate(wanted):
        net.send(number, source, target, size, start)
    ends = net.run()
    assert len(ends) == len(wanted)
    for number, (source, target, size, start) in enumerate(wanted):
        assert ends[number] >= start + size / (1000 if source == target else 100) - 1e-9
    for end in (0, 1):
        for machine in range(4):
            through = [(n, w) for n, w in enumerate(wanted) if w[end] == machine and w[0] != w[1]]
            if through:
                busy = max(ends[n] for n, _ in through) - min(w[3] for _, w in through)
                assert busy >= sum(w[2] for _, w in through) / 100 - 1e-9
