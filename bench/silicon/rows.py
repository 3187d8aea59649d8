"""Rows of `silicon_sample.csv` in aiconfigurator-core: measured deployments of public benchmark runs."""

import csv
import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files

import msgspec
from msgspec.structs import replace

from twofold.instance import Role
from twofold.performance.aiconfigurator import EngineLayout

_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")
# Other names of the sample's models in the package's configurations.
_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
_PREFIXES = {Role.MIXED: "", Role.PREFILL: "prefill_", Role.DECODE: "decode_"}  # of the columns of a role


class SiliconRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured deployment; times in milliseconds, lengths in tokens."""

    id: str
    silicon_data_source: str
    backend: str
    model_path: str
    system: str
    mode: str  # agg or disagg
    isl: int
    osl: int
    gemm_quant_mode: str | None = None
    moe_quant_mode: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    attention_dp_size: int | None = None
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    prefill_num_workers: int | None = None
    prefill_tp_size: int | None = None
    prefill_pp_size: int | None = None
    prefill_attention_dp_size: int | None = None
    prefill_moe_tp_size: int | None = None
    prefill_moe_ep_size: int | None = None
    decode_num_workers: int | None = None
    decode_tp_size: int | None = None
    decode_pp_size: int | None = None
    decode_attention_dp_size: int | None = None
    decode_moe_tp_size: int | None = None
    decode_moe_ep_size: int | None = None
    silicon_ttft_ms: float
    silicon_tpot_ms: float

    @property
    def concurrency(self) -> int | None:
        """Number of requests that the benchmark kept in flight; None if the sample does not tell."""
        found = _CONCURRENCY.search(self.silicon_data_source)
        return int(found[1]) if found else None

    @property
    def roles(self) -> tuple[Role, ...]:
        return (Role.MIXED,) if self.mode == "agg" else (Role.PREFILL, Role.DECODE)

    @property
    def complete(self) -> bool:
        """Whether the row tells all that was run: most rows of disaggregated deployments omit the number of workers."""
        counted = self.mode == "agg" or (self.prefill_num_workers and self.decode_num_workers)
        return bool(self.concurrency and counted)

    def ranks(self, role: Role) -> int:
        """Return the number of ranks of the attention of a role; each has its own requests."""
        workers = self._size(role, "num_workers") if role is not Role.MIXED else 1
        return workers * self._size(role, "attention_dp_size")

    def sequences(self, role: Role) -> int:
        """Return the number of requests in flight on one rank of a role."""
        return max(1, round((self.concurrency or 1) / self.ranks(role)))

    def _size(self, role: Role, name: str) -> int:
        return getattr(self, _PREFIXES[role] + name) or 1

    @property
    def fitted(self) -> bool:
        """Whether the row belongs to the third to which constants are fitted."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 3 == 0

    def layouts(self, role: Role) -> Iterator[EngineLayout]:
        """Yield the engines of a role that the row may mean, the likeliest first.

        The sample names the precision of a deployment, and not which weights have it.
        """
        known = EngineLayout(
            model=_MODELS.get(self.model_path, self.model_path),
            system=self.system,
            backend=self.backend,
            tensor_parallel=self._size(role, "tp_size"),
            pipeline_parallel=self._size(role, "pp_size"),
            attention_data_parallel=self._size(role, "attention_dp_size"),
            expert_tensor_parallel=getattr(self, _PREFIXES[role] + "moe_tp_size") or None,
            expert_parallel=self._size(role, "moe_ep_size"),
        )
        gemm, experts = self.gemm_quant_mode, self.moe_quant_mode
        for quantizations in ((gemm, experts), (gemm, None), (None, experts), (None, None)):
            yield replace(known, gemm=quantizations[0], experts=quantizations[1])


def silicon_rows() -> Iterator[SiliconRow]:
    """Yield all rows of the sample."""
    text = files("aiconfigurator_core").joinpath("systems/silicon_sample.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        yield msgspec.convert({name: value for name, value in row.items() if value}, SiliconRow, strict=False)
