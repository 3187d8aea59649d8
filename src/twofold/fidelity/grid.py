"""What a live service is asked for to be measured: groups of requests that arrive together, one group after another."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from twofold.request import Request

_PROMPTS = (16, 48, 128, 320, 640, 1024, 1536, 2000)
_TOGETHER = ((64, 4), (128, 8), (400, 3), (200, 9))  # prompt tokens, and so many of them at once
_CONTEXTS = (32, 256, 1024)  # tokens, on average over a batch
_BATCHES = (1, 2, 3, 5, 7, 11, 19, 29, 45, 61)  # powers of two, which kernels like, would flatter an engine
_MOST_TOKENS = 8192  # of prompts at once: more takes long and says no more
_DECODES = 24
_REPEATS = 3
_STREAMS = 8


class Purpose(StrEnum):
    """What a group of requests shows."""

    ALONE = "prompts alone"
    TOGETHER = "prompts together"
    DECODES = "decodes"
    CROWD = "prompts beside decodes of another worker"
    SHARED = "prompts beside decodes on one core"
    MIXED = "prompts beside decodes"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are sent at their times, counted from the first one's; the group ends with the last answer."""

    purpose: Purpose
    requests: tuple[Request, ...]


def split_groups(max_model_len: int, max_num_seqs: int) -> Iterator[Group]:
    """What shows prefill and decode each by itself, on workers of their own, and then what one costs the other."""
    longest = max_model_len - _DECODES
    prompts = [size for size in _PROMPTS if size < longest]
    for repeat in range(_REPEATS):
        for size in prompts:
            yield _group(Purpose.ALONE, f"alone-{repeat}-{size}", 1, size, 1)
    for size, count in _TOGETHER:
        if size < longest:
            yield _group(Purpose.TOGETHER, f"together-{size}", count, size, 1)
    for batch in (batch for batch in _BATCHES if batch <= max_num_seqs):
        for context in _CONTEXTS:
            if context < longest and batch * context <= _MOST_TOKENS:
                sizes = [min(size, longest) for size in _unlike(context, batch)]
                yield _together(Purpose.DECODES, f"decodes-{batch}-{context}", sizes, _DECODES)
    yield _beside(Purpose.CROWD, "crowd", prompts, output=max_model_len // 8)


def shared_groups(max_model_len: int) -> Iterator[Group]:
    """What shows how workers get on that have to take turns on a core."""
    prompts = [size for size in _PROMPTS if size < max_model_len // 2]
    for number in range(2):  # two at a time: the first of them goes to the worker that shares with nobody
        yield _beside(Purpose.SHARED, f"shared-{number}", prompts, output=max_model_len // 16, together=2)


def mixed_groups(max_model_len: int) -> Iterator[Group]:
    """What shows prompts, or pieces of them, beside decodes in one iteration."""
    prompts = [size for size in _PROMPTS if size < max_model_len // 2]
    for number in range(2):
        yield _beside(Purpose.MIXED, f"mixed-{number}", prompts, output=max_model_len // 8)


def _unlike(mean: int, count: int) -> list[int]:
    """So many prompts of unlike lengths, as requests have them: an engine may read contexts of one length faster.

    Each is longer than the one before by the same factor, the last 16 times longer than the first.
    """
    if count == 1:
        return [mean]
    steps = [16 ** (number / (count - 1)) for number in range(count)]
    return [max(1, round(mean * count * step / sum(steps))) for step in steps]


def _group(purpose: Purpose, name: str, count: int, prompt: int, output: int) -> Group:
    return _together(purpose, name, [prompt] * count, output)


def _together(purpose: Purpose, name: str, prompts: Sequence[int], output: int) -> Group:
    requests = tuple(
        Request(id=f"{name}-{number}", arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for number, prompt in enumerate(prompts)
    )
    return Group(purpose=purpose, requests=requests)


def _beside(purpose: Purpose, name: str, prompts: list[int], output: int, together: int = 1) -> Group:
    """Streams that go on for `output` tokens, and prompts of all sizes that come meanwhile, so many at once."""
    streams = _group(purpose, f"{name}-stream", _STREAMS, 64, output).requests
    short = [size for size in prompts if size <= prompts[-1] // 2] * _REPEATS
    comers = tuple(
        Request(
            id=f"{name}-{number}-{each}",
            arrival_s=0.5 + 0.25 * number,
            prompt_tokens=size,
            output_tokens=8,
        )
        for number, size in enumerate(short)
        for each in range(together)
    )
    return Group(purpose=purpose, requests=(*streams, *comers))
