"""Simulation of a measured deployment as it was run: closed loop, lengths drawn as the benchmark draws them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

import msgspec
from all_to_all import all_to_all_tables, exchanges_tokens
from batchers import ReceivesAtIntervals, WaitsForTokens
from drawn import ROUNDS, drawn_lengths, rounds
from msgspec.structs import replace
from recipes import Recipe, recipe
from rows import SiliconRow

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.fidelity.service import Clients, timelines_of
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.performance.aiconfigurator import (
    EngineConstants,
    EngineLayout,
    EngineModel,
    OperatorTables,
    operator_tables,
)
from twofold.performance.base import NO_POWER
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS
from twofold.timeline import Moment, Timeline

# By default, SGLang runs prompts in iterations of their own, and before decodes.
BATCHER = {"vllm": "chunked-prefill", "sglang": "prefill-first", "trtllm": "chunked-prefill"}
NAME = "silicon"
MACHINES = {Role.MIXED: "dgx-h100", Role.PREFILL: "dgx-h100", Role.DECODE: "dgx-h200"}  # stand for the ranks of a role


class EngineOverhead(EngineConstants, frozen=True, kw_only=True):
    """Time of an engine outside the measured operators, and success of its speculative decoding."""

    # Factors of the operators where they are not `operators`, of disaggregated deployments.
    ranks: float | None = None  # of decodes on ranks that share experts
    prompts: float | None = None  # of prefill instances
    request_s: float = 0.0  # of a request, before its first token
    client_s: float = 0.0  # the same, for each client
    iterations: float = 0.0  # of decodes, for which a decode worker lets a request wait
    acceptance: float = 0.7  # of a draft token, if all before it were accepted

    def tokens(self, draft_tokens: int) -> float:
        """Return the mean tokens of a sequence in one iteration."""
        return sum(self.acceptance**accepted for accepted in range(draft_tokens + 1))


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated mean times in seconds."""

    mean_ttft_s: float
    mean_tpot_s: float


class RowModel(EngineModel):
    """Performance model of one deployment: measured operators, and the overhead of the engine.

    With speculative decoding, the time of a decode iteration is divided by the tokens that it gives each sequence.
    """

    def __init__(self, engine: "Engine", overhead: EngineOverhead) -> None:
        self._prompts = overhead.operators if overhead.prompts is None else overhead.prompts
        if shares_experts(engine.layout) and overhead.ranks is not None:
            overhead = replace(overhead, operators=overhead.ranks)
        super().__init__(engine.tables, overhead)
        self.name, self.power = NAME, NO_POWER
        self.error = ModelAccuracy(prefill=None, decode=None, basis="measured operators")
        self._tokens = overhead.tokens(engine.layout.draft_tokens)

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._prompts * self._tables.prefill_s(tokens, squares) + self._constants.step_s

    def decode_cost(self, sequences: int) -> DecodeCost:
        cost = super().decode_cost(sequences)
        return DecodeCost(cost.base_s / self._tokens, cost.context_s / self._tokens)


class Engine(NamedTuple):
    """The engine of one role of a deployment."""

    layout: EngineLayout
    tables: OperatorTables


def shares_experts(layout: EngineLayout) -> bool:
    """Whether an engine has ranks with requests of their own, which share its experts."""
    return layout.attention_data_parallel > 1


def engines_of(row: SiliconRow, draft_tokens: int) -> dict[Role, Engine] | None:
    """Return a row's engine of each role, or None if the package lacks operator times of one."""
    found = {role: _engine(row, role, draft_tokens) for role in row.roles}
    known = {role: engine for role, engine in found.items() if engine is not None}
    return known if len(known) == len(found) else None


def _engine(row: SiliconRow, role: Role, draft_tokens: int) -> Engine | None:
    layouts = list(row.layouts(role, recipe(row).kv, draft_tokens))
    known = next((layout for layout in layouts if _tables(layout) is not None), None)
    if exchanges_tokens(layouts[0]):
        # Where experts on several machines were not measured, those of 16 ranks, of GB200 or in FP8 stand for them.
        alike = layouts + [replace(each, attention_data_parallel=16, expert_parallel=16) for each in layouts]
        alike += [replace(each, system="gb200") for each in alike if each.system == "gb300"]
        tables = next(filter(None, map(all_to_all_tables, alike)), None)
        if tables is not None:
            return Engine(known or layouts[0], tables)
    return None if known is None else Engine(known, operator_tables(known))


