"""Rows of `silicon_sample.csv` in aiconfigurator-core: measured deployments of public benchmark runs."""

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from importlib.resources import files
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from twofold.instance import Role
from twofold.performance.aiconfigurator import EngineLayout

SAMPLED = date(2026, 4, 28)  # day of the sample
_MEASURED = re.compile(r"measured=(\d{4}-\d\d-\d\d)")
_FIRST_YEAR = 2025  # of disaggregated deployments
_DIVIDED = 8  # accelerators over which these divide the attention at most
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")
# Other names of the sample's models in the package's configurations.
_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
GPT_OSS = "openai/gpt-oss-120b"
_FASTER = 1.25  # factor between TPOTs of the same deployment
_PREFIXES = {Role.MIXED: "", Role.PREFILL: "prefill_", Role.DECODE: "decode_"}  # of the columns of a role


class Parallelism(NamedTuple):
    """Sizes of the groups of accelerators of one worker."""

    tensor: int  # of the attention
    data: int  # of the attention
    expert_tensor: int
    expert: int


class SiliconRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured deployment; times in milliseconds, lengths in tokens."""

    id: str
    silicon_data_source: str
    backend: str
    model_path: str
    system: str
    precision: str | None = None  # such as fp8
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
    def measured(self) -> date:
        """Day of the measurement, which the sample tells of InferenceX's rows; else that of the sample."""
        found = _MEASURED.search(self.silicon_data_source)
        return date.fromisoformat(found[1]) if found else SAMPLED

    @property
    def roles(self) -> tuple[Role, ...]:
        return (Role.MIXED,) if self.mode == "agg" else (Role.PREFILL, Role.DECODE)

    @property
    def complete(self) -> bool:
        """Whether the row has a concurrency and numbers of workers. Most disaggregated deployments lack the latter."""
        counted = self.mode == "agg" or (self.prefill_num_workers and self.decode_num_workers)
        return bool(self.concurrency and counted)

    @property
    def measurement(self) -> tuple[float, ...]:
        """Lengths and times, which identify a measurement."""
        return (self.isl, self.osl, round(self.silicon_ttft_ms, 6), round(self.silicon_tpot_ms, 6))

    @property
    def of_inferencex(self) -> bool:
        """Whether the benchmark is InferenceX. Others are measurements by the authors of the package."""
        return self.silicon_data_source.startswith(("db-dump", "source_file=2026"))

    def parallelism(self, role: Role) -> Parallelism:
        """Return the parallelism of a worker of a role."""
        names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
        tensor, data, expert_tensor, expert = (self._size(role, name) for name in names)
        # InferenceX names the accelerators of a server twice if they share the experts, as in TP8 with EP8. The sample
        # has the product: TP64, or 64 ranks of attention.
        if self.of_inferencex and role is Role.MIXED and expert > 1 and (expert_tensor > 1 or tensor == data > 1):
            width = expert_tensor if expert_tensor > 1 else tensor
            tensor, data = (1, width) if data > 1 else (width, 1)
            expert_tensor, expert = 1, width
        # Its first deployments on GB200 have the same flags everywhere: their scripts divide the attention within a
        # machine, and share the experts among machines.
        if (
            self.of_inferencex
            and role is not Role.MIXED
            and self.measured.year == _FIRST_YEAR
            and expert_tensor == data > 1
        ):
            if data > _DIVIDED:
                expert_tensor, expert = 1, data
            else:
                tensor, data = data, 1
        return Parallelism(tensor, data, expert_tensor, expert)

    def deployed(self, *parts: tuple[int, int, int, bool]) -> "SiliconRow":
        """Return the row with these parts: workers of a role, their width, expert parallelism, and whether the
        attention is data parallel.
        """
        sizes: dict[str, int] = {}
        for role, (workers, width, expert, data) in zip(self.roles, parts, strict=True):
            found = {"num_workers": workers, "moe_tp_size": width // expert, "moe_ep_size": expert}
            sizes |= _attention(role, width, data=data)
            sizes |= {_PREFIXES[role] + name: value for name, value in found.items()}
        return replace(self, **sizes)

    def with_attention(self, role: Role, *, data: bool) -> "SiliconRow":
        """Return the row with data parallelism or tensor parallelism in the attention of a role."""
        sizes = self.parallelism(role)
        if data == (sizes.data > 1):
            return self
        return replace(self, **_attention(role, sizes.tensor * sizes.data, data=data))

    @property
    def architecture(self) -> str:
        """Name of the model's architecture: DeepSeek-R1 and V3 have the same."""
        return self.model_path.replace("DeepSeek-R1", "DeepSeek-V3")

    @property
    def deployment(self) -> tuple[object, ...]:
        """All fields of the deployment."""
        engine = (self.backend, self.architecture, self.system, self.precision)
        load = (self.isl, self.osl, self.concurrency)
        return engine + load + tuple((self.ranks(role), self.parallelism(role)) for role in self.roles)

    def ranks(self, role: Role) -> int:
        """Return the number of ranks of the attention of a role; each has its own requests."""
        workers = self._size(role, "num_workers") if role is not Role.MIXED else 1
        return workers * self.parallelism(role).data

    def sequences(self, role: Role) -> int:
        """Return the number of requests in flight on one rank of a role."""
        return max(1, round((self.concurrency or 1) / self.ranks(role)))

    def _size(self, role: Role, name: str) -> int:
        return getattr(self, _PREFIXES[role] + name) or 1

    @property
    def fitted(self) -> bool:
        """Whether the row belongs to the third to which constants are fitted."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 3 == 0

    def layouts(self, role: Role, kv: str | None, draft_tokens: int) -> Iterator[EngineLayout]:
        """Yield the engines of a role that the row may mean, with KV of precision `kv`, the likeliest first.

        The sample names the precision of a deployment, and not which weights have it.
        """
        sizes = self.parallelism(role)
        known = EngineLayout(
            model=_MODELS.get(self.model_path, self.model_path),
            system=self.system,
            backend=self.backend,
            tensor_parallel=sizes.tensor,
            pipeline_parallel=self._size(role, "pp_size"),
            attention_data_parallel=sizes.data,
            expert_tensor_parallel=sizes.expert_tensor if getattr(self, _PREFIXES[role] + "moe_tp_size") else None,
            expert_parallel=sizes.expert,
            draft_tokens=draft_tokens,
        )
        gemm, experts = self.gemm_quant_mode, self.moe_quant_mode
        if self.model_path == GPT_OSS:  # only its experts are quantized, with MXFP4
            gemm, experts = None, "w4a8_mxfp4_mxfp8" if self.system in BLACKWELL else None
        for attention in dict.fromkeys((kv, None)):
            for weights in ((gemm, experts), (gemm, None), (None, experts), (None, None)):
                yield replace(known, gemm=weights[0], experts=weights[1], attention=attention)


def _attention(role: Role, width: int, *, data: bool) -> dict[str, int]:
    """Return the fields of the attention of a role on `width` accelerators, with data or tensor parallelism."""
    tensor, ranks = (1, width) if data else (width, 1)
    return {_PREFIXES[role] + "tp_size": tensor, _PREFIXES[role] + "attention_dp_size": ranks}


def silicon_rows() -> Iterator[SiliconRow]:
    """Yield all rows of the sample."""
    text = files("aiconfigurator_core").joinpath("systems/silicon_sample.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        yield msgspec.convert({name: value for name, value in row.items() if value}, SiliconRow, strict=False)


def distinct(rows: Iterable[SiliconRow]) -> list[SiliconRow]:
    """Return the first row of each measurement: many are in the sample twice or three times."""
    found: dict[tuple[float, ...], SiliconRow] = {}
    for row in rows:
        found.setdefault(row.measurement, row)
    return list(found.values())


def contradicted(rows: Sequence[SiliconRow]) -> set[str]:
    """Return the ids of rows with a much shorter TPOT than another row of the same deployment at the same concurrency.

    Their servers probably decoded speculatively, which the sample does not tell.
    """
    by_deployment = defaultdict[object, list[SiliconRow]](list)
    for row in rows:
        by_deployment[row.deployment].append(row)
    return {
        row.id
        for same in by_deployment.values()
        for row in same
        if row.silicon_tpot_ms * _FASTER < max(each.silicon_tpot_ms for each in same)
    }
