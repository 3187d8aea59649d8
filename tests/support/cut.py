"""Cut TCP connections between processes of this host, as a network failure would."""

import ctypes
import os
import socket
from contextlib import suppress

import psutil

_PIDFD_GETFD = 438  # in the common Linux syscall table


def cut_between(processes):
    """Shut down all TCP connections between processes; return the number of sockets shut down."""
    ends = [
        (process, one)
        for process in processes
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED
    ]
    ours = {one.laddr for _, one in ends}
    between = [(process, one.fd) for process, one in ends if one.raddr in ours and one.fd >= 0]
    for process, fd in between:
        with suppress(OSError, psutil.NoSuchProcess):  # closed in the meantime
            _shut_down(process.pid, fd)
    return len(between)


def _shut_down(pid, fd):
    pidfd = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # Shutting down a duplicate of a socket also shuts down the original.
        with socket.socket(fileno=copy) as taken:
            taken.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
