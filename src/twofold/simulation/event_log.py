"""Everything that happened in a run, a line of JSON each: for tests that compare runs, and for reading."""

from pathlib import Path
from typing import Final

import msgspec

from twofold.instance import Role
from twofold.simulation.observer import Run, Transfer
from twofold.simulation.whole_file import WholeFile
from twofold.timeline import Moment, Timeline

_PS_PER_S: Final = 10**12

Value = str | int | float | None | msgspec.Raw | dict[str, float]


class EventLog:
    """Lines in the order in which things ended; each begins with when (seconds) and which event.

    Times of the simulator are written to the picosecond, which a float cannot hold for long; the moments of a
    request are the floats of its timeline. Equal runs give equal bytes. The file has its name once the run is
    over. Raises ConfigurationError if `path` cannot be written to.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = WholeFile(path)

    def run(self, run: Run) -> None:
        self._line(
            "run",
            _seconds(run.end_ps),
            instance=run.instance,
            start_s=_seconds(run.start_ps),
            iterations=run.iterations,
            prefill_tokens=run.prefill_tokens,
            prefill_sequences=run.prefill_sequences,
            decode_sequences=run.decode_sequences,
            context_tokens=run.context_tokens,
            watts=run.watts,
        )

    def transfer(self, transfer: Transfer) -> None:
        self._line(
            "transfer",
            _seconds(transfer.end_ps),
            request=transfer.request_id,
            source=transfer.source,
            target=transfer.target,
            start_s=_seconds(transfer.start_ps),
            bytes=transfer.bytes,
        )

    def ended(self, timeline: Timeline) -> None:
        request, moments = timeline.request, timeline.moments
        self._line(
            "ended",
            max(moments.values(), default=request.arrival_s),
            request=request.id,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=timeline.output_tokens,
            finish_reason=timeline.finish_reason,
            prefill_instance=timeline.prefill_instance,
            decode_instance=timeline.decode_instance,
            preemptions=timeline.preemptions,
            moments={moment.value: moments[moment] for moment in Moment if moment in moments},
        )

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        self._line("role", _seconds(at_ps), instance=instance, role=role)

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        self._line("note", _seconds(at_ps), kind=kind, subject=subject, detail=detail)

    def close(self, at_ps: int) -> None:
        self._line("close", _seconds(at_ps))
        self._file.commit()

    def _line(self, event: str, at_s: Value, **values: Value) -> None:
        line: dict[str, Value] = {"at_s": at_s, "event": event, **values}
        self._file.write(msgspec.json.encode(line) + b"\n")


def _seconds(ps: int) -> msgspec.Raw:
    """The decimal number itself: 1.000000000001, not the float beside it."""
    whole, rest = divmod(ps, _PS_PER_S)
    return msgspec.Raw(f"{whole}.{rest:012d}".rstrip("0").removesuffix("."))
