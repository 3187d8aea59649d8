"""The choices of a response while they run."""

import asyncio
import time

import pytest
from starlette.requests import ClientDisconnect

from twofold.errors import InstanceLostError, RequestError
from twofold.request import FinishReason, Generation, Request, SamplingParams, TokenOutput, TokenRun
from twofold.serving.gateway.endpoints.chat import ChatWriter
from twofold.serving.gateway.endpoints.completions import CompletionWriter
from twofold.serving.gateway.generations import PlannedChoice, ResponseSpec
from twofold.serving.gateway.middleware import Arrival, Departure
from twofold.serving.gateway.output import LogprobFormat, OutputProcessor, stop_patterns
from twofold.serving.gateway.schemas import ChatFields, CompletionFields, StreamOptions
from twofold.serving.gateway.streaming import EventStream, RunningChoices, UsageCounter

LATE_S = 1000.0


class Started:
    """A service that records its requests, and whose output comes from the test."""

    def __init__(self, refuses=None):
        self.sinks, self.ended, self.refuses = {}, [], refuses

    def submit(self, generation, sink):
        if generation.request.id == self.refuses:
            raise RequestError("refused")
        self.sinks[generation.request.id] = sink

    def stop(self, request_id):
        self.ended.append((request_id, "stop"))

    def abort(self, request_id):
        self.ended.append((request_id, "abort"))


def planned(count):
    sampling = SamplingParams(max_tokens=3, seed=0)
    choices = []
    for index in range(count):
        request = Request(id=f"r{index}", arrival_s=0.0, prompt_tokens=1, output_tokens=3)
        generation = Generation(request=request, prompt_token_ids=[1], sampling=sampling)
        fields = CompletionFields(model="m", prompt="")
        output = OutputProcessor(index, None, fields, stop_patterns(["b"]))
        choices.append(PlannedChoice(generation=generation, output=output, prompt=0))
    return choices


def token(index, text="a", finish=None):
    return TokenOutput(index=index, token_id=7, text=text, finish_reason=finish)


def run(scenario, count=2, deadline_s=None, leaves=False, **settings):
    """Run `scenario` with a service, its choices, and what they add."""

    async def main():
        service, deltas = Started(**settings), []
        deadline = time.monotonic() + LATE_S if deadline_s is None else deadline_s
        departure = Departure()
        choices = RunningChoices(service, planned(count), deadline, departure, deltas.append)
        try:
            await scenario(service, choices, deltas, *([departure] if leaves else []))
        finally:
            choices.close()
        return service

    return asyncio.run(main())


def test_choices_end_one_by_one():
    async def scenario(service, choices, deltas):
        await choices.start()
        service.sinks["r1"].output(token(0, finish=FinishReason.LENGTH))
        assert choices.going
        service.sinks["r0"].output(token(0))
        service.sinks["r0"].output(token(1, finish=FinishReason.STOP))
        await choices.woken()
        assert (choices.going, choices.failure) == (False, None)
        assert [(delta.choice, delta.finish_reason) for delta in deltas] == [(1, "length"), (0, None), (0, "stop")]

    assert run(scenario).ended == []


def test_the_deadline_ends_all_choices():
    async def scenario(service, choices, deltas):
        await choices.start()
        await choices.woken()
        assert (choices.going, choices.failure.status) == (False, 504)
        service.sinks["r0"].output(token(0))
        assert deltas == []

    assert sorted(run(scenario, deadline_s=time.monotonic()).ended) == [("r0", "abort"), ("r1", "abort")]


def test_a_failed_choice_ends_the_others():
    async def scenario(service, choices, deltas):
        await choices.start()
        service.sinks["r0"].output(token(0))
        service.sinks["r0"].failed(InstanceLostError("the worker ended"))
        await choices.woken()
        assert (choices.going, str(choices.failure), len(deltas)) == (False, "the worker ended", 1)

    assert sorted(run(scenario).ended) == [("r0", "abort"), ("r1", "abort")]


def test_a_client_that_leaves_ends_all_choices():
    async def scenario(service, choices, deltas, departure):
        await choices.start()
        departure.leave()
        with pytest.raises(ClientDisconnect):
            await choices.run()

    assert sorted(run(scenario, leaves=True).ended) == [("r0", "abort"), ("r1", "abort")]


def test_a_refused_choice_ends_the_others():
    async def scenario(service, choices, deltas):
        with pytest.raises(RequestError, match="refused"):
            await choices.start()

    assert ("r0", "abort") in run(scenario, refuses="r1").ended


def test_a_stop_string_ends_a_request_before_its_client_sees_the_end():
    async def scenario(service, choices, deltas):
        await choices.start()
        service.sinks["r0"].output(token(0, "ab"))
        assert (deltas[-1].text, deltas[-1].finish_reason, service.ended) == ("a", "stop", [("r0", "stop")])
        service.sinks["r0"].output(token(1))
        assert len(deltas) == 1

    assert run(scenario, count=1).ended == [("r0", "stop")]


def test_an_error_in_the_output_concerns_its_response_alone():
    async def scenario(service, choices, deltas):
        await choices.start()
        service.sinks["r0"].output(TokenOutput(index=0, token_id=7, text=5))
        assert isinstance(choices.failure, TypeError)

    run(scenario)


