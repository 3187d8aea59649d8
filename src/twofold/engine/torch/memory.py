"""Measures the GPU memory that is left for KV once a model is loaded."""

import torch

from twofold.engine.base import SequenceStep
from twofold.engine.devices import DeviceMemory
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel
from twofold.engine.torch.pool import KvPool


def measure_memory(model: LoadedModel, block_size: int, tokens: int, device: str) -> DeviceMemory:
    """Run a prompt of `tokens` tokens, the largest batch, on the GPU with the weights, and return its memory."""
    place, cuda = torch.device(device), torch.cuda
    cuda.reset_peak_memory_stats(place)
    loaded, blocks = cuda.memory_reserved(place), -(-tokens // block_size)
    engine = TorchEngine(model, KvPool(model.layout(block_size), blocks, device=device))
    engine.run([SequenceStep("", [0] * tokens, start=0, block_table=tuple(range(blocks)), sampling=None)])
    del engine
    peak = cuda.max_memory_reserved(place)
    cuda.empty_cache()
    free, total = cuda.mem_get_info(place)
    return DeviceMemory(total, free, loaded, peak)
