"""Chrome trace of a simulation, for ui.perfetto.dev and chrome://tracing (times in microseconds)."""

from pathlib import Path
from typing import Final

import msgspec

from twofold.instance import Role
from twofold.simulation.observers.base import IterationRun, KvTransfer, Observer
from twofold.simulation.observers.files import AtomicFile

_PS_PER_US: Final = 1e6

Args = dict[str, str | int | float]
Event = dict[str, str | int | float | Args]


class _Track(msgspec.Struct):
    """Track of an instance, with its last power value."""

    pid: int
    tid: int
    watts: float = 0.0
    idle_since_ps: int = 0


class ChromeTrace(Observer):
    """Writes a trace with one process per pool and one thread per instance.

    An instance stays in the process of its first pool. Runs are complete events, transfers asynchronous events of the
    source pool, role changes and notes instant events. A counter per instance shows the power of its batches. The
    file gets its name at the end of the run. Raises ConfigurationError if `path` is not writable.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = AtomicFile(path)
        self._pools: dict[str, int] = {}
        self._tracks: dict[str, _Track] = {}
        self._transfers = 0
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._separator = b"\n"

    def run(self, run: IterationRun) -> None:
        track = self._track(run.instance)
        if run.start_ps > track.idle_since_ps:
            self._power(run.instance, track, track.idle_since_ps, 0.0)
        self._power(run.instance, track, run.start_ps, run.watts)
        track.idle_since_ps = run.end_ps
        self._event(
            {
                "ph": "X",
                "name": _title(run),
                "cat": _phase(run),
                "pid": track.pid,
                "tid": track.tid,
                "ts": run.start_ps / _PS_PER_US,
                "dur": (run.end_ps - run.start_ps) / _PS_PER_US,
                "args": {
                    "iterations": run.iterations,
                    "prefill tokens": run.prefill_tokens,
                    "prefill sequences": run.prefill_sequences,
                    "decode sequences": run.decode_sequences,
                    "context tokens": run.context_tokens,
                    "W": run.watts,
                },
            }
        )

    def transfer(self, transfer: KvTransfer) -> None:
        self._transfers += 1
        both: Event = {
            "name": f"KV to {transfer.target}",
            "cat": "transfer",
            "id": self._transfers,
            "pid": self._track(transfer.source).pid,
        }
        args: Args = {"request": transfer.request_id, "from": transfer.source, "bytes": transfer.bytes}
        self._event({"ph": "b", **both, "ts": transfer.start_ps / _PS_PER_US, "args": args})
        self._event({"ph": "e", **both, "ts": transfer.end_ps / _PS_PER_US})

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        if instance in self._tracks:
            self._instant(instance, at_ps, f"joins {role}", "")
        else:
            self._track(instance, role)

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """Draw a note about an instance; notes about requests are left to the event log."""
        if subject in self._tracks:
            self._instant(subject, at_ps, kind, detail)

    def close(self, at_ps: int) -> None:
        for instance, track in self._tracks.items():
            self._power(instance, track, track.idle_since_ps, 0.0)
        self._file.write(b"\n]}\n")
        self._file.commit()

    def _track(self, instance: str, pool: str = "instances") -> _Track:
        """Return the track of an instance, created in `pool` if missing."""
        track = self._tracks.get(instance)
        if track is None:
            pid = self._pid(pool)
            track = self._tracks[instance] = _Track(pid, len(self._tracks) + 1)
            self._metadata("thread", pid, track.tid, instance)
        return track

    def _pid(self, pool: str) -> int:
        if pool not in self._pools:
            self._pools[pool] = len(self._pools) + 1
            self._metadata("process", self._pools[pool], 0, pool)
        return self._pools[pool]

    def _metadata(self, what: str, pid: int, tid: int, name: str) -> None:
        """Name a process or thread and set its sort order."""
        place: Event = {"ph": "M", "pid": pid, "tid": tid}
        self._event({**place, "name": f"{what}_name", "args": {"name": name}})
        self._event({**place, "name": f"{what}_sort_index", "args": {"sort_index": tid or pid}})

    def _power(self, instance: str, track: _Track, at_ps: int, watts: float) -> None:
        if watts == track.watts:
            return
        track.watts = watts
        name = f"power of {instance}"
        self._event({"ph": "C", "name": name, "pid": track.pid, "ts": at_ps / _PS_PER_US, "args": {"W": watts}})

    def _instant(self, instance: str, at_ps: int, name: str, detail: str) -> None:
        track = self._tracks[instance]
        place: Event = {"ph": "i", "s": "t", "pid": track.pid, "tid": track.tid, "ts": at_ps / _PS_PER_US}
        self._event({**place, "name": name, "args": {"detail": detail} if detail else {}})

    def _event(self, event: Event) -> None:
        self._file.write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"


def _phase(run: IterationRun) -> str:
    if run.decode_sequences == 0:
        return Role.PREFILL
    return Role.MIXED if run.prefill_tokens else Role.DECODE


def _title(run: IterationRun) -> str:
    """Title such as `prefill 1,204 tokens + decode ×17 (32 iterations)`."""
    parts = []
    if run.prefill_tokens:
        parts.append(f"prefill {run.prefill_tokens:,} tokens")
    if run.decode_sequences:
        parts.append(f"decode ×{run.decode_sequences:,}")
    iterations = f" ({run.iterations:,} iterations)" if run.iterations > 1 else ""
    return " + ".join(parts) + iterations
