"""Session files of NVIDIA's AIPerf: its `mooncake_trace` jsonl with sessions, one turn per line.

`input_length` and `hash_ids` (blocks of 512 tokens) cover the new tokens of a turn: AIPerf appends them to the earlier
turns of the session and the answers to them. A later turn is sent `delay` ms after the answer to the turn before it or,
if it has a `timestamp`, at that time in ms, but not before that answer. Without timestamps, all sessions begin at 0.
The lines of a session may be anywhere in the file. Source: AIPerf 0.13 (`dataset/loader/mooncake_trace.py`,
`workers/session_manager.py`, `timing/strategies/fixed_schedule.py`).
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

import msgspec

from twofold.request import Request
from twofold.workload.blocks import BLOCK_TOKENS
from twofold.workload.format import TraceFormat, output_length, prompt_length
from twofold.workload.rows import Lines, json_rows

KEYS = ("session_id", "input_length", "output_length")
TEXT_KEYS: Final = {"turns", "text", "texts", "text_input", "messages", "payload"}  # of AIPerf's files with prompts


class AiperfRow(msgspec.Struct):
    """One line of a session file: one turn. A turn without `session_id` is a session of its own."""

    input_length: int
    output_length: int
    session_id: str | None = None
    hash_ids: tuple[int, ...] | None = None
    timestamp: float | None = None
    delay: float | None = None


def read(lines: Lines) -> Iterator[Request]:
    sessions: dict[str, list[AiperfRow]] = {}
    for row in json_rows(lines, AiperfRow):
        turns = sessions.setdefault(row.session_id or f"line-{lines.number}", [])
        prompt_length(lines, KEYS[1], row.input_length)
        row.output_length = output_length(lines, KEYS[2], row.output_length)
        _check(lines, row, turns[-1] if turns else None)
        turns.append(row)
        opening = next(iter(sessions.values()))[0]
        if len(turns) == 1 and (row.timestamp is None) is not (opening.timestamp is None):
            raise lines.error("either the first turn of every session has a timestamp, or none has")
    if sessions:
        # AIPerf sorts sessions by their first timestamps, too.
        yield from sorted(_requests(sessions), key=lambda request: request.arrival_s)


def _check(lines: Lines, row: AiperfRow, before: AiperfRow | None) -> None:
    ids = row.hash_ids or ()
    if len(ids) > -(-row.input_length // BLOCK_TOKENS):
        raise lines.error(
            f"hash_ids has {len(ids)} blocks of {BLOCK_TOKENS} tokens, more than input_length {row.input_length}"
        )
    if row.delay is not None and row.delay < 0:
        raise lines.error(f"delay is {row.delay:g}, which is not a time in ms from 0 on")
    if before is not None and before.input_length < row.input_length:
        full = (before.hash_ids or ())[: before.input_length // BLOCK_TOKENS]
        if full and ids[: len(full)] == full:
            raise lines.error(
                "hash_ids repeats the previous turn of the session: input_length and hash_ids cover new tokens only"
            )


def _requests(sessions: dict[str, list[AiperfRow]]) -> Iterator[Request]:
    first = [turns[0] for turns in sessions.values()]
    start_ms = min(row.timestamp or 0.0 for row in first)
    blocks = zip(*(row.hash_ids or () for row in first), strict=False)
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, blocks))
    shared = min(common * BLOCK_TOKENS, *(row.input_length for row in first))
    for session, turns in sessions.items():
        arrival_s, so_far = 0.0, 0
        for index, row in enumerate(turns):
            if row.timestamp is not None:
                arrival_s = max(arrival_s, (row.timestamp - start_ms) / 1000)
            follows = index > 0 and row.timestamp is None
            yield Request(
                id=f"{session}-{index}",
                arrival_s=arrival_s,
                prompt_tokens=so_far + row.input_length,
                output_tokens=row.output_length,
                session=session,
                think_s=(row.delay or 0.0) / 1000 if follows else 0.0,
                shared_tokens=shared,
            )
            so_far += row.input_length + row.output_length


AIPERF = TraceFormat(name="aiperf", keys=KEYS, suffix=".jsonl", read=read, encode=None, keeps_sessions=True)
