"""Helpers for tests with a KV store on each host: send prompts, kill processes, and read metrics of the stores."""

import os
import random
import signal

import aiohttp

from support.api_client import complete_cached, metric
from support.running_service import named
from support.waiting import until

BLOCK, OUTPUT = 16, 8
BLOCK_BYTES = 24576  # a block of the tiny llama
GREEDY = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


async def ask(url, prompt):
    """Send a prompt; return the greedy output tokens and the number of cached prompt tokens."""
    async with aiohttp.ClientSession() as session:
        return await complete_cached(session, url, prompt, **GREEDY)


def running(process, name):
    """Return the pid of the child process `name` of a service."""
    (found,) = named(process, name)
    return found.pid


def kill(process, name):
    """Kill the child process `name` of a service and wait until another process has replaced it."""
    before = running(process, name)
    os.kill(before, signal.SIGKILL)
    until(lambda: any(child.pid != before for child in named(process, name)))


def moved(url, way, host="home"):
    """Return how many blocks a host's KV store has moved; `way` is for example `peer_read` or `disk_written`."""
    return metric(url, f'kv_store_bytes_total{{host="{host}",way="{way}"}}') / BLOCK_BYTES


def hits(url, tier, host="home"):
    return metric(url, f'kv_store_hits_total{{host="{host}",tier="{tier}"}}')


def stored(url, host):
    """Return the number of blocks stored in the memory tier of a host's KV store."""
    return metric(url, f'kv_store_blocks{{host="{host}",tier="memory"}}')