def test_no_more_choices_start_after_a_failure():
    async def scenario(service, choices, deltas):
        asyncio.get_running_loop().call_soon(choices.fail, InstanceLostError("lost"))
        await choices.start()
        assert len(service.sinks) < 9

    service = run(scenario, count=9)
    assert {request_id for request_id, _ in service.ended} >= set(service.sinks)


def test_other_tasks_run_between_the_starts_of_many():
    async def scenario(service, choices, deltas):
        turns = 0

        async def others():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        other = asyncio.create_task(others())
        await choices.start()
        other.cancel()
        assert turns >= 99

    run(scenario, count=100)


class TextWriter:
    """Sends the text of each token, and a full stop at the end."""

    done = b"."

    def events(self, delta, usage):
        del usage
        return delta.text.encode()

    def error_event(self, error):
        return f"({error})".encode()


def streamed(scenario, takes=lambda _part: True, writer=None, options=None):
    """Run a stream of one choice with `scenario`. Return the parts it wrote itself, and the parts sent by ASGI."""
    written, sent = [], []

    async def main():
        service, plan = Started(), planned(1)
        count = UsageCounter([1], plan)
        stream = EventStream(
            service, plan, time.monotonic() + LATE_S, writer or TextWriter(), options or StreamOptions(), count
        )

        async def send(message):
            if message["type"] == "http.response.body":
                sent.append(message["body"])

        def write(part):
            if takes(part):
                written.append(part)
            return takes(part)

        scope = {"state": {"departure": Departure(), "write": write}}
        running = asyncio.create_task(stream(scope, None, send))
        await turns()
        await scenario(service.sinks["r0"])
        await running

    asyncio.run(main())
    return written, sent


async def turns():
    """Run the event loop until no callback is due."""
    for _ in range(5):
        await asyncio.sleep(0)


async def three_tokens(sink):
    sink.output(token(0, "a"))
    await turns()
    sink.output(token(1, "c"))
    sink.output(token(2, "d"))
    await turns()
    sink.output(token(3, "e"))
    sink.output(token(4, "f", FinishReason.LENGTH))


def test_tokens_that_arrive_at_a_time_are_written_together():
    """The first token begins the body, and the last ones are sent with its end."""
    assert streamed(three_tokens) == ([b"cd"], [b"a", b"ef."])


def test_a_connection_that_takes_no_more_gets_the_rest_by_the_task():
    written, sent = streamed(three_tokens, takes=lambda _part: False)
    assert (written, b"".join(sent)) == ([], b"acdef.")


def test_an_error_follows_the_tokens_before_it():
    async def scenario(sink):
        sink.output(token(0, "a"))
        await turns()
        sink.output(token(1, "c"))
        sink.failed(InstanceLostError("lost"))

    assert streamed(scenario) == ([], [b"a", b"c(lost)"])


SPEC = ResponseSpec(
    id="cmpl-1", arrival=Arrival(request_id="1", monotonic_s=0.0, created=1, key=None), deadline_s=LATE_S, retain_s=0.0
)
WRITERS = {
    "completions": lambda **more: CompletionWriter(
        SPEC, CompletionFields(model="m", prompt="x", **more), LogprobFormat(None), ["x"]
    ),
    "chat": lambda **more: ChatWriter(SPEC, ChatFields(model="m", messages=[], **more), LogprobFormat(None)),
}
TEXTS = ["a", ' "x"', "é\n", "", "c", "d"]


def sent_as(writer, options, texts, *, together):
    """Return the whole stream of these texts, whose tokens arrive one by one or together, between two others."""

    async def scenario(sink):
        sink.output(token(0))
        await turns()
        run = TokenRun(1, [7] * len(texts), texts)
        if together:
            sink.outputs(run)
        else:
            for output in run.outputs():
                sink.output(output)
        await turns()
        sink.output(token(len(texts) + 1, "z", FinishReason.LENGTH))

    written, sent = streamed(scenario, writer=writer, options=options)
    return b"".join([sent[0], *written, *sent[1:]])


@pytest.mark.parametrize("endpoint", WRITERS)
@pytest.mark.parametrize("usage", [{}, {"include_usage": True}, {"continuous_usage_stats": True}], ids=str)
@pytest.mark.parametrize("texts", [TEXTS, [*TEXTS, "b", "e"]], ids=["no stop", "stop"])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["texts", "token ids"])
def test_tokens_that_arrive_together_are_the_same_events(endpoint, usage, texts, more):
    """The outputs end at the stop string b, also in the middle of the tokens that arrive together."""
    one_by_one, together = (
        sent_as(WRITERS[endpoint](**more), StreamOptions(**usage), texts, together=each) for each in (False, True)
    )
    assert together == one_by_one
    assert (b'"stop"' in together) == ("b" in texts)
    assert together.count(b"data: ") > len(TEXTS)


def test_tokens_that_arrive_together_need_no_turn_of_the_event_loop():
    async def scenario(sink):
        sink.output(token(0, "a"))
        await turns()
        sink.outputs(TokenRun(1, [7, 7], ["c", "d"]))
        sink.outputs(TokenRun(3, [7], ["e"]))
        sink.output(token(4, "f", FinishReason.LENGTH))

    written, sent = streamed(scenario, writer=WRITERS["completions"]())
    assert [part.count(b"data: ") for part in written] == [2, 1]
    assert len(sent) == 2
    full, rest = streamed(scenario, takes=lambda _part: False, writer=WRITERS["completions"]())
    assert (full, b"".join(rest)) == ([], b"".join([sent[0], *written, sent[1]]))
