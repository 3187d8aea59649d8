"""The disk tier of a KV store."""

import os
import signal
import subprocess
import sys
import zlib

import pytest

from twofold.errors import ConfigurationError
from twofold.serving.store.disk import DiskBlocks, check_directory

SIZE = 5000
ROOM_FOR_TEN = (2 << 20) + 10 * (SIZE + 256)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "disk"


def opened(directory, capacity=ROOM_FOR_TEN, size=SIZE, contents="model"):
    return DiskBlocks(directory, capacity, size, contents)


def block(number):
    return memoryview(bytes([number]) * SIZE)


def write(disk, number):
    return disk.write(bytes([number]), number, block(number), zlib.crc32(block(number)))


def read(disk, number):
    """Return the contents of a block on disk; None if the block is missing."""
    into = memoryview(bytearray(SIZE))
    return None if disk.read(bytes([number]), into) is None else bytes(into)


def bytes_taken(directory):
    return sum(path.stat().st_size for path in directory.iterdir())


def test_round_trips_a_block(directory):
    disk = opened(directory)
    assert write(disk, 3)
    assert read(disk, 3) == bytes(block(3))
    assert read(disk, 4) is None
    disk.remove(b"\3")
    assert read(disk, 3) is None
    disk.close()


def test_recovers_blocks_in_order(directory):
    disk = opened(directory)
    for number in (5, 2, 9):
        write(disk, number)
    disk.remove(b"\2")
    disk.close()
    again = opened(directory)
    assert again.recovered == [(b"\5", 5), (b"\x09", 9)]
    assert read(again, 5) == bytes(block(5))
    assert read(again, 2) is None
    again.close()


def test_rejects_corrupted_and_truncated_blocks(directory):
    disk = opened(directory)
    write(disk, 1)
    write(disk, 2)
    disk.close()
    with (directory / "blocks").open("r+b") as file:
        file.seek(100)
        file.write(b"\0")
        file.truncate(SIZE + 10)
    again = opened(directory)
    assert read(again, 1) is None
    assert read(again, 2) is None
    again.close()


def test_rejects_blocks_with_a_wrong_checksum(directory):
    disk = opened(directory)
    disk.write(b"k", 0, block(1), zlib.crc32(block(2)))
    assert disk.read(b"k", memoryview(bytearray(SIZE))) is None
    disk.close()


def test_never_exceeds_the_capacity(directory):
    disk = opened(directory)
    assert disk.capacity == 10
    for number in range(10):
        assert write(disk, number)
    assert not write(disk, 10), "the disk is full"
    for turn in range(2000):
        disk.remove(bytes([turn % 10]))
        assert write(disk, turn % 10)
        if turn % 100 == 0:
            assert bytes_taken(directory) <= ROOM_FOR_TEN
    disk.close()
    assert bytes_taken(directory) <= ROOM_FOR_TEN


def test_replaces_spare_blocks_oldest_first(directory):
    disk = opened(directory)
    for number in range(10):
        write(disk, number)
    for number in (4, 6, 8):
        disk.spare(bytes([number]))
    assert read(disk, 4) == bytes(block(4))
    assert write(disk, 4), "rewritten blocks are kept"
    assert write(disk, 20)
    assert read(disk, 6) is None
    assert read(disk, 4) == bytes(block(4))
    assert write(disk, 21)
    assert not write(disk, 22)
    disk.close()


def test_shrinks_to_a_smaller_capacity(directory):
    disk = opened(directory, (2 << 20) + 100 * (SIZE + 256))
    for number in range(100):
        write(disk, number)
    disk.close()
    again = opened(directory)
    assert len(again.recovered) == 10
    assert all(read(again, number) == bytes(block(number)) for number in range(10))
    assert bytes_taken(directory) <= ROOM_FOR_TEN
    again.close()


@pytest.mark.parametrize("other", [{"contents": "other"}, {"size": SIZE + 1}])
def test_deletes_blocks_of_another_model(directory, other):
    disk = opened(directory)
    write(disk, 1)
    disk.close()
    again = opened(directory, **other)
    assert not again.recovered
    assert again.read(b"\1", memoryview(bytearray(SIZE))) is None
    again.close()


@pytest.mark.parametrize("left", [b"", b"this is no database" * 300])
def test_recreates_an_unreadable_index(directory, left):
    disk = opened(directory)
    write(disk, 1)
    disk.close()
    for path in directory.glob("index*"):
        path.write_bytes(left)
    again = opened(directory)
    assert not again.recovered
    assert write(again, 2)
    assert read(again, 2) == bytes(block(2))
    again.close()


def test_locks_the_directory(directory):
    disk = opened(directory)
    for attempt in (opened, lambda path: check_directory(path, 1)):
        with pytest.raises(ConfigurationError, match="another service"):
            attempt(directory)
    disk.close()
    check_directory(directory, 1)


def test_rejects_unusable_directories_and_sizes(directory, tmp_path):
    with pytest.raises(ConfigurationError, match="exceeds the"):
        check_directory(directory, 1 << 60)
    with pytest.raises(ConfigurationError, match="smaller than one KV block"):
        opened(directory, 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot use"):
        check_directory(tmp_path / "file", 1)


WRITER = """
import sys, zlib
from pathlib import Path
from twofold.serving.store.disk import DiskBlocks
disk = DiskBlocks(Path(sys.argv[1]), int(sys.argv[2]), 5000, "model")
for turn in range(10**9):
    number = turn % 25
    data = memoryview(bytes([number]) * 5000)
    disk.remove(bytes([(turn - 10) % 25]))
    disk.write(bytes([number]), number, data, zlib.crc32(data))
    if turn == 30:
        print("full", flush=True)
"""


def test_a_killed_writer_leaves_complete_blocks(directory):
    command = [sys.executable, "-c", WRITER, str(directory), str(ROOM_FOR_TEN)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"full\n"
            os.kill(writer.pid, signal.SIGKILL)
        disk = opened(directory)
        found = disk.recovered
        assert len(found) >= 9
        assert all(read(disk, position) == bytes(block(position)) for _, position in found)
        assert bytes_taken(directory) <= ROOM_FOR_TEN
        disk.close()
