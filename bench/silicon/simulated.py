"""Simulation of a measured deployment as it was run: closed loop, lengths drawn as the benchmark draws them."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean

import msgspec
from msgspec.structs import replace
from rows import SiliconRow

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.fidelity.service import Clients, timelines_of
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.performance.aiconfigurator import OperatorTables, operator_tables
from twofold.performance.base import NO_POWER, PerformanceModel
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.request import Request
from twofold.timeline import Moment

SHORTEST = 0.8  # of the length that the benchmark names: it draws lengths uniformly from there
ROUNDS = 10  # requests of each client in the benchmark
SIMULATED_ROUNDS = 4  # of which the middle ones stand for all between the first and the last
BUDGET = {"vllm": 8192, "sglang": 16384, "trtllm": 8192}  # tokens of a batch
# By default, SGLang runs prompts in iterations of their own, and before decodes.
BATCHERS = {"vllm": "chunked-prefill", "sglang": "prefill-first", "trtllm": "chunked-prefill"}
NAME = "silicon"
MACHINES = {Role.MIXED: "dgx-h100", Role.PREFILL: "dgx-h100", Role.DECODE: "dgx-h200"}  # stand for the ranks of a role


class EngineOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Time of an engine outside the measured operators."""

    step_s: float = 0.0  # of an iteration
    sequence_s: float = 0.0  # of each sequence in an iteration
    request_s: float = 0.0  # of a request, before its first token
    client_s: float = 0.0  # the same, for each client


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated mean times in seconds."""

    mean_ttft_s: float
    mean_tpot_s: float


class RowModel(PerformanceModel):
    """Performance model of one deployment: measured operators, and the overhead of the engine."""

    def __init__(self, tables: OperatorTables, overhead: EngineOverhead) -> None:
        self.name, self.power = NAME, NO_POWER
        self.error = ModelAccuracy(prefill=None, decode=None, basis="measured operators")
        self._tables, self._overhead = tables, overhead

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._tables.prefill_s(tokens, squares) + self._overhead.step_s

    def decode_cost(self, sequences: int) -> DecodeCost:
        cost, overhead = self._tables.decode_cost(sequences), self._overhead
        return DecodeCost(cost.base_s + overhead.step_s + overhead.sequence_s * sequences, cost.context_s)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        overhead = self._overhead
        seconds = self._tables.mixed_s(tokens, squares, sequences, context)
        return seconds + overhead.step_s + overhead.sequence_s * sequences


def tables_of(row: SiliconRow) -> dict[Role, OperatorTables] | None:
    """Return the operator times of a row's engine of each role, or None if the package lacks some."""
    found = {role: _tables(row, role) for role in row.roles}
    known = {role: tables for role, tables in found.items() if tables is not None}
    return known if len(known) == len(found) else None


def _tables(row: SiliconRow, role: Role) -> OperatorTables | None:
    for layout in row.layouts(role):
        try:
            return operator_tables(layout)
        except ConfigurationError:
            continue
    return None


def simulated(row: SiliconRow, tables: Mapping[Role, OperatorTables], overhead: EngineOverhead, most: int) -> Timings:
    """Simulate a deployment with all requests of the benchmark, or with fewer rounds if they are more than `most`.

    Ranks have requests of their own, so a part of the deployment is simulated that has whole ranks of each role.
    """
    ranks = {role: row.ranks(role) for role in row.roles}
    parts = math.gcd(*ranks.values())
    clients = max(1, round((row.concurrency or 1) / parts))
    rounds = ROUNDS if ROUNDS * clients <= most else SIMULATED_ROUNDS
    requests = list(drawn(row, rounds * clients))
    longest = row.isl + row.osl
    models = {MACHINES[role]: RowModel(tables[role], overhead) for role in row.roles}
    PERFORMANCE_MODELS[NAME] = lambda _, machine, __: models[machine.name]
    pools = tuple(
        PoolSpec(
            machines=count // parts,
            machine=MACHINES[role],
            role=role,
            tensor_parallel=1,
            instances=1,
            batcher=BATCHERS[row.backend] if role is Role.MIXED else None,
        )
        for role, count in ranks.items()
    )
    spec = ClusterSpec(
        pools=pools,
        model="llama-3.1-8b",
        performance=NAME,
        router="jsq",
        max_num_batched_tokens=BUDGET[row.backend],
        max_num_seqs=clients,
        kv_capacity_tokens=2 * longest * clients,
    )
    timelines = sorted(
        timelines_of(spec, requests, _catalog(), Clients(clients)), key=lambda each: each.moments[Moment.ARRIVED]
    )
    first = Role.MIXED if row.mode == "agg" else Role.PREFILL
    outside_s = overhead.request_s + overhead.client_s * row.sequences(first)
    return Timings(
        mean_ttft_s=_mean([each.ttft_s for each in timelines], clients) + outside_s,
        mean_tpot_s=_mean([each.tpot_s for each in timelines], clients),
    )


def _mean(values: Sequence[float | None], clients: int) -> float:
    """Return the mean over all rounds of the benchmark; its middle rounds are like the middle rounds simulated."""
    rounds = [
        fmean(value for value in values[start : start + clients] if value is not None)
        for start in range(0, len(values), clients)
    ]
    return (rounds[0] + (ROUNDS - 2) * fmean(rounds[1:-1]) + rounds[-1]) / ROUNDS


def drawn(row: SiliconRow, count: int) -> Iterator[Request]:
    stream = random.Random(row.id)
    for number in range(count):
        prompt, output = (stream.randint(max(1, round(SHORTEST * most)), most) for most in (row.isl, row.osl))
        yield Request(id=str(number), arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


@cache
def _catalog() -> Catalog:
    catalog = load_catalog()
    model = replace(catalog.model("llama-3.1-8b"), max_context=None)
    return replace(catalog, models={**catalog.models, model.name: model})
