"""Replaying the recorded events of a live run gives the same scheduling decisions."""

import asyncio
import heapq
import random

import msgspec
import pytest

from support.api_client import complete_all
from support.flags import COLOCATED, ENGINE, SPLIT
from twofold.bench.services import served
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PagedBlockAllocator, PrefixBlockAllocator
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.scheduling.routers import ROUTERS
from twofold.serving.telemetry.journal import ENCODER, read_journal


class VirtualRun:
    """Replay of a service's recorded scheduler inputs, which compares every decision with the recorded one."""

    def __init__(self):
        self.cluster = ClusterScheduler(ROUTERS["jsq"](), FixedHandoff(HandoffMode.LAYER_WISE))
        self.instances: dict[str, InstanceScheduler] = {}
        self.placements = {}
        self.batches = {}
        self.decisions = 0
        self.clock = 0.0

    def run(self, journals):
        events = heapq.merge(*(timed(name, entries) for name, entries in journals.items()))
        for at, name, _, entry in events:
            self.clock = at
            decided = getattr(self, f"on_{entry.call}")(name, **entry.args)
            if entry.result is not None:
                assert msgspec.json.decode(ENCODER.encode(decided)) == entry.result, (name, entry.call)
                self.decisions += 1

    def on_instance(
        self,
        name,
        *,
        batcher,
        max_num_batched_tokens,
        max_num_seqs,
        num_blocks,
        block_size,
        epoch,
        lease_s,
        swap_blocks,
        eviction,
        max_pinned,
        **_,
    ):
        blocks = (
            PrefixBlockAllocator(block_size, PrefixCache(num_blocks, create_eviction(eviction), max_pinned=max_pinned))
            if eviction
            else PagedBlockAllocator(num_blocks, block_size)
        )
        leases = LeaseTable(blocks, name, epoch, lease_s)
        made = BATCHERS[batcher](max_num_batched_tokens, max_num_seqs)
        swap = SwapPreemption(blocks, PagedBlockAllocator(swap_blocks, block_size)) if swap_blocks else None
        self.instances[name] = InstanceScheduler(made, blocks, leases, max_num_seqs, swap=swap)

    def on_add_instance(self, _, instance_id, role, capacity_tokens, cell):
        self.cluster.add_instance(instance_id, Role(role), capacity_tokens, cell)

    def on_set_queued(self, _, **args):
        self.cluster.set_queued(**args)

    def on_place(self, _, request):
        request = msgspec.convert(request, Request)
        self.placements[request.id] = request, self.cluster.place(request, self.clock)
        return self.placements[request.id][1]

    def on_submit(self, name, request, **_):
        request, placement = self.placements[request["id"]]
        assert placement.route.prefill == name, "the live route differs"
        self.instances[name].submit(request, decodes_here=not placement.route.splits)

    def on_reserve(self, name, request, **_):
        request, placement = self.placements[request["id"]]
        assert placement.route.decode == name, "the live route differs"
        self.instances[name].reserve(request, placement.route.prefill)

    def on_next_batch(self, name):
        instance = self.instances[name]
        self.batches[name] = instance.next_batch(self.clock)
        if instance.swap is not None:
            instance.swap.take_copies()
        return self.batches[name]

    def on_complete(self, name, stopped):
        return self.instances[name].complete(self.batches[name], stopped)

    def on_filled(self, name, request_id, position, key):
        self.instances[name].filled(request_id, position, msgspec.convert(key, bytes))

    def on_grant(self, name):
        return self.instances[name].grant(self.clock)

    def on_kv_received(self, name, **args):
        return self.instances[name].kv_received(**args)

    def on_end_lease(self, name, **args):
        self.instances[name].end_lease(**args)

    def on_handed_off(self, name, request_id):
        if name in self.instances:
            self.instances[name].handed_off(request_id)
        else:
            self.cluster.handed_off(request_id, self.clock, self.clock)

    def on_abort(self, name, **args):
        self.instances[name].abort(**args)

    def on_first_token(self, _, request_id):
        self.cluster.first_token(request_id, self.clock)

    def on_withdraw(self, _, request_id):
        self.cluster.withdraw(request_id)


def timed(name, entries):
    """Yield the entries of a journal as (time, process name, index, entry), with times that never decrease."""
    latest = 0.0
    for number, entry in enumerate(entries):
        latest = max(latest, entry.at)
        yield latest, name, number, entry


@pytest.mark.covers(engine="torch", feature="journal")
@pytest.mark.parametrize("flags", [SPLIT, COLOCATED], ids=["split", "colocated"])
def test_replaying_a_live_run_takes_the_same_decisions(flags, tiny_model_dir, tmp_path):
    draw = random.Random(3)
    prompts = [[draw.randint(10, 500) for _ in range(draw.randint(1, 700))] for _ in range(60)]
    beginning = [draw.randint(10, 500) for _ in range(200)]
    for prompt in prompts[::3]:  # these reuse cached prefixes
        prompt[:0] = beginning
    with served(tiny_model_dir("llama"), (*ENGINE, *flags, "--journal", str(tmp_path))) as url:
        asyncio.run(
            complete_all(
                url,
                prompts,
                at_once=20,
                spread_s=2.0,
                max_tokens=16,
                temperature=1.0,
                seed=4,
                prompt_cache_retention="24h",
            )
        )
        asyncio.run(complete_all(url, prompts[:10], at_once=3, max_tokens=1, n=2))
    journals = {path.stem: read_journal(path) for path in sorted(tmp_path.glob("*.jsonl"))}
    assert len(journals) == 3, "one for the controller and each worker"
    joined = [entry.args["instance_id"] for log in journals.values() for entry in log if entry.call == "add_instance"]
    assert joined in (["prefill-0", "decode-0"], ["mixed-0", "mixed-1"]), "in the order of the plan, as simulated"
    virtual = VirtualRun()
    virtual.run(journals)
    assert len(virtual.placements) == 80
    assert any(i.shared is not None and i.shared.cache.hits for i in virtual.instances.values())
    # 60 answers of 16 tokens, 20 at once: at least 48 iterations, each started and completed.
    assert virtual.decisions >= 80 + 2 * 48
    assert all(instance.status().idle for instance in virtual.instances.values())


def test_replaying_a_live_run_takes_the_same_swap_decisions(tiny_model_dir, tmp_path):
    draw = random.Random(5)
    prompts = [[draw.randint(10, 500) for _ in range(draw.randint(10, 100))] for _ in range(14)]
    tight = ("--max-model-len", "512", "--kv-cache-memory-bytes", "1536KiB", "--swap-space", "16MiB")
    flags = (*ENGINE, *SPLIT, *tight, "--max-num-seqs", "16", "--journal", str(tmp_path))
    with served(tiny_model_dir("llama"), flags) as url:
        asyncio.run(complete_all(url, prompts, at_once=14, max_tokens=300, ignore_eos=True))
    journals = {path.stem: read_journal(path) for path in sorted(tmp_path.glob("*.jsonl"))}
    virtual = VirtualRun()
    virtual.run(journals)
    assert virtual.instances["decode-0"].status().swaps > 0
    assert all(instance.status().idle for instance in virtual.instances.values())
