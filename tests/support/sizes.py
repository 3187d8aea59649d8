"""Measurement of a service's shared memory and disk usage while a test runs."""

import threading
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.running_service import children

_SHARED = "/memfd:twofold-"  # prefix of Twofold's segments in /proc/PID/maps


def shared_bytes(process):
    """Return the bytes of shared memory that a service uses, by segment name."""
    sizes = {}
    for child in children(process):
        mapped = {}
        for (inode, name), size in _mappings(child.pid):
            mapped[inode, name] = size + mapped.get((inode, name), 0)
        for memory, size in mapped.items():
            sizes[memory] = max(size, sizes.get(memory, 0))
    total = {}
    for (_, name), size in sizes.items():
        total[name] = size + total.get(name, 0)
    return total


def _mappings(pid):
    try:
        lines = Path(f"/proc/{pid}/maps").read_text("utf-8").splitlines()
    except OSError:
        return  # the process has ended
    for line in lines:
        addresses, _, _, _, inode, *path = line.split()
        if path and path[0].startswith(_SHARED):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield (inode, path[0].removeprefix(_SHARED)), end - begin


def disk_bytes(directory):
    """Return the total size in bytes of the files directly in `directory`."""
    apparent = allocated = 0
    for path in directory.glob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # an index log, removed after compaction
        apparent, allocated = apparent + status.st_size, allocated + 512 * status.st_blocks
    return max(apparent, allocated)


@contextmanager
def largest(*measures):
    """Call the functions `measures`, which return dicts of numbers, repeatedly in a thread.

    Yield a list with one dict for each function: the largest number seen for each key.
    """
    most = [{} for _ in measures]
    looks, done = [0], threading.Event()

    def look():
        while not done.is_set():
            for seen, measure in zip(most, measures, strict=True):
                try:
                    measured = measure()
                except psutil.Error:
                    continue
                for name, value in measured.items():
                    seen[name] = max(value, seen.get(name, 0))
            looks[0] += 1
            done.wait(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
    assert looks[0] > 10
