"""Processes that end with the one that started them, however that happens."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(with_signal: signal.Signals, parent: int) -> None:
    """Let this process get a signal when the one with the id `parent`, which started it, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
