"""Characterization of an engine that runs in this process."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from twofold.bench.prompts import token_range
from twofold.characterize.target import ProbeStream, StreamTimes, TargetLimits


class Stepper:
    """Interface of an in-process engine that the caller runs iteration by iteration."""

    engine: str
    limits: TargetLimits
    vocab_size: int

    @abstractmethod
    def add(self, name: str, token_ids: list[int], output_tokens: int) -> None:
        """Queue a request that gets exactly `output_tokens` output tokens."""

    @abstractmethod
    def step(self) -> Iterable[str]:
        """Run one iteration and return the names of the requests that got a token."""

    def close(self) -> None:
        """Release the engine's resources."""


class LocalTarget:
    """Characterization target that is an engine in this process."""

    def __init__(self, stepper: Stepper) -> None:
        self.engine, self.limits = stepper.engine, stepper.limits
        self._stepper = stepper
        self._range = token_range(stepper.vocab_size)
        self._draw = np.random.default_rng()
        self._numbers = count()

    def run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        names = [f"probe-{next(self._numbers)}" for _ in streams]
        waiting = dict(zip(names, streams, strict=True))
        running = [name for name, stream in waiting.items() if not stream.after_tokens]
        times: dict[str, StreamTimes] = {}
        left = sum(stream.output_tokens for stream in streams)
        prompts: dict[int, list[int]] = {}
        while left:
            progress = min((len(times[name].token_times_s) for name in running if name in times), default=0)
            for name in [name for name, stream in waiting.items() if stream.after_tokens <= progress]:
                stream = waiting.pop(name)
                tokens = self._tokens(stream.prompt_tokens)
                if stream.prompt is not None:
                    tokens = prompts.setdefault(stream.prompt, tokens)
                times[name] = StreamTimes(time.perf_counter(), [])
                self._stepper.add(name, tokens, stream.output_tokens)
            reached = list(self._stepper.step())
            now = time.perf_counter()
            for name in reached:
                times[name].token_times_s.append(now)
            left -= len(reached)
        return [times[name] for name in names]

    def close(self) -> None:
        self._stepper.close()

    def _tokens(self, length: int) -> list[int]:
        ids: list[int] = self._draw.integers(*self._range, length).tolist()
        return ids
