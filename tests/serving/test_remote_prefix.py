"""Prefixes fetched from the KV store of another host."""

import asyncio
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from support.api_client import all_blocks_free, block_counts, complete_all, complete_cached, metric
from support.hosts import TIMES, profile
from support.joined_service import joined_service
from support.reference import greedy_outputs
from support.stored_prompts import BLOCK, GREEDY, OUTPUT, ask, hits, kill, moved, running, stored, tokens
from support.waiting import until
from twofold.hardware.hf_config import read_model
from twofold.performance.profile import dump_profile

FETCHING = Path(__file__).parents[2] / "bench" / "mooncake" / "serve_fetching.py"
STORE = ("--kv-store-dram", "4MiB")
IN_TURN = ("--colocated", "1", "--router", "round-robin", "--kv-checksums")


class TwoHosts:
    """Two hosts with a worker and a KV store each."""

    def __init__(self, joined):
        self.url = joined.url
        self._processes = {"home": joined.service, "other": joined.host}
        self._workers = {"home": "mixed-0", "other": "mixed-1"}
        until(lambda: len(block_counts(self.url)) == 2)

    def asked(self, prompt):
        return asyncio.run(ask(self.url, prompt))

    def with_blocks(self, count):
        """Wait until both stores together have `count` blocks; return the hosts, the one with more blocks first."""
        until(lambda: sum(stored(self.url, host) for host in self._processes) == count)
        return sorted(self._processes, key=lambda host: -stored(self.url, host))

    def kill_worker(self, host):
        kill(self._processes[host], self._workers[host])

    def kill_store(self, host):
        kill(self._processes[host], "store")

    def store(self, host):
        """Return the pid of a host's KV store."""
        return running(self._processes[host], "store")


@contextmanager
def two_hosts(model, folder, *flags):
    there = ("--colocated", "1", *STORE)
    with joined_service(model, folder, *IN_TURN, *STORE, *flags, there=there, program=FETCHING) as joined:
        yield TwoHosts(joined)


@pytest.mark.covers(engine="torch", model="llama", feature=("remote-store", "hosts"))
def test_the_same_tokens_from_a_remote_store_and_its_copy(tiny_model_dir, tmp_path):
    prompt = tokens("remote", 40 * BLOCK + 5)
    (expected,) = greedy_outputs(tiny_model_dir("llama"), [prompt], OUTPUT)
    with two_hosts(tiny_model_dir("llama"), tmp_path) as hosts:
        url = hosts.url
        assert hosts.asked(prompt) == (expected, 0)
        source, target = hosts.with_blocks(40)
        assert hosts.asked(prompt) == (expected, 40 * BLOCK), "the other host is next"
        until(lambda: moved(url, "peer_read", target) == moved(url, "peer_sent", source) == 40)
        until(lambda: stored(url, target) == hits(url, "memory", target) == hits(url, "memory", source) == 40)
        # The killed worker loses its engine memory; its host's store keeps the fetched blocks.
        hosts.kill_worker(target)
        until(lambda: hosts.asked(prompt) == (expected, 40 * BLOCK) and hits(url, "memory", target) == 80)
        assert moved(url, "peer_read", target) == moved(url, "peer_sent", source) == 40
        assert asyncio.run(all_blocks_free(url))


def test_the_conductor_fetches_from_a_busy_host(tiny_model_dir, tmp_path):
    """If the host with a cached prefix is busy, another host fetches the prefix and runs the prompt."""
    model, path = tiny_model_dir("llama"), tmp_path / "host.yaml"
    slow = replace(profile(), model=read_model(model), times=TIMES.slower(10.0))  # 10 ms a token
    path.write_text(dump_profile(slow))
    begin = tokens("conducted", 40 * BLOCK)
    burst = [begin + tokens(f"own {number}", 200) for number in range(8)]
    expected = greedy_outputs(model, [begin, *burst], OUTPUT)
    routed = ("--prefill", "1", "--decode", "1", "--router", "conductor", "--profile", str(path), *STORE)
    with joined_service(model, tmp_path, *routed, there=("--prefill", "1", *STORE)) as joined:
        url = joined.url
        until(lambda: len(block_counts(url)) == 3)
        assert asyncio.run(ask(url, begin)) == (expected[0], 0)
        until(lambda: stored(url, "home") + stored(url, "other") == 40)

        async def at_once():
            return await asyncio.gather(*(ask(url, prompt) for prompt in burst))

        assert asyncio.run(at_once()) == [(output, 40 * BLOCK) for output in expected[1:]]
        assert metric(url, 'prefill_routes_total{reuse="fetched"}') > 0
        until(lambda: moved(url, "peer_read", "home") + moved(url, "peer_read", "other") == 40)
        until(lambda: stored(url, "home") >= 40 and stored(url, "other") >= 40)
        assert asyncio.run(all_blocks_free(url))


