"""The parts of a packed batch, each one attention call: decoding sequences in groups, prompts one by one."""

from dataclasses import dataclass
from typing import Protocol

import torch

from twofold.engine.torch.context import Context
from twofold.engine.torch.kernels import Scoring, attend
from twofold.engine.torch.pool import KvPool


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer hands over for all tokens: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, …]."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring


class Part(Protocol):
    """Some neighbouring tokens of a packed batch."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """[tokens of this part, heads, value_dim]; the keys and values of `call` are in the pool by now."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each."""

    rows: slice
    pool: KvPool
    context: Context
    mask: torch.Tensor | None

    def attend(self, call: LayerCall) -> torch.Tensor:
        keys = self.context.read(self.pool.keys(call.layer), "keys")
        values = self.context.read(self.pool.values(call.layer), "values")
        tokens = call.query[0, :, self.rows].transpose(0, 1).unsqueeze(2)
        return attend(tokens, keys, values, call.scoring, self.mask).squeeze(2)


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """The beginning of a prompt: it sees itself only, so nothing is read from the pool."""

    rows: slice
    mask: torch.Tensor | None

    def attend(self, call: LayerCall) -> torch.Tensor:
        query, key, value = (states[:, :, self.rows] for states in (call.query, call.key, call.value))
        mixed = attend(query, key, value, call.scoring, self.mask, causal=self.mask is None)
        return mixed[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A later piece of a prompt: it sees what came before, which is in the pool."""

    rows: slice
    pool: KvPool
    context: Context
    mask: torch.Tensor

    def attend(self, call: LayerCall) -> torch.Tensor:
        keys = self.context.read(self.pool.keys(call.layer), "keys")
        values = self.context.read(self.pool.values(call.layer), "values")
        return attend(call.query[:, :, self.rows], keys, values, call.scoring, self.mask)[0].transpose(0, 1)
