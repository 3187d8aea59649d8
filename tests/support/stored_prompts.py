"""Helpers for tests with KV stores on hosts: send prompts, kill processes, and read the metrics of the stores."""

import os
import random
import signal
import time

import aiohttp

from support.api_client import complete_cached, metric
from support.running_service import named

BLOCK, OUTPUT = 16, 8
BLOCK_BYTES = 24576  # a block of the tiny llama
GREEDY = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


async def ask(url, prompt):
    """Return the greedy output tokens and the number of cached prompt tokens of one completion."""
    async with aiohttp.ClientSession() as session:
        return await complete_cached(session, url, prompt, **GREEDY)


def until(happens):
    for _ in range(1200):
        if happens():
            return
        time.sleep(0.1)
    raise AssertionError("timeout")


def running(process, name):
    """Return the pid of a service's child process with this name."""
    (found,) = named(process, name)
    return found.pid


def kill(process, name):
    """Kill a process of the service and wait for its replacement."""
    before = running(process, name)
    os.kill(before, signal.SIGKILL)
    until(lambda: any(child.pid != before for child in named(process, name)))


def moved(url, way, host="home"):
    """Return the number of blocks that a host's KV store has moved in the direction `way`."""
    return metric(url, f'kv_store_bytes_total{{host="{host}",way="{way}"}}') / BLOCK_BYTES


def hits(url, tier, host="home"):
    return metric(url, f'kv_store_hits_total{{host="{host}",tier="{tier}"}}')


def stored(url, host):
    """Return the number of blocks in the memory tier of a host's KV store."""
    return metric(url, f'kv_store_blocks{{host="{host}",tier="memory"}}')
