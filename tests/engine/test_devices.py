"""Devices of workers, and the GPU memory that is left for KV."""

from pathlib import Path

import pytest
import torch

from twofold.engine.devices import CONTEXT_BYTES, DeviceMemory, choose_device, place_ranks
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.config import WorkerConfig
from twofold.serving.launch.memory_plan import MemoryPlan
from twofold.serving.worker import torch_parts
from twofold.serving.worker.torch_parts import TorchFactory, measure_memory

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
    with pytest.raises(ConfigurationError, match=r"--device cuda: .* so 4, and there are 2"):
        place_ranks("cuda", {"a": 1, "b": 4}, gpus=2)
    with pytest.raises(ConfigurationError, match=r"--device cuda:1: .* so 2, and there are 1"):
        place_ranks("cuda:1", {"a": 2}, gpus=4)
    with pytest.raises(ConfigurationError, match="so 1, and there are 0"):
        place_ranks("cuda", {"a": 1}, gpus=0)


def test_kv_gets_what_weights_and_the_largest_batch_leave_of_the_share():
    alone = DeviceMemory(total=80 * GIB, free=60 * GIB, loaded=16 * GIB, peak=18 * GIB)
    assert alone.for_kv(0.9) == 72 * GIB - 18 * GIB - CONTEXT_BYTES
    assert alone.for_kv(0.45) == 36 * GIB - 18 * GIB - CONTEXT_BYTES
    assert alone.for_kv(0.125) == 0, "the weights are more than the share"


def test_kv_leaves_memory_that_other_processes_use():
    crowded = DeviceMemory(total=80 * GIB, free=10 * GIB, loaded=16 * GIB, peak=18 * GIB)
    assert crowded.for_kv(0.9) == 8 * GIB


def factory(model, devices, *, needs=1, **budget):
    plan = MemoryPlan(layout=model.layout(16), num_blocks=needs, max_model_len=40)
    return TorchFactory(model, "", plan, devices, None, None, Path(), **budget)


def test_a_worker_sizes_its_cache_by_its_gpu(loaded, monkeypatch):
    model, tokens = loaded("llama"), []
    per_block = model.layout(16).bytes_per_block
    seen = DeviceMemory(total=3 * GIB, free=3 * GIB, loaded=0, peak=0)
    monkeypatch.setattr(torch_parts, "measure_memory", lambda _m, _b, count, _d: tokens.append(count) or seen)
    specs = {
        batcher: WorkerConfig(instance="a", role=Role.MIXED, batcher=batcher, max_num_batched_tokens=32)
        for batcher in ("chunked-prefill", "prefill", "decode")
    }
    alone, pair = {"a": ("cuda:0",)}, {"a": ("cuda:0",), "b": ("cuda:0",)}
    for spec in specs.values():
        assert factory(model, alone, utilization=0.5)._num_blocks(spec, model, "cuda:0") == GIB // 2 // per_block
    assert tokens == [32, 40, 32], "the largest batch: whole prompts unless they are cut"
    spec = specs["decode"]
    assert factory(model, pair, utilization=0.8)._num_blocks(spec, model, "cuda:0") == int(0.2 * GIB) // per_block
    few = factory(model, alone, utilization=0.5, most_bytes=9 * per_block)
    assert few._num_blocks(spec, model, "cuda:0") == 9, "the copy in host memory is the limit"
    assert factory(model, alone, needs=7)._num_blocks(spec, model, "cuda:0") == 7, "by the plan"
    with pytest.raises(ConfigurationError, match="lower --max-model-len or raise --gpu-memory-utilization"):
        factory(model, alone, needs=1 << 40, utilization=0.5)._num_blocks(spec, model, "cuda:0")


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
