"""Routing over two cells (groups of instances), one on each host."""

import asyncio
import json
import time

import aiohttp
import pytest

from support.api_client import all_blocks_free, block_counts, complete
from support.joined_service import joined_service

BOTH = ("--prefill", "1", "--decode", "1")
WORKERS = {"prefill-0", "decode-0", "prefill-1", "decode-1"}


@pytest.fixture(scope="module")
def joined(tiny_model_dir, tmp_path_factory):
    flags = (*BOTH, "--router", "cells:jsq", "--log-format", "json")
    folder = tmp_path_factory.mktemp("cells")
    with joined_service(tiny_model_dir("llama"), folder, *flags, there=BOTH) as running:
        end = time.monotonic() + 120
        while set(block_counts(running.url)) != WORKERS and time.monotonic() < end:
            time.sleep(0.2)
        yield running


def routes(log):
    """Yield the prefill and decode instance of each finished request in a service log."""
    for line in log.splitlines():
        fields = json.loads(line) if line.startswith("{") else {}
        if fields.get("prefill_instance"):
            yield fields["prefill_instance"], fields["decode_instance"]


def test_both_phases_of_a_request_run_on_one_host(joined):

    async def ask():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
            asked = [{"prompt": [5 + i, 6, 7] * 40, "max_tokens": 20, "ignore_eos": True} for i in range(12)]
            return await asyncio.gather(*(complete(session, joined.url, **question) for question in asked))

    assert len(asyncio.run(ask())) == 12
    assert asyncio.run(all_blocks_free(joined.url))
    used = set(routes(joined.logged("serve.log")))
    assert used == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}
