"""A service on two emulated hosts; the tests cut the link between the hosts."""

import asyncio

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete, served_name
from support.flags import COLOCATED
from support.joined_service import joined_service
from support.transports import MOONCAKE, NIXL

QUESTIONS = [
    {"prompt": [5 + i, 6, 7] * (30 * i + 20), "max_tokens": 30, "temperature": i % 2, "seed": i, "ignore_eos": True}
    for i in range(8)
]
SLOW_BITS_PER_S = 4_000_000  # the KV of all questions takes seconds
CLIENT = aiohttp.ClientTimeout(total=900)


async def ask(url):
    """Send all test prompts to the service at once and return their output tokens."""
    async with aiohttp.ClientSession(timeout=CLIENT) as session:
        return await asyncio.gather(*(complete(session, url, **question) for question in QUESTIONS))


@pytest.fixture(scope="module")
def expected(service):
    """Return the outputs of colocated workers on one host for the test prompts."""
    return asyncio.run(ask(service("llama", COLOCATED)))


NIXL_FLAGS = ("--transport", "nixl")
MOONCAKE_FLAGS = ("--transport", "mooncake")
# Workers on this and the other host, flags of the service, and duration of the cut in seconds.
KINDS = {
    "curve": (("--prefill", "1", "--decode", "0"), ("--decode", "1"), (), (0.5, 3.0, 8.0)),
    "pull": (("--prefill", "1", "--decode", "0"), ("--decode", "1"), ("--handoff", "pull"), (3.0,)),
    "from there": (("--prefill", "0", "--decode", "1"), ("--prefill", "1"), (), (3.0, 8.0)),
    "nixl": (("--prefill", "0", "--decode", "1"), ("--prefill", "1"), NIXL_FLAGS, (3.0, 8.0)),
    "mooncake": (("--prefill", "0", "--decode", "1"), ("--prefill", "1"), MOONCAKE_FLAGS, (3.0, 8.0)),
}


ONE_SIDED = (pytest.param("nixl", marks=NIXL), pytest.param("mooncake", marks=MOONCAKE))


@pytest.fixture(scope="module", params=["curve", "pull", "from there", *ONE_SIDED])
def running(request, hosts, tiny_model_dir, tmp_path_factory):
    """Yield a service with prefill and decode on different hosts, for each transport and hand-off mode."""
    here, there, flags, cuts_s = KINDS[request.param]
    folder, model = tmp_path_factory.mktemp("hosts"), tiny_model_dir("llama")
    with joined_service(model, folder, *here, *flags, "--kv-checksums", there=there, hosts=hosts) as made:
        made.cuts_s, made.writes_outlive_lease = cuts_s, flags in (NIXL_FLAGS, MOONCAKE_FLAGS)
        yield made


async def with_cable_cut(running, expected, *, after_s, for_s):
    """Cut the link between the hosts while requests run, and check the outputs."""
    asked = asyncio.create_task(ask(running.url))
    await asyncio.sleep(after_s)
    running.hosts.cut()
    await asyncio.sleep(for_s)
    running.hosts.restore()
    assert await asked == expected


@pytest.mark.covers(
    engine="torch", model="llama", transport=("curve", "nixl", "mooncake"), feature=("handoff", "hosts")
)
def test_a_cut_link_changes_no_answer(running, expected):
    for for_s in running.cuts_s:
        assert asyncio.run(ask(running.url)) == expected
        cut_while_busy(running, expected, for_s)
    assert asyncio.run(ask(running.url)) == expected
    assert asyncio.run(all_blocks_free(running.url))
    # Without epochs on writes, the target of late writes restarts as well.
    assert ("may yet arrive in its memory" in running.logged("serve.log")) == running.writes_outlive_lease


def cut_while_busy(running, expected, for_s):
    """Cut the link between the hosts during a KV transfer."""
    running.hosts.limit(SLOW_BITS_PER_S)  # so that the transfer lasts until the cut
    try:
        asyncio.run(with_cable_cut(running, expected, after_s=0.4, for_s=for_s))
    finally:
        running.hosts.restore()


def test_deadlines_hold_while_the_link_is_cut(running):
    async def hasty(session, name, question):
        body = {"model": name, "timeout": 4, **question}
        async with session.post(f"{running.url}/v1/completions", json=body) as response:
            await response.read()
            return response.status

    async def watch():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            name = await served_name(session, running.url)
            asked = [asyncio.create_task(hasty(session, name, question)) for question in QUESTIONS]
            await asyncio.sleep(0.2)
            running.hosts.cut()
            try:
                return await asyncio.gather(*asked)
            finally:
                running.hosts.restore()

    assert set(asyncio.run(watch())) <= {200, 504}
    assert asyncio.run(all_blocks_free(running.url))