def _tables(layout: EngineLayout) -> OperatorTables | None:
    try:
        return operator_tables(layout)
    except ConfigurationError:
        return None


def simulated(
    row: SiliconRow, engines: Mapping[Role, Engine], overhead: EngineOverhead, most: int, batch: int | None
) -> Timings:
    """Simulate a deployment with all requests of the benchmark, or with fewer rounds if they are more than `most`.

    `batch` limits the sequences of a rank that decodes. A decode worker sends the first token, too, so in a
    disaggregated deployment the TTFT includes the wait for a place in its batch.

    Ranks have requests of their own, so a part of the deployment is simulated that has whole ranks of each role.
    """
    ranks = {role: row.ranks(role) for role in row.roles}
    parts = math.gcd(*ranks.values())
    clients = max(1, round((row.concurrency or 1) / parts))
    requests = list(drawn(row, rounds(clients, most) * clients))
    longest = row.isl + row.osl
    models = {MACHINES[role]: RowModel(engines[role], overhead) for role in row.roles}
    options = recipe(row)
    PERFORMANCE_MODELS[NAME] = lambda _, machine, __: models[machine.name]
    pools = tuple(
        PoolSpec(
            machines=count // parts,
            machine=MACHINES[role],
            role=role,
            tensor_parallel=1,
            instances=count // parts,
            batcher=_batcher(row.backend, options) if role is Role.MIXED else None,
        )
        for role, count in ranks.items()
    )
    spec = ClusterSpec(
        pools=pools,
        model="llama-3.1-8b",
        performance=NAME,
        router="jsq",
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=min(clients, batch or options.max_num_seqs or clients),
        kv_capacity_tokens=2 * longest * clients,
    )
    timelines = sorted(
        timelines_of(spec, requests, _catalog(), Clients(clients)), key=lambda each: each.moments[Moment.ARRIVED]
    )
    sent = Moment.FIRST_TOKEN if row.mode == "agg" else Moment.DECODE_STARTED
    tpot_s = _mean([_tpot_s(each, sent) for each in timelines], clients)
    outside_s = overhead.request_s + overhead.client_s * row.sequences(row.roles[0]) + overhead.iterations * tpot_s
    ttft_s = _mean([each.span(Moment.ARRIVED, sent) for each in timelines], clients)
    return Timings(mean_ttft_s=ttft_s + outside_s, mean_tpot_s=tpot_s)


def _tpot_s(timeline: Timeline, first: Moment) -> float | None:
    decoding_s = timeline.span(first, Moment.LAST_TOKEN)
    return None if decoding_s is None else decoding_s / (timeline.output_tokens - 1)


@cache
def _batcher(backend: str, options: Recipe) -> str:
    """Return the name of the engine's batcher with these options, after adding it to the registry."""
    if options.receive_every > 1:
        name = f"received-{options.receive_every}"
        BATCHERS[name] = type(name, (ReceivesAtIntervals,), {"interval": options.receive_every})
    elif options.wait is not None:
        name = f"waiting-{options.wait.iterations}-{options.wait.share}"
        BATCHERS[name] = type(name, (WaitsForTokens,), msgspec.structs.asdict(options.wait))
    else:
        name = BATCHER[backend]
    return name


def _mean(values: Sequence[float | None], clients: int) -> float:
    """Return the mean over all rounds of the benchmark; its middle rounds are like the middle rounds simulated."""
    means = [
        fmean(value for value in values[start : start + clients] if value is not None)
        for start in range(0, len(values), clients)
    ]
    return (means[0] + (ROUNDS - 2) * fmean(means[1:-1]) + means[-1]) / ROUNDS


def drawn(row: SiliconRow, count: int) -> Iterator[Request]:
    for number, (prompt, output) in enumerate(drawn_lengths(row.id, row.isl, row.osl, count)):
        yield Request(id=str(number), arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


@cache
def _catalog() -> Catalog:
    catalog = load_catalog()
    model = replace(catalog.model("llama-3.1-8b"), max_context=None)
    return replace(catalog, models={**catalog.models, model.name: model})
