"""Devices of workers, and the GPU memory that is left for KV."""

import sys

import pytest
import torch

from twofold.engine.devices import CONTEXT_BYTES, DeviceMemory, GpuBudget, choose_device, place_ranks
from twofold.errors import ConfigurationError
from twofold.serving.worker.torch_parts import measure_memory

GIB = 1 << 30
WORKERS = {"prefill-0": 1, "prefill-1": 1, "decode-0": 1}


def test_auto_is_a_gpu_where_torch_finds_one(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert choose_device("auto") == "cuda"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_device("auto") == "cpu"
    monkeypatch.setattr("torch.version.cuda", None)  # as in torch for ROCm, which the engine does not support
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigurationError, match="needs torch with CUDA"):
        choose_device("cuda:1")


@pytest.mark.parametrize("device", ["tpu", "meta", "gpu:zero"])
def test_rejects_an_unsupported_device(device):
    with pytest.raises(ConfigurationError, match="choose auto, cpu, cuda or cuda:N"):
        choose_device(device)


def test_workers_take_the_gpus_in_turn():
    placed = place_ranks("cuda", WORKERS, gpus=2)
    assert placed == {"prefill-0": ("cuda:0",), "prefill-1": ("cuda:1",), "decode-0": ("cuda:0",)}
    assert place_ranks("cuda", {"a": 2, "b": 2}, gpus=3) == {"a": ("cuda:0", "cuda:1"), "b": ("cuda:2", "cuda:0")}
    assert set(place_ranks("cuda:1", WORKERS, gpus=2).values()) == {("cuda:1",)}
    assert place_ranks("cpu", {"a": 2}, gpus=0) == {"a": ("cpu", "cpu")}


def test_a_worker_needs_a_gpu_for_each_rank():
    with pytest.raises(ConfigurationError, match="so 4, and torch finds 2"):
        place_ranks("cuda", {"a": 1, "b": 4}, gpus=2)


def test_kv_gets_what_weights_and_the_largest_batch_leave_of_the_share():
    alone = DeviceMemory(total=80 * GIB, free=60 * GIB, loaded=16 * GIB, peak=18 * GIB)
    assert GpuBudget(0.9, sys.maxsize).kv_cache_bytes(alone, 1) == 72 * GIB - 18 * GIB - CONTEXT_BYTES
    assert GpuBudget(0.9, sys.maxsize).kv_cache_bytes(alone, 2) == 36 * GIB - 18 * GIB - CONTEXT_BYTES
    assert GpuBudget(0.25, sys.maxsize).kv_cache_bytes(alone, 2) == 0, "the weights are more than the share"
    assert GpuBudget(0.9, 5 * GIB).kv_cache_bytes(alone, 1) == 5 * GIB, "host memory is the limit"


def test_kv_leaves_memory_that_other_processes_use():
    crowded = DeviceMemory(total=80 * GIB, free=10 * GIB, loaded=16 * GIB, peak=18 * GIB)
    assert GpuBudget(0.9, sys.maxsize).kv_cache_bytes(crowded, 1) == 8 * GIB


def test_the_largest_batch_runs_before_memory_is_read(loaded, monkeypatch):
    """A real batch runs, on the CPU; the counters of the GPU are replaced."""
    model, calls = loaded("llama"), []
    forward = model.model.forward
    reserved = iter([100, 170])
    monkeypatch.setattr(model.model, "forward", lambda **named: calls.append(named) or forward(**named))
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _: next(reserved))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (800, 1000))
    assert measure_memory(model, 16, 40, "cpu") == DeviceMemory(total=1000, free=800, loaded=100, peak=170)
    (named,) = calls
    assert named["input_ids"].shape == torch.Size([1, 40])
