"""The load of a host, read from the files of /proc."""

import pytest

from twofold.serving.telemetry.host import HostMeter, memory_bytes


@pytest.fixture
def proc(tmp_path):
    """Return a folder like /proc, and a function that writes the ticks of user, system, idle and iowait."""
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n")

    def ticks(user, system, idle, iowait):
        (tmp_path / "stat").write_text(f"cpu  {user} 0 {system} {idle} {iowait} 0 0 0 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")

    return tmp_path, ticks


def test_the_busy_share_is_that_since_the_last_sample(proc):
    folder, ticks = proc
    ticks(100, 50, 1000, 0)
    meter = HostMeter(folder)
    ticks(150, 75, 1020, 5)  # 75 of 100 ticks busy
    assert meter.sample().busy == 0.75
    assert meter.sample().busy == 0.0  # no tick has passed
    ticks(150, 75, 1020, 105)  # waiting for a disk is not busy
    assert meter.sample().busy == 0.0
    ticks(160, 75, 1020, 105)
    assert meter.sample().busy == 1.0


def test_memory_in_use_is_what_is_not_available(proc):
    folder, ticks = proc
    ticks(0, 0, 0, 0)
    found = HostMeter(folder).sample()
    assert (found.memory_used, found.memory_total) == (750 * 1024, 1000 * 1024)
    assert memory_bytes("MemFree", folder) == 100 * 1024


def test_this_host_has_a_load():
    found = HostMeter().sample()
    assert 0.0 <= found.busy <= 1.0
    assert 0 < found.memory_used < found.memory_total
    assert found.name.endswith(" cores")
