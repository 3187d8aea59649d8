"""Requests in a live service: token order, retries and failures."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from twofold.events import PlacedRequest, Route
from twofold.request import FinishReason, Generation, PromptText, Request, SamplingParams, TokenOutput, TokenRun
from twofold.serving.controller.live_request import LiveRequest
from twofold.serving.telemetry.snapshot import AttemptStage

PLACEMENT = PlacedRequest(Request(id="r", arrival_s=0.0, prompt_tokens=3, output_tokens=6), Route("p", "d"))


class NoSink:
    """A sink that takes no output."""


def live(prompt=(7, 8, 9), outputs=6, min_tokens=0):
    request = Request(id="r", arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=outputs)
    sampling = SamplingParams(max_tokens=outputs, seed=5, min_tokens=min_tokens)
    return LiveRequest(Generation(request=request, prompt_token_ids=list(prompt), sampling=sampling), NoSink())


def begin(request):
    request.begin(request.remaining(), PLACEMENT)


def outputs(count, first=100):
    last = count - 1
    return [
        TokenOutput(index=i, token_id=first + i, finish_reason=FinishReason.LENGTH if i == last else None)
        for i in range(count)
    ]


@given(st.permutations(range(6)))
def test_tokens_are_ordered_by_index(order):
    request, tokens = live(), outputs(6)
    begin(request)
    ordered = [output for i in order for output in request.push(tokens[i])]
    assert [output.index for output in ordered] == list(range(6))
    assert ordered[-1].finish_reason is FinishReason.LENGTH


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_tokens_that_arrive_together_count_as_one_by_one(sizes):
    one_by_one, together = live(), live()
    for request in (one_by_one, together):
        begin(request)
        request.push(TokenOutput(index=0, token_id=100))
        request.end_attempt()
        begin(request)
    index = 0
    for size in sizes:
        run = TokenRun(index, list(range(size)), ["a"] * size)
        ordered = together.push_run(run)
        assert list(ordered.outputs()) == [each for one in run.outputs() for each in one_by_one.push(one)]
        index += size
    assert together.next_index == one_by_one.next_index == 1 + index
    assert together.remaining().prompt_token_ids == one_by_one.remaining().prompt_token_ids


def test_tokens_that_arrive_together_out_of_order_are_taken_one_by_one():
    request = live()
    begin(request)
    request.push(TokenOutput(index=0, token_id=100))
    assert request.push_run(TokenRun(2, [102, 103], ["c", "d"])) is None
    request.push(TokenOutput(index=2, token_id=102))
    assert request.push_run(TokenRun(1, [101], ["b"])) is None, "a later token waits"
    assert request.next_index == 1


def test_a_replay_continues_after_the_token_ids_of_a_server():
    """Until a server has sent tokens, the prompt is a text; then, its token ids are those of that server."""
    request = live(prompt=())
    text = PromptText(json=b'"abc"', add_special_tokens=True, skip_special_tokens=True)
    request.generation = msgspec.structs.replace(request.generation, prompt_text=text)
    for _ in range(2):
        begin(request)
        assert (request.current.prompt_text, request.current.prompt_token_ids) == (text, [])
        request.end_attempt()
    begin(request)
    request.tokenized(msgspec.Raw(b"[7, 8, 9]"))
    request.push(TokenOutput(index=0, token_id=100))
    request.end_attempt()
    begin(request)
    assert (request.current.prompt_text, request.current.prompt_token_ids) == (None, [7, 8, 9, 100])
    assert (request.current.request.prompt_tokens, request.current.sampling.max_tokens) == (4, 5)


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 9))
def test_an_attempt_resumes_after_the_last_known_token(made_by_each, min_tokens):
    request = live(outputs=20, min_tokens=min_tokens)
    seen = []
    for number, made in enumerate(made_by_each):
        begin(request)
        generation = request.current
        assert generation.request.id == f"r~{number}"
        assert generation.prompt_token_ids == [7, 8, 9, *(output.token_id for output in seen)]
        assert generation.request.prompt_tokens == len(generation.prompt_token_ids)
        assert generation.request.output_tokens == generation.sampling.max_tokens == 20 - len(seen)
        assert generation.sampling.min_tokens == max(0, min_tokens - len(seen))
        assert generation.sampling.resumed_tokens == len(seen)
        assert generation.sampling.seed == 5
        for output in outputs(20, first=100 + len(seen))[:made]:
            seen += request.push(output)
        request.end_attempt()
    assert [output.index for output in seen] == list(range(len(seen)))
    assert [output.token_id for output in seen] == [100 + i for i in range(len(seen))]


def test_out_of_order_tokens_are_dropped_with_their_attempt():
    request = live()
    begin(request)
    assert request.push(outputs(6)[1]) == []
    request.end_attempt()
    begin(request)
    assert [output.index for output in request.push(outputs(6)[0])] == [0]


def test_failed_attempts_are_counted_until_a_token_arrives():
    request = live()
    for _ in range(3):
        begin(request)
        request.end_attempt()
    assert request.failed_in_a_row == 3
    begin(request)
    request.push(outputs(6)[0])
    request.end_attempt()
    assert request.failed_in_a_row == 0


def test_the_stage_follows_the_attempts_progress():
    request, tokens = live(), outputs(6)
    stages = [request.stage]
    begin(request)
    stages.append(request.stage)
    request.push(tokens[0])
    stages.append(request.stage)
    request.handed_off = True
    stages.append(request.stage)
    request.end_attempt()
    begin(request)
    stages.append(request.stage)
    request.push(tokens[1])  # before the first token of this attempt
    stages.append(request.stage)
    prompt, handoff, decode = AttemptStage
    assert stages == [prompt, prompt, handoff, decode, prompt, decode]
