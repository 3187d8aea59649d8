"""Merging several asynchronous generators."""

import asyncio
from contextlib import aclosing

import pytest

from twofold.serving.gateway.streaming import interleave


async def count(upto, closed, fail=None, wait_for=None):
    try:
        for number in range(upto):
            await asyncio.sleep(0)
            yield number
        if fail is not None:
            raise fail
        if wait_for is not None:
            await wait_for.wait()
    finally:
        closed.append(upto)


async def collect(generator):
    async with aclosing(generator):
        return [item async for item in generator]


@pytest.mark.parametrize("sizes", [[3], [2, 0, 5], [1] * 50])
def test_yields_every_item_once(sizes):
    closed = []
    items = asyncio.run(collect(interleave([count(size, closed) for size in sizes])))
    assert sorted(items) == sorted(number for size in sizes for number in range(size))
    assert sorted(closed) == sorted(sizes)


def test_an_error_closes_all_sources():

    async def scenario():
        closed = []
        never = asyncio.Event()
        sources = [count(1, closed, wait_for=never), count(2, closed, fail=OSError("gone"))]
        with pytest.raises(OSError, match="gone"):
            await collect(interleave(sources))
        return closed

    assert sorted(asyncio.run(scenario())) == [1, 2]


@pytest.mark.parametrize("sources", [1, 3])
def test_closing_closes_the_sources(sources):
    """When `aclose` of the merged generator returns, every source has run its finally block."""

    async def scenario():
        closed = []
        never = asyncio.Event()
        merged = interleave([count(1, closed, wait_for=never) for _ in range(sources)])
        for _ in range(sources):
            await anext(merged)
        await merged.aclose()
        return closed

    assert asyncio.run(scenario()) == [1] * sources


def test_other_tasks_run_between_the_starts_of_many_sources():

    async def scenario():
        turns = 0

        async def others():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        other = asyncio.create_task(others())
        closed = []
        async with aclosing(interleave([count(1, closed) for _ in range(100)])) as merged:
            await anext(merged)
        other.cancel()
        return turns

    assert asyncio.run(scenario()) >= 100
