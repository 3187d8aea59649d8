"""Where the earlier tokens of sequences lie in the pool, and how their keys and values are read."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Scratch:
    """Memory that gathered keys and values are read into, reused from layer to layer and batch to batch.

    Fresh memory for each read would cost more in page faults than the copying itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] in the dtype and on the device of `like`; overwritten by the next take of `name`."""
        count = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = torch.empty(count, dtype=like.dtype, device=like.device)
        return buffer[:count].view(rows, columns)


class Context(Protocol):
    """Some positions of one or more sequences, the same number of each."""

    def read(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """`part` [num_blocks, block_size, kv_heads, dim] of a layer → [sequences, kv_heads, positions, dim].

        The result is valid until the next read under the same `name`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence whose blocks are neighbours: nothing needs to be copied."""

    first_slot: int
    length: int

    def read(self, part: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002  (no buffer is needed)
        slots = part.view(-1, part.shape[2], part.shape[3])
        return slots[self.first_slot : self.first_slot + self.length].transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Gather:
    """Sequences whose blocks lie anywhere; all are padded to the same number of blocks.

    `blocks` is [sequences · blocks each]; of the positions in them, `length` from `first` on are read. `padding`
    are those positions, counted over all sequences, that belong to none: what lies there may be anything, even
    not a number, so it is set to 0 after reading.
    """

    blocks: torch.Tensor
    sequences: int
    first: int
    length: int
    padding: torch.Tensor | None
    scratch: Scratch

    def read(self, part: torch.Tensor, name: str) -> torch.Tensor:
        kv_heads, dim = part.shape[2:]
        rows = part.view(part.shape[0], -1)
        out = self.scratch.take(name, part, len(self.blocks), rows.shape[1])
        torch.index_select(rows, 0, self.blocks, out=out)
        if self.padding is not None:
            out.view(-1, kv_heads * dim).index_fill_(0, self.padding, 0)
        gathered = out.view(self.sequences, -1, kv_heads, dim)
        return gathered[:, self.first : self.first + self.length].transpose(1, 2)
