"""Operating system resources that a service holds: shared memory, sockets, threads and open files."""

import glob
import re
import tempfile
import time
from pathlib import Path

import psutil

_SEGMENT = re.compile(r"/(?:memfd:|dev/shm/)\S*")


def family(process):
    """Return the processes of a service: the gateway, followed by its descendants."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def segments(process):
    """Return the shared memory segments that a service uses, as (path, inode)."""
    found = set()
    for one in family(process):
        for look in (_mapped, _open):
            try:
                found |= look(one.pid)
            except OSError:  # the process has ended
                continue
    return found


def _mapped(pid):
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split(maxsplit=5) for line in lines if _SEGMENT.search(line)]
    return {(path.removesuffix(" (deleted)"), int(inode)) for *_, inode, path in fields}


def _open(pid):
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
            if _SEGMENT.match(target):
                found.add((target.removesuffix(" (deleted)"), fd.stat().st_ino))
        except OSError:
            continue
    return found


def run_dirs(process):
    """Return the socket directories of a service."""
    return glob.glob(f"{tempfile.gettempdir()}/twofold-{process.pid}-*")


def socket_files(process):
    return [file for folder in run_dirs(process) for file in glob.glob(f"{folder}/*.sock")]


def holdings(process):
    """Return the numbers of processes, shared memory segments, socket files, open files and threads of a service."""
    gateway, *others = family(process)
    return {
        "processes": 1 + len(others),
        "segments": len(segments(process)),
        "socket files": len(socket_files(process)),
        "open files of the gateway": gateway.num_fds(),
        "threads of the gateway": gateway.num_threads(),
    }


def leaks(process, before, *, tries=6000, pause_s=0.1):
    """Wait until a service's resource counts are back at `before`; on timeout, return the counts that are too high."""
    # Each of the four threads of a worker opens a connection to the controller when it sends its first message.
    most = {**before, "open files of the gateway": before["open files of the gateway"] + 4 * before["processes"]}
    for _ in range(tries):
        now = holdings(process)
        more = {what: (before[what], count) for what, count in now.items() if count > most[what]}
        if not more and now["processes"] == before["processes"]:
            return {}
        time.sleep(pause_s)
    return more or {"processes": (before["processes"], now["processes"])}
