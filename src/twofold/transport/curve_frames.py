"""What travels between the two ends of transport `curve`: questions, answers, and the bytes of KV blocks with either.

The bytes are one frame for the keys and one for the values of each layer, the blocks one after the other in each.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import zmq

from twofold.engine.torch.pool import KvPool, block_runs

Bytes = bytes | memoryview


class Write(msgspec.Struct, frozen=True, tag=True):
    """Put these layers of `source`'s, whose bytes come along, into these blocks of this life of the peer."""

    source: str
    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Answer with these layers of these blocks."""

    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Only answer; bytes come along that mean nothing."""

    epoch: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done; for `Read`, the bytes come along."""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """It is not done, for this reason."""

    reason: str


Question = Write | Read | Probe
Answer = Done | Denied


def gather(pool: KvPool, layers: range, blocks: Sequence[int]) -> list[Bytes]:
    """The bytes of these layers of these blocks, copied."""
    take = torch.tensor(blocks, device=pool.device)
    return [
        part.index_select(0, take).cpu().numpy().reshape(-1).data
        for layer in layers
        for part in pool.block_rows(layer)
    ]


def scatter(pool: KvPool, layers: range, blocks: Sequence[int], frames: Sequence[zmq.Frame]) -> None:
    """Write what `gather` made elsewhere into blocks of a pool in host memory; raises ValueError if it does not fit."""
    parts = [part.numpy() for layer in layers for part in pool.block_rows(layer)]
    rows = [
        np.frombuffer(frame.buffer, dtype=np.uint8).reshape(len(blocks), part.shape[1])
        for part, frame in zip(parts, frames, strict=True)
    ]
    runs = block_runs(range(len(blocks)), blocks)
    for part, row in zip(parts, rows, strict=True):
        for start, target, count in runs:
            part[target : target + count] = row[start : start + count]
