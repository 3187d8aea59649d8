"""The order of work on an accelerator: the host queues it and runs ahead, so others must ask when it is done.

On a CPU everything is done when it is called, and nothing here does anything.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class LayerNotifier:
    """Calls back when the device has done what was queued on it before, from a thread of its own.

    Calls are made in the order in which they were asked for. On a CPU each is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: queue.Queue[tuple[torch.cuda.Event, Callable[[], None]]] = queue.Queue()
        self._error: Exception | None = None
        if device.type == "cuda":
            threading.Thread(target=self._run, name="announcer", daemon=True).start()

    def after(self, call: Callable[[], None]) -> None:
        """`call` once all is done that this thread has queued so far."""
        if self._device.type != "cuda":
            call()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._waiting.put((event, call))

    def finish(self) -> None:
        """Return when all that this thread queued is done and all calls were made; raises what one of them raised."""
        if self._device.type != "cuda":
            return
        torch.cuda.current_stream(self._device).synchronize()
        self._waiting.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            event, call = self._waiting.get()
            try:
                event.synchronize()
                call()
            except Exception as error:  # noqa: BLE001  (whatever it is, it is for the one who waits)
                self._error = error
            finally:
                self._waiting.task_done()


class CopyStream:
    """Where a thread beside the engine's copies between the pool and the host.

    On the engine's stream its copies would wait for all that the engine has queued, and what it queues next for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied inside is there on return. It must have been computed before (`LayerNotifier`)."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class PinnedMemory:
    """Memory of the host that `device` copies from and to by itself, several times as fast, until `close`.

    Where the system does not allow it, and on a CPU, copies go on as they would without.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._address, self._device = memory.data_ptr(), device
        self.pinned = device.type == "cuda" and self._register(memory.numel())

    def _register(self, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            if int(_runtime().cudaHostRegister(self._address, nbytes, 0)) == 0:
                return True
            # The next call to the device would be told what this one was refused for.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return False

    def close(self) -> None:
        """To be called before the memory is unmapped: others may be mapped there next."""
        if self.pinned:
            with torch.cuda.device(self._device):
                _runtime().cudaHostUnregister(self._address)
            self.pinned = False


def _runtime() -> Any:  # noqa: ANN401  (torch has no types for it)
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
