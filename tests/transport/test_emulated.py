"""The emulated transport, compared with the analytic transfer model."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_clock import FakeClock
from twofold.cluster.timing import PS, ps
from twofold.engine.emulated import LayerGroups, PrefillTimes
from twofold.errors import ConfigurationError
from twofold.performance.transfer import TransferModel
from twofold.transport.base import KvCacheSpec
from twofold.transport.emulated import EmulatedPort, EmulatedTransport

KV_BYTES, BLOCK = 1_000_000, 16
GROUPS = LayerGroups(70)
PORT = EmulatedPort(machine="0/0", bytes_per_s=1e9, local_bytes_per_s=4e9, latency_s=0.002, sync_s=0.005)


class World:
    """An emulated transport and its connection to a peer, on a fake clock."""

    def __init__(self, port=PORT, peer=None, groups=GROUPS):
        self.clock, self.prefills = FakeClock(now=PS), PrefillTimes(groups)
        self.groups = groups
        self.layout = groups.layout(KV_BYTES, BLOCK)
        own = self.transport("prefill-0", port)
        other = self.transport("decode-0", peer or msgspec.structs.replace(port, machine="1/0"))
        self.connection = own.connect(other.descriptor)
        self.own = own

    def transport(self, name, port):
        return EmulatedTransport(KvCacheSpec(name, 1, self.layout, 1000), port, self.prefills, self.clock)

    def serialized(self, blocks):
        """Hand off `blocks` after the prefill; return the duration of the hand-off in seconds."""
        began = self.clock.now()
        self.prefills.note([blocks], began - PS, began)
        return self.seconds(began, blocks, lambda _: None)

    def layer_wise(self, blocks, prefill_s):
        """Hand off `blocks` layer by layer during a prefill. Return the seconds from the end of the prefill
        to the end of the hand-off.
        """
        began = self.clock.now()
        end = began + ps(prefill_s)
        self.prefills.note([blocks], began, end)
        return self.seconds(end, blocks, lambda group: self.clock.sleep_until(self.groups.ready(group, began, end)))

    def seconds(self, since, blocks, wait_for):
        for group in range(len(self.groups)):
            wait_for(group)
            self.connection.write(range(group, group + 1), blocks, blocks)
        return (self.clock.now() - since) / PS


def model(bytes_per_s=1e9):
    return TransferModel(kv_bytes_per_token=KV_BYTES, layers=70, bytes_per_s=bytes_per_s, latency_s=0.002, sync_s=0.005)


@given(st.integers(1, 60))
def test_a_serialized_hand_off_takes_the_modelled_time(blocks):
    took = World().serialized(range(blocks))
    assert took == pytest.approx(model().serialized_s(blocks * BLOCK), rel=1e-6)


@settings(max_examples=50)
@given(st.integers(1, 60), st.floats(0.01, 20.0))
def test_a_layer_wise_hand_off_takes_the_modelled_time(blocks, prefill_s):
    """The duration of a layer-wise hand-off agrees with the transfer model."""
    took = World().layer_wise(range(blocks), prefill_s)
    said = model().layer_wise_s(blocks * BLOCK, prefill_s)
    group_s = 8 / 70 * min(prefill_s, blocks * BLOCK * KV_BYTES / 1e9)
    assert said - 0.002 - 1e-6 <= took <= said + group_s + 1e-6


def test_reports_the_bytes_of_all_layers():
    world = World()
    world.prefills.note([[3, 4]], 0, 0)
    moved = world.connection.write(range(len(GROUPS)), [3, 4], [8, 9])
    assert moved == 2 * BLOCK * KV_BYTES


def test_hand_offs_of_one_instance_queue_on_its_link():
    world = World()
    world.clock.oversleep = ps(0.0001)
    began = world.clock.now()
    for blocks in (range(10), range(10, 20)):
        world.serialized(blocks)
    assert (world.clock.now() - began) / PS == pytest.approx(2 * model().serialized_s(160), rel=0.01)


def test_a_lease_during_prefill_is_layer_wise():
    world = World()
    began = world.clock.now()
    blocks = range(10)
    world.prefills.note([blocks], began, began + PS)
    world.clock.pass_time(PS // 2)
    took = world.seconds(began + PS, blocks, lambda _: None)
    assert took == pytest.approx(0.005 + 160 * KV_BYTES / 70 / 1e9, rel=1e-3)


def test_a_link_has_the_bandwidth_of_its_slower_end():
    slow = msgspec.structs.replace(PORT, machine="1/0", bytes_per_s=1e8)
    assert World(peer=slow).serialized(range(10)) == pytest.approx(model(1e8).serialized_s(160))
    assert World(peer=PORT).serialized(range(10)) == pytest.approx(model(4e9).serialized_s(160))


def test_rejects_another_kv_layout():
    other = World(groups=LayerGroups(40))
    with pytest.raises(ConfigurationError, match="different KV layouts"):
        World().own.connect(other.own.descriptor)
