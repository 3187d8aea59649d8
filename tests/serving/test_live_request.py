"""Tokens of a live request."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import InstanceLostError
from twofold.request import FinishReason, TokenOutput
from twofold.scheduling.cluster import Placement
from twofold.scheduling.router import Route
from twofold.serving.live_request import LiveRequest


def live():
    return LiveRequest("r", Placement(Route("p", "d"), None))


def outputs(count):
    last = count - 1
    return [
        TokenOutput(index=i, token_id=i, finish_reason=FinishReason.LENGTH if i == last else None)
        for i in range(count)
    ]


@given(st.permutations(range(6)))
def test_tokens_come_out_in_order_however_they_arrive(order):
    """The second token may overtake the first, which comes from another process."""

    async def collect():
        request, tokens = live(), outputs(6)
        ordered = [output for i in order for output in request.push(tokens[i])]
        assert [output.index for output in ordered] == list(range(6))
        assert ordered[-1].finish_reason is FinishReason.LENGTH
        return [(await request.next()).index for _ in range(6)]

    assert asyncio.run(collect()) == list(range(6))


def test_a_failure_is_raised_after_the_tokens_that_are_there():
    """Nothing that was made is lost; nobody waits for ever."""

    async def fail():
        request = live()
        request.push(outputs(3)[0])
        request.fail("the worker ended")
        assert (await request.next()).index == 0
        with pytest.raises(InstanceLostError, match="the worker ended"):
            await request.next()

    asyncio.run(fail())