def test_a_turn_fetches_the_last_answer_from_the_decode_host(tiny_model_dir, tmp_path):
    model, path = tiny_model_dir("llama"), tmp_path / "host.yaml"
    path.write_text(dump_profile(replace(profile(), model=read_model(model), times=TIMES.slower(10.0))))
    first = tokens("turn", 40 * BLOCK - 3)
    (answer,) = greedy_outputs(model, [first], OUTPUT)
    next_turn = first + answer + tokens("new", 20)
    (expected,) = greedy_outputs(model, [next_turn], OUTPUT)
    routed = ("--prefill", "1", "--decode", "1", "--router", "conductor", "--profile", str(path), *STORE)
    with joined_service(model, tmp_path, *routed, there=("--decode", "1", *STORE)) as joined:
        url = joined.url
        until(lambda: len(block_counts(url)) == 3)

        def decoding(blocks):
            return blocks["free"] < blocks["total"]

        async def turn_beside_another_request():
            async with aiohttp.ClientSession() as session:
                long = {**GREEDY, "max_tokens": 1500}
                other = asyncio.create_task(complete_cached(session, url, tokens("long", 20), **long))
                await asyncio.to_thread(until, lambda: decoding(block_counts(url)["decode-0"]))
                told = await ask(url, first)  # decodes on the other host, where less memory is reserved
                other.cancel()
                return told

        assert asyncio.run(turn_beside_another_request()) == (answer, 0)
        until(lambda: stored(url, "home") >= 39 and stored(url, "other") == 40)
        assert asyncio.run(ask(url, next_turn)) == (expected, 40 * BLOCK)
        until(lambda: moved(url, "peer_read", "home") == moved(url, "peer_sent", "other") == 1)
        assert asyncio.run(all_blocks_free(url))


def test_a_prompt_is_computed_when_its_fetch_fails(tiny_model_dir, tmp_path):
    prompt = tokens("killed", 40 * BLOCK + 5)
    (expected,) = greedy_outputs(tiny_model_dir("llama"), [prompt], OUTPUT)
    with two_hosts(tiny_model_dir("llama"), tmp_path) as hosts:
        assert hosts.asked(prompt) == (expected, 0)
        source, target = hosts.with_blocks(40)

        async def watch():
            store = hosts.store(source)
            os.kill(store, signal.SIGSTOP)
            asked = asyncio.create_task(ask(hosts.url, prompt))
            await asyncio.sleep(2.0)
            assert not asked.done(), "the request must wait for the fetch"
            os.kill(store, signal.SIGKILL)
            return await asked

        assert asyncio.run(watch()) == (expected, 0)
        until(lambda: stored(hosts.url, target) == 40)
        assert moved(hosts.url, "peer_read", target) == 0
        assert asyncio.run(all_blocks_free(hosts.url))


def test_requests_survive_killed_stores(tiny_model_dir, tmp_path):
    begin = tokens("begin", 10 * BLOCK)
    prompts = [begin + tokens(f"end {number % 12}", 12 * BLOCK) for number in range(60)]
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
    tight = ("--max-model-len", "512", "--kv-cache-memory-bytes", "1536KiB")
    with two_hosts(tiny_model_dir("llama"), tmp_path, *tight) as hosts:

        async def run():
            asked = asyncio.create_task(complete_all(hosts.url, prompts, at_once=6, spread_s=6.0, **GREEDY))
            while not asked.done():
                for host in ("home", "other"):
                    await asyncio.sleep(0.7)
                    await asyncio.to_thread(hosts.kill_store, host)
            return await asked

        assert asyncio.run(run()) == expected
        for _ in range(3):
            assert asyncio.run(complete_all(hosts.url, prompts[:12], at_once=6, **GREEDY)) == expected[:12]
        until(lambda: sum(moved(hosts.url, "peer_read", host) for host in ("home", "other")) > 0)
        assert asyncio.run(all_blocks_free(hosts.url))
