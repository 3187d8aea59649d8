"""The parts of a packed batch, each one attention call: decoding sequences in groups, prompts one by one."""

from dataclasses import dataclass
from typing import Protocol

import torch

from twofold.engine.torch.context import Context
from twofold.engine.torch.kernels import Scoring, attend
from twofold.engine.torch.pool import KvPool


class Part(Protocol):
    """Some neighbouring tokens of a packed batch."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query [1, heads, all tokens, dim] and so on → [tokens of this part, heads, value_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each."""

    rows: slice
    pool: KvPool
    context: Context
    mask: torch.Tensor | None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002  (in the pool by now)
        value: torch.Tensor,  # noqa: ARG002
        scoring: Scoring,
    ) -> torch.Tensor:
        keys = self.context.read(self.pool.keys(layer), "keys")
        values = self.context.read(self.pool.values(layer), "values")
        tokens = query[0, :, self.rows].transpose(0, 1).unsqueeze(2)
        return attend(tokens, keys, values, scoring, self.mask).squeeze(2)


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """The beginning of a prompt: it sees itself only, so nothing is read from the pool."""

    rows: slice
    mask: torch.Tensor | None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,  # noqa: ARG002
    ) -> torch.Tensor:
        q, k, v = query[:, :, self.rows], key[:, :, self.rows], value[:, :, self.rows]
        return attend(q, k, v, scoring, self.mask, causal=self.mask is None)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A later piece of a prompt: it sees what came before, which is in the pool."""

    rows: slice
    pool: KvPool
    context: Context
    mask: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002  (in the pool by now)
        value: torch.Tensor,  # noqa: ARG002
        scoring: Scoring,
    ) -> torch.Tensor:
        keys = self.context.read(self.pool.keys(layer), "keys")
        values = self.context.read(self.pool.values(layer), "values")
        return attend(query[:, :, self.rows], keys, values, scoring, self.mask)[0].transpose(0, 1)
