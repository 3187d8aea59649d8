"""Callbacks and copies on GPU streams."""

import threading

import pytest
import torch

from support.device import DEVICE
from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, LayerNotifier, PinnedMemory

GPU_OR_CPU = torch.device(DEVICE)
ON_GPU = pytest.mark.skipif(GPU_OR_CPU.type != "cuda", reason="on a CPU nothing is queued")


def busy(rounds=40):
    """Queue matrix products that keep a GPU busy for some milliseconds; return their result."""
    numbers = torch.ones(2048, 2048, device=DEVICE)
    for _ in range(rounds):
        numbers = (numbers @ numbers) / 2048
    return numbers


def pool():
    return KvPool(KvLayout((LayerShape(1, 1, 1),), block_size=1, dtype="float32", itemsize=4), 1, device=DEVICE)


def test_calls_are_made_in_order_and_before_finish_returns():
    announcer, seen = LayerNotifier(GPU_OR_CPU), []
    for number in range(5):
        busy(rounds=1)
        announcer.after(lambda number=number: seen.append(number))
    announcer.finish()
    assert seen == [0, 1, 2, 3, 4]
    announcer.finish()
    assert len(seen) == 5


def test_on_a_cpu_a_call_is_made_at_once():
    seen = []
    LayerNotifier(torch.device("cpu")).after(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]


def test_copies_are_complete_on_exit():
    """Asynchronous copies inside a `with copying()` block are complete when the block exits."""
    source, target = torch.arange(1000, device=DEVICE), torch.zeros(1000, dtype=torch.long)
    with pool().copying():
        target.copy_(source, non_blocking=True)
    assert target.tolist() == list(range(1000))


def test_pinned_memory_can_be_pinned_again():
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    first = PinnedMemory(memory, GPU_OR_CPU)
    second = PinnedMemory(memory, GPU_OR_CPU)  # the device refuses to register the memory twice
    memory.copy_(torch.full((1 << 16,), 7, dtype=torch.uint8, device=DEVICE))
    assert memory.sum() == 7 << 16
    for each in (second, first, first):
        each.close()
    again = PinnedMemory(memory, GPU_OR_CPU)
    assert again.pinned == (GPU_OR_CPU.type == "cuda")
    again.close()


@ON_GPU
def test_a_call_waits_for_earlier_work_only():
    """A callback runs when all earlier device work is done, without waiting for later work."""
    announcer, told = LayerNotifier(GPU_OR_CPU), threading.Event()
    done = torch.cuda.Event()
    busy(rounds=1)
    torch.cuda.synchronize()
    result = busy()
    done.record()
    announcer.after(told.set)
    behind = torch.cuda.Event()
    busy(rounds=4000)
    behind.record()
    assert told.wait(600)
    assert done.query()
    assert not behind.query()
    assert float(result[0, 0]) == 1.0
    announcer.finish()
    assert behind.query()


@ON_GPU
def test_copies_do_not_wait_for_queued_work():
    other, source = pool(), torch.arange(1000, device=DEVICE)
    torch.cuda.synchronize()
    busy(rounds=4000)
    behind = torch.cuda.Event()
    behind.record()
    target = torch.zeros(1000, dtype=torch.long)
    with other.copying():
        target.copy_(source)
    assert not behind.query()
    assert target[-1] == 999
    torch.cuda.synchronize()
