"""Checksums of KV blocks, so that what arrives can be compared with what left."""

import zlib
from collections.abc import Sequence

import torch

from twofold.engine.torch.pool import KvPool


def add_checksums(pool: KvPool, layers: range, blocks: Sequence[int], sums: list[int]) -> None:
    """Go on with the checksum (CRC-32) of each block over these layers; `sums` has one entry per block, 0 at first."""
    with pool.copying():
        for layer in layers:
            for part in pool.block_rows(layer):
                rows = part.index_select(0, torch.tensor(blocks, device=part.device)).cpu().numpy()
                for place, row in enumerate(rows):
                    sums[place] = zlib.crc32(row, sums[place])
