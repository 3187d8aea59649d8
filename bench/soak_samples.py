"""Samples of the resources of a service's processes: memory, open files, sockets, threads, shared memory segments."""

import re
from collections import Counter
from pathlib import Path

import msgspec
import psutil

from twofold.bench.services import metrics

_SEGMENT = re.compile(r"/(?:memfd:|dev/shm/)")
_BLOCKS = re.compile(r'^twofold:kv_cache_blocks\{instance="([^"]+)",state="([^"]+)"\} (\S+)$', re.MULTILINE)


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of one process: memory in bytes, and numbers of files, sockets, threads and shared memory segments."""

    anonymous: int  # resident memory outside files and segments; leaks make it grow
    uss: int  # memory unique to the process, which also changes when a forked sibling writes a page
    rss: int  # all resident memory, with used KV blocks
    files: int
    sockets: int
    threads: int
    segments: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Resource use of each process, and KV blocks in use on each instance, at one time."""

    at_s: float
    processes: dict[str, ProcessSample]
    blocks_held: dict[str, int]


class Sampler:
    """Sampler of a service's processes: the service's own (`pid`), and all its descendants."""

    def __init__(self, pid: int, url: str, started_s: float) -> None:
        service, numbers = psutil.Process(pid), Counter[str]()
        self._processes = {"service": service}
        for each in service.children(recursive=True):
            name = each.name()
            numbers[name] += 1
            self._processes[name if numbers[name] == 1 else f"{name} {numbers[name]}"] = each
        self._url, self._started_s = url, started_s

    def look(self, now: float) -> Sample:
        """Sample the service's processes that ran when the sampler was created.

        Raises psutil.NoSuchProcess if one of these processes has ended.
        """
        return Sample(
            at_s=now - self._started_s,
            processes={name: _look(process) for name, process in self._processes.items()},
            blocks_held=blocks_held(self._url),
        )


def blocks_held(url: str) -> dict[str, int]:
    """Return the number of KV blocks in use, by instance."""
    counts: dict[str, dict[str, int]] = {}
    for instance, state, value in _BLOCKS.findall(metrics(url)):
        counts.setdefault(instance, {})[state] = int(float(value))
    return {instance: count["total"] - count["free"] for instance, count in counts.items()}


def _look(process: psutil.Process) -> ProcessSample:
    memory = process.memory_full_info()
    status = Path(f"/proc/{process.pid}/status").read_text()
    (anonymous,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return ProcessSample(
        anonymous=1024 * int(anonymous),
        uss=memory.uss,
        rss=memory.rss,
        files=process.num_fds(),
        sockets=sum(_is_socket(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()),
        threads=process.num_threads(),
        segments=len(_segments(process.pid)),
    )


def _is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except OSError:  # closed in the meantime
        return False


def _segments(pid: int) -> set[str]:
    """Return the inodes of the shared memory segments mapped by a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[4] for line in lines if _SEGMENT.search(line)}
