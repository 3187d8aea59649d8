"""Comparison of answers under faults with the answers to the same prompts alone."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from twofold.torture.streams import Ending, TortureStream


class ViolationKind(StrEnum):
    """Ways in which a stream violates the API or differs from its reference answer."""

    TOKENS = "wrong tokens"
    BROKEN = "broken stream"
    REFUSED = "refused request"
    HUNG = "hung stream"
    CUT = "cut answer"
    FINISH = "wrong finish reason"
    USAGE = "wrong usage"


BREAKS: Final = (ViolationKind.BROKEN, ViolationKind.REFUSED)
_ENDINGS: Final = {
    Ending.BROKEN: ViolationKind.BROKEN,
    Ending.REFUSED: ViolationKind.REFUSED,
    Ending.HUNG: ViolationKind.HUNG,
}
_WHOLE: Final = ("length", "stop")  # finish reasons of whole answers


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One violation: its stream's prompt and client, when the stream ended, and the latest fault before."""

    kind: ViolationKind
    prompt: int
    prompt_tokens: int
    client: str
    at_s: float  # since the start of the load
    fault: str | None
    position: int | None  # of the first wrong token, or of the first wrong character if only text is compared
    detail: str


def violations(stream: TortureStream, alone: TortureStream) -> Iterator[tuple[ViolationKind, int | None, str]]:
    """Yield kind, position and detail of each violation of a stream, given the answer to its prompt alone."""
    if stream.ending is Ending.LEFT:
        return
    both_ids = stream.reply.token_ids and alone.reply.token_ids
    found, wanted = (stream.output, alone.output) if both_ids else (stream.reply.text, alone.reply.text)
    position, kind, detail = _parting(found, wanted), _ENDINGS.get(stream.ending), stream.detail
    reason, right = stream.reply.finish_reason, alone.reply.finish_reason
    if kind is None and position is None and len(found) < len(wanted):
        if reason in _WHOLE:
            position = len(found)
        else:
            kind, detail = ViolationKind.CUT, f"{len(found)} of {len(wanted)}, finish reason {reason}"
    if kind is not None:
        yield kind, None, detail
    if position is not None:
        one, other = (repr(each[position]) if position < len(each) else "the end" for each in (found, wanted))
        yield ViolationKind.TOKENS, position, f"{one}, where the reference has {other}"
    elif kind is None:
        if reason != right:
            yield ViolationKind.FINISH, None, f"{reason}, where the reference has {right}"
        wrong = _usage_error(stream, alone)
        if wrong is not None:
            yield ViolationKind.USAGE, None, wrong


def _parting(found: Sequence[object], wanted: Sequence[object]) -> int | None:
    """Return the first index at which `found` differs from `wanted`; None if it is the beginning of `wanted`."""
    end = len(wanted) if len(found) > len(wanted) else None
    return next((i for i, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), end)


def _usage_error(stream: TortureStream, alone: TortureStream) -> str | None:
    usage, reference = stream.reply.usage, alone.reply.usage
    if usage is None:
        return None if reference is None else "no usage"
    known = usage if reference is None else reference
    prompt = stream.prompt.tokens or known.prompt_tokens
    output = len(stream.reply.token_ids) or known.completion_tokens
    if (usage.prompt_tokens, usage.completion_tokens) == (prompt, output):
        return None
    return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, where {prompt} + {output} are right"
