"""A stub of the service that follows a script and records calls, so that gateway tests need no workers."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from random import Random

import msgspec

from twofold.errors import RequestError
from twofold.request import FinishReason, Generation, TokenOutput
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.service import ServedModel
from twofold.serving.telemetry.snapshot import ServiceHistory, ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry

EOS = 1  # id of </s> in the test tokenizers
FIRST_TEXT_TOKEN = 2


class Gate:
    """Script step that waits until the test calls `open`."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        while not self._open.is_set():  # noqa: ASYNC110 it is opened from another thread
            await asyncio.sleep(0.002)


# Yields a token id or TokenOutput, waits for a Gate, raises an exception.
Step = int | TokenOutput | Gate | Exception
Script = Callable[[Generation], Sequence[Step]]


def served_model(**changes: object) -> ServedModel:
    model = ServedModel(name="tiny", path="/tiny", max_model_len=256, vocab_size=401, created=1)
    return msgspec.structs.replace(model, **changes)


class ScriptedService:
    """Service stub that returns scripted tokens, for gateway tests without workers."""

    def __init__(self, script: Script | None = None, *, model: ServedModel | None = None, delay_s: float = 0.0) -> None:
        self.model = model or served_model()
        self.takes_text = False
        self.script = script or self._improvise
        self.delay_s = delay_s
        self.is_ready = True
        self.telemetry = Telemetry(self.model.name)
        self.looks = 0
        self.started: list[Generation] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._changed = threading.Condition()

    def submit(self, generation: Generation, sink: OutputSink) -> None:
        self._running[generation.request.id] = asyncio.create_task(self._run(generation, sink))

    async def _run(self, generation: Generation, sink: OutputSink) -> None:
        try:
            async for token in self._tokens(generation):
                sink.output(token)
        except Exception as error:  # noqa: BLE001  of the script
            sink.failed(error)

    async def _tokens(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        self._record(self.started, generation)
        request_id = generation.request.id
        try:
            index = 0
            for step in self.script(generation):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Gate):
                    await step.passed()
                    continue
                token = self._token(generation, step, index) if isinstance(step, int) else step
                await asyncio.sleep(self.delay_s)
                if token.finish_reason is not None:
                    self._record(self.finished, request_id)
                    yield token
                    return
                yield token
                index += 1
        finally:
            if request_id not in self.finished:
                self._record(self.aborted, request_id)

    def stop(self, request_id: str) -> None:
        self._record(self.finished, request_id)
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running.pop(request_id).cancel()

    def ready(self) -> bool:
        return self.is_ready

    def pools(self):
        return []

    def set_role(self, instance, role):
        raise RequestError(f"{instance} is scripted", status=409, code="roles_fixed")

    def replans(self):
        return []

    def snapshot(self) -> ServiceSnapshot:
        self.looks += 1
        return self.telemetry.snapshot([])

    def history(self) -> ServiceHistory:
        return self.telemetry.history([])

    def metrics(self) -> bytes:
        return b"# HELP scripted_requests_total requests\nscripted_requests_total 0\n"

    def wait_until(self, condition: Callable[["ScriptedService"], bool]) -> None:
        """Block until `condition` is true for this service."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout=600), (
                f"started {len(self.started)}, finished {len(self.finished)}, aborted {len(self.aborted)}"
            )

    def _improvise(self, generation: Generation) -> list[int]:
        return [
            self._rng(generation, index).randrange(FIRST_TEXT_TOKEN, self.model.vocab_size)
            for index in range(generation.sampling.max_tokens)
        ]

    def _rng(self, generation: Generation, index: int) -> Random:
        seed = 0 if generation.sampling.greedy else generation.sampling.seed
        return Random(f"{generation.prompt_token_ids}/{seed}/{index}")

    def _token(self, generation: Generation, token_id: int, index: int) -> TokenOutput:
        sampling = generation.sampling
        reason = None
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        if index + 1 >= sampling.min_tokens and token_id in stops:
            reason = FinishReason.STOP
        elif index + 1 == sampling.max_tokens:
            reason = FinishReason.LENGTH
        if sampling.logprobs is None:
            return TokenOutput(index=index, token_id=token_id, finish_reason=reason)
        others = self._rng(generation, index).sample(range(self.model.vocab_size), sampling.logprobs)
        return TokenOutput(
            index=index,
            token_id=token_id,
            logprob=-0.5,
            top_logprobs=tuple((other, -0.6 - rank) for rank, other in enumerate(others)),
            finish_reason=reason,
        )

    def _record(self, where: list, what: object) -> None:
        with self._changed:
            where.append(what)
            self._changed.notify_all()
