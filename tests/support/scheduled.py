"""Helpers for tests of instance schedulers: create schedulers and requests, and run single iterations."""

from twofold.kvcache.allocator import BlockAllocator, LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.batcher import Batcher
from twofold.scheduling.instance.queues import StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation
from twofold.scheduling.instance.swap_preemption import SwapPreemption

EPOCH = 3


def scheduler(
    batcher: str | Batcher,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    budget: int = 2048,
    memory: KvReservation = FULL_RESERVATION,
    accounts: type[BlockAllocator] = PagedBlockAllocator,
    swap_blocks: int = 0,
    step_tokens: int = 4,
) -> InstanceScheduler:
    blocks = accounts(num_blocks, block_size)
    leases = LeaseTable(blocks, "instance", EPOCH, lease_s=10.0)
    made = BATCHERS[batcher](budget, max_num_seqs) if isinstance(batcher, str) else batcher
    swap = SwapPreemption(blocks, accounts(swap_blocks, block_size), step_tokens) if swap_blocks else None
    return InstanceScheduler(made, blocks, leases, max_num_seqs, memory, swap)


def request(name: str, prompt: int = 10, output: int = 3, arrival_s: float = 0.0) -> Request:
    return Request(id=name, arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)


def arrive(instance: InstanceScheduler, made: Request, source: str = "p") -> None:
    """Hand off a prefilled request to a decode instance."""
    assert instance.lease_now(made, source, 0.0) is not None
    assert instance.kv_received(made.id, EPOCH)


def step(instance: InstanceScheduler, stopped: tuple[str, ...] | set[str] = ()) -> list[StepResult]:
    """Run one iteration of an instance scheduler, and return the results of the iteration."""
    batch = instance.next_batch(0.0)
    assert batch is not None
    return instance.complete(batch, stopped)


def ran(instance: InstanceScheduler) -> list[str]:
    """Run one iteration of an instance scheduler, and return the ids of the requests in its batch."""
    batch = instance.next_batch(0.0)
    assert batch is not None
    instance.complete(batch)
    return [item.request_id for item in batch.items]
