"""What the processes of a service hold that is not a block: memory segments, sockets, threads, files."""

import glob
import re
import tempfile
import time
from pathlib import Path

import psutil

_SEGMENT = re.compile(r"/(?:memfd:|dev/shm/)\S*")


def family(process):
    """The service and every process below it."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def segments(process):
    """Shared memory segments that any process of the service has mapped or open, as (what, inode)."""
    found = set()
    for one in family(process):
        for look in (_mapped, _open):
            try:
                found |= look(one.pid)
            except OSError:  # it has just ended
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
    """The directories of sockets of a service, by the pid in their names."""
    return glob.glob(f"{tempfile.gettempdir()}/twofold-{process.pid}-*")


def socket_files(process):
    return [file for folder in run_dirs(process) for file in glob.glob(f"{folder}/*.sock")]


def holdings(process):
    """How much of everything, as plain numbers that can be compared."""
    gateway, *others = family(process)
    return {
        "processes": 1 + len(others),
        "segments": len(segments(process)),
        "socket files": len(socket_files(process)),
        "open files of the gateway": gateway.num_fds(),
        "threads of the gateway": gateway.num_threads(),
    }


def comes_back_to(process, before, *, tries=600, pause_s=0.1):
    """What is held above `before`, and how much, when it has had time to go; {} if nothing is.

    Fewer processes count as well. The gateway may have more files open, but not more with each worker that ends: each
    of a worker's four threads opens a connection to the controller when it first has something to say.
    """
    most = {
        **before,
        "open files of the gateway": before["open files of the gateway"] + 4 * before["processes"],
    }
    for _ in range(tries):
        now = holdings(process)
        more = {what: (before[what], count) for what, count in now.items() if count > most[what]}
        if not more and now["processes"] == before["processes"]:
            return {}
        time.sleep(pause_s)
    return more or {"processes": (before["processes"], now["processes"])}
