"""Workers are killed, stopped and held up at random under load, and no client notices.

TWOFOLD_CHAOS_ROUNDS says how often one is hit; without it, each role once in each way. `-rP` shows what was hit.
"""

import asyncio
import os

import pytest

from support.api_client import all_blocks_free
from support.chaos import Chaos, Hit
from support.flags import ENGINE
from support.held import comes_back_to, holdings
from support.running_service import running_service
from support.transports import NIXL

SPLIT = ("prefill", "decode")
PULLED = ("--handoff", "pull", "--kv-checksums")
SOON = ("--max-restart-delay", "1")  # one that is killed a hundred times would be left alone for long
# KV of a prompt of 150 tokens, as many as there are on average, takes a second; all else is quick.
SLOW_LINKS = """
model: opt-1.3b
router: jsq
handoff: layer-wise
performance: roofline
link_bytes_per_s: 3.0e+7
pools:
  - {machines: 2, machine: dgx-a100, tensor_parallel: 8, role: prefill}
  - {machines: 1, machine: dgx-a100, tensor_parallel: 8, role: decode}
"""


def check(process, url, roles):
    """Every stream is whole and the same, and in the end nothing is held: blocks, memory, sockets, processes."""
    rounds = int(os.environ.get("TWOFOLD_CHAOS_ROUNDS", len(roles) * len(Hit)))
    chaos = Chaos(process, url, roles)
    asyncio.run(chaos.learn())
    before = holdings(process)
    asyncio.run(asyncio.wait_for(chaos.run(rounds), 600 + 120 * rounds))
    print(chaos.report())
    assert chaos.wrong == []
    assert sum(chaos.hits.values()) == rounds
    assert asyncio.run(all_blocks_free(url))
    assert comes_back_to(process, before) == {}, "(before, after)"


@pytest.mark.parametrize(
    ("roles", "flags"),
    [
        (SPLIT, ("--prefill", "2", "--decode", "1")),
        (SPLIT, ("--prefill", "1", "--decode", "1", "--router", "splitwise")),
        (("mixed",), ("--colocated", "2")),
        pytest.param(SPLIT, ("--prefill", "1", "--decode", "2", *PULLED, "--transport", "nixl"), marks=NIXL),
    ],
    ids=["split", "roles move", "colocated", "pulled over nixl"],
)
def test_no_client_notices_what_happens_to_workers(roles, flags, tiny_model_dir):
    """Prefill, decode and mixed workers."""
    with running_service(tiny_model_dir("llama"), *ENGINE, *SOON, *flags) as (process, url):
        check(process, url, roles)


def test_no_client_notices_where_hand_offs_take_seconds(tmp_path):
    """Most of what is hit is in a hand-off, on its way or in the queue for the link."""
    file = tmp_path / "cluster.yaml"
    file.write_text(SLOW_LINKS)
    with running_service(None, "--engine", "emulated", "--cluster", str(file), *SOON) as (process, url):
        check(process, url, SPLIT)
