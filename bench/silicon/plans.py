"""Plan clusters with Twofold and with AISimulate, and simulate both answers with both.

    python bench/silicon/plans.py --aisimulate …/bin/aisimulate --json plans.json

Each question is a model, a machine and an engine: the most requests per second within a TTFT of 2 s and a TPOT of 50 ms
for 90% of the requests, on two machines of eight accelerators. Both planners get the same requests: lengths of the
Azure conversation trace, Poisson arrivals. AISimulate recommends a design for a given rate, so it gets the rate that
Twofold's plan reaches. Then each simulator finds the highest rate of each design, with the token budget that its
planner chose. Needs the extra `aiconfigurator`, and a Python environment of its own with `pip install aisimulate`.
"""

import argparse
import asyncio
import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from aisimulate_input import NO_CACHE, ROLES, trace_lines, trace_source
from rich.console import Console
from rich.table import Table

from twofold.cluster.spec import SATURATING, TOKEN_BUDGET, ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError, TwofoldError
from twofold.fidelity.service import timelines_of
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Budget
from twofold.planning.evaluator import EvaluationStore, Evaluator, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.plan import PlanQuery, make_plan
from twofold.planning.problem import Problem, parse_families, with_parallelism
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective
from twofold.planning.workload import WHOLE, WorkloadArguments
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.source import workload
from twofold.workload.trace import FORMATS, write_trace

MODELS = {"llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B", "deepseek-v3": "deepseek-ai/DeepSeek-V3"}
SYSTEMS = {"dgx-h200": "h200_sxm", "dgx-b200": "b200_sxm"}
PERFORMANCE = {"vllm": "aiconfigurator", "sglang": "aiconfigurator-sglang"}
TTFT_S, TPOT_S = 2.0, 0.05
SLO = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
ATTAINED = 0.9
MACHINES, WIDTH = 2, 8
MEMORY = 0.9  # share for weights and KV, the default of AISimulate
SEQUENCES = 512  # of a batch
WORKLOAD, TRACE = "azure-conv", "requests.jsonl"
EVALUATION = {"sla": {"ttft_ms": TTFT_S * 1e3, "itl_ms": TPOT_S * 1e3}}
GRID = RateGrid(0.05)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    machine: str
    backend: str

    @property
    def engine(self) -> dict[str, Any]:
        """Fields of AISimulate's engine."""
        return {"model": MODELS[self.model], "hardware": SYSTEMS[self.machine], "backend": self.backend}

    @property
    def template(self) -> ClusterSpec:
        """Twofold's cluster, without machines."""
        return ClusterSpec(
            pools=(),
            model=self.model,
            performance=PERFORMANCE[self.backend],
            max_num_seqs=SEQUENCES,
            memory_utilization=MEMORY,
        )


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Equal instances of one role, in the terms of both planners."""

    role: Role
    replicas: int
    tensor: int
    attention_data: int = 1
    expert: int = 1
    max_num_batched_tokens: int

    @property
    def name(self) -> str:
        data = f"×DP{self.attention_data}" if self.attention_data > 1 else ""
        experts = f"-EP{self.expert}" if self.expert > 1 else ""
        tokens = "" if self.role is Role.DECODE else f", {self.max_num_batched_tokens} tokens"
        return f"{self.replicas}×TP{self.tensor}{data}{experts} {self.role}{tokens}"

    @property
    def parallelism(self) -> dict[str, int]:
        """AISimulate's fields."""
        width = self.tensor * self.attention_data
        return {
            "replicas": self.replicas,
            "tensor": self.tensor,
            "attention_data": self.attention_data,
            "moe_expert": self.expert,
            "moe_tensor": width // self.expert,
        }

    def pool(self, machine: str) -> PoolSpec:
        return PoolSpec(
            machines=-(-self.replicas * self.tensor * self.attention_data // WIDTH),
            machine=machine,
            role=self.role,
            tensor_parallel=self.tensor,
            expert_parallel=self.expert if self.expert > 1 else None,
            instances=self.replicas * self.attention_data,
            batcher="chunked-prefill" if self.role is Role.MIXED else None,
        )


Design = tuple[Workers, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A design, and its highest rates in requests/s in both simulators; None if a simulator cannot run it."""

    planner: str
    design: str
    twofold: float | None
    aisimulate: float | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    question: Question
    answers: list[Answer]


def planned(question: Question, requests: Path, store: Path) -> tuple[Design, ClusterSpec, float]:
    """Return Twofold's best design and its highest rate."""
    problem = Problem(
        template=question.template,
        workload=WorkloadArguments(workload=str(requests)),
        slo=SLO,
        attainment=ATTAINED,
        catalog=load_catalog(),
    )
    families = parse_families(problem, (), question.machine, split=True, colocated=True)
    query = PlanQuery(
        objective=Objective.THROUGHPUT, groups=with_parallelism(problem, families)[0], budget=Budget(machines=MACHINES)
    )
    with EvaluationStore(store) as stored, LocalExecutor(problem, 1) as executor:
        evaluator = Evaluator(executor, stored, Keys(problem).of)
        search = RateSearch(evaluate=evaluator, bound=AnalyticBounds(problem), grid=GRID, draw=WHOLE)
        best = asyncio.run(make_plan(search, query)).best
    spec = problem.spec(best.design)
    tokens = TOKEN_BUDGET if spec.max_num_batched_tokens == SATURATING else spec.max_num_batched_tokens
    design = tuple(
        Workers(
            role=role,
            replicas=count * (kind.instances if kind.expert_parallel is None else 1),
            tensor=kind.tensor_parallel or kind.accelerators,
            attention_data=1 if kind.expert_parallel is None else kind.instances,
            expert=kind.expert_parallel or 1,
            max_num_batched_tokens=tokens,
        )
        for (kind, count), role in zip(best.design.parts(), best.design.family.role_of, strict=True)
    )
    return design, spec, best.highest_rate


def highest(attained: Callable[[float], float], start: float) -> float:
    """Return the highest rate of the grid at which `attained` returns enough; 0 if there is none near `start`."""
    step, stride = GRID.step(start), GRID.stride
    known = {step: attained(GRID.rate(step)) >= ATTAINED}
    upward = known[step]
    while known[step] is upward and abs(step - GRID.step(start)) < 20 * GRID.stride:
        step += stride if upward else -stride
        known[step] = attained(GRID.rate(step)) >= ATTAINED
    kept = max((each for each, met in known.items() if met), default=None)
    missed = min((each for each, met in known.items() if not met), default=None)
    if kept is None or missed is None:
        return 0.0 if kept is None else GRID.rate(kept)
    while missed - kept > 1:
        middle = (kept + missed) // 2
        kept, missed = (middle, missed) if attained(GRID.rate(middle)) >= ATTAINED else (kept, middle)
    return GRID.rate(kept)


def attained_here(spec: ClusterSpec, requests: Sequence[Request], rate: float) -> float:
    """Return the SLO attainment that Twofold simulates."""
    own = len(requests) / requests[-1].arrival_s
    sent = [msgspec.structs.replace(each, arrival_s=each.arrival_s * own / rate) for each in requests]
    timelines = timelines_of(spec, sent, load_catalog())
    return sum(map(SLO.met_by, timelines)) / len(requests)


class Peer:
    """AISimulate's command."""

    def __init__(self, command: Path, trials: int, requests: Sequence[Request], folder: Path) -> None:
        self._command, self._trials, self._folder, self._count = command, trials, folder, len(requests)
        self._own = len(requests) / requests[-1].arrival_s  # requests/s of the trace
        self._longest = max(each.prompt_tokens + each.output_tokens for each in requests)
        self._trace = folder / "aisimulate.jsonl"
        lines = trace_lines((each.arrival_s, each.prompt_tokens, each.output_tokens) for each in requests)
        self._trace.write_text("".join(lines))

    def recommended(self, question: Question, rate: float) -> dict[str, Any]:
        """Return the engine that AISimulate recommends for `rate` requests/s, as in its configuration."""
        output = self._folder / "recommended"
        config = {
            "traffic": self._traffic(rate),
            "engine": {
                **question.engine,
                "context_length": self._longest,
                "mode": {"choices": ["aggregated", "disaggregated"]},
                "workers": {name: {"kv_cache": NO_CACHE} for name in ROLES.values()},
            },
            "evaluation": EVALUATION,
            "optimization": {"target": "goodput", "constraints": {"max_candidate_gpus": MACHINES * WIDTH}},
            "optimizer": {"max_trials": self._trials, "parallelism": 1},
        }
        self._run("recommend", config, output)
        best = min((output / "recommendations").glob("*.yaml"))
        engine: dict[str, Any] = msgspec.yaml.decode(best.read_bytes())["engine"]
        return engine

    def attained(self, engine: dict[str, Any], rate: float) -> float:
        """Return the SLO attainment that AISimulate predicts."""
        engine = {**engine, "context_length": self._longest}
        config = {"traffic": self._traffic(rate), "engine": engine, "evaluation": EVALUATION}
        found = json.loads(self._run("predict", config, self._folder / "predicted", "--format", "json"))
        return float(found["goodput_completed_requests"]) / self._count

    def _traffic(self, rate: float) -> dict[str, Any]:
        return {"source": trace_source(self._trace), "load": {"type": "trace_timestamps", "speedup": rate / self._own}}

    def _run(self, action: str, config: dict[str, Any], output: Path, *flags: str) -> str:
        file = self._folder / f"{action}.yaml"
        file.write_bytes(msgspec.yaml.encode(config))
        command = [str(self._command), action, "--config", str(file), "--output-dir", str(output), "--overwrite"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, cwd=self._folder)
        if done.returncode:
            raise ConfigurationError(f"AISimulate failed: {(done.stderr or done.stdout)[-800:]}")
        return done.stdout


def engine_of(question: Question, design: Design) -> dict[str, Any]:
    """Return AISimulate's configuration of a design of Twofold."""
    workers = {
        ROLES[each.role]: {
            "parallelism": each.parallelism,
            "scheduler": {"max_batched_tokens": each.max_num_batched_tokens, "max_sequences": SEQUENCES},
            "kv_cache": NO_CACHE,
        }
        for each in design
    }
    return {**question.engine, "mode": "aggregated" if len(design) == 1 else "disaggregated", "workers": workers}


def design_of(engine: dict[str, Any]) -> Design:
    """Return the design in a configuration of AISimulate."""
    found = []
    for role in Role:
        if (name := ROLES[role]) in engine["workers"]:
            sizes, scheduler = engine["workers"][name]["parallelism"], engine["workers"][name]["scheduler"]
            mixed_experts = sizes["moe_tensor"] > 1 and (sizes["moe_expert"] > 1 or sizes["attention_data"] > 1)
            if sizes.get("pipeline", 1) > 1 or mixed_experts:
                raise ConfigurationError(f"Twofold does not simulate {sizes}")
            found.append(
                Workers(
                    role=role,
                    replicas=sizes["replicas"],
                    tensor=sizes["tensor"],
                    attention_data=sizes["attention_data"],
                    expert=sizes["moe_expert"],
                    max_num_batched_tokens=scheduler["max_batched_tokens"],
                )
            )
    return tuple(found)


def described(engine: dict[str, Any]) -> str:
    """Describe a design of AISimulate that Twofold does not simulate."""
    found = []
    for role in Role:
        if (name := ROLES[role]) in engine["workers"]:
            sizes = engine["workers"][name]["parallelism"]
            experts = f"experts TP{sizes['moe_tensor']}×EP{sizes['moe_expert']}"
            found.append(f"{sizes['replicas']}×TP{sizes['tensor']}×DP{sizes['attention_data']} {role}, {experts}")
    return " + ".join(found)


def spec_of(question: Question, design: Design) -> ClusterSpec:
    """Return the cluster of a design in Twofold."""
    return msgspec.structs.replace(
        question.template,
        pools=tuple(each.pool(question.machine) for each in design),
        max_num_batched_tokens=design[0].max_num_batched_tokens,  # of prefill or mixed workers
    )


def answered(question: Question, peer: Peer, requests: Sequence[Request], folder: Path) -> Outcome:
    """Plan with both planners, and find the highest rate of both answers in both simulators."""
    own, spec, rate = planned(question, folder / TRACE, folder / "plan.sqlite")
    theirs = peer.recommended(question, rate)
    answers = []
    for planner, engine in (("Twofold", engine_of(question, own)), ("AISimulate", theirs)):
        try:
            design: Design | None = own if planner == "Twofold" else design_of(engine)
        except ConfigurationError:
            design = None
        here = there = None
        if design is not None:
            cluster = spec if planner == "Twofold" else spec_of(question, design)
            here = highest(partial(attained_here, cluster, requests), rate)
        with suppress(ConfigurationError):  # too little memory, by AISimulate
            there = highest(partial(peer.attained, engine), rate)
        answers.append(
            Answer(
                planner=planner,
                design=described(engine) if design is None else " + ".join(each.name for each in design),
                twofold=here,
                aisimulate=there,
            )
        )
    return Outcome(question=question, answers=answers)


def run(question: Question, given: argparse.Namespace) -> Outcome | str:
    folder = given.folder / f"{question.model}-{question.machine}-{question.backend}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "outcome.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Outcome)
    requests = list(workload(WORKLOAD, rate=1.0, num_requests=given.requests, arrival="poisson", seed=0))
    write_trace(requests, folder / TRACE, FORMATS["twofold"])
    try:
        outcome = answered(question, Peer(given.aisimulate, given.trials, requests, folder), requests, folder)
    except TwofoldError as error:
        return f"{question.model} on {question.machine}, {question.backend}: {error}"
    kept.write_bytes(msgspec.json.encode(outcome))
    return outcome


def show(outcomes: Sequence[Outcome | str]) -> None:
    console = Console(width=140)
    drawn = Table("model", "machine", "engine", "planner", "design", "Twofold, req/s", "AISimulate, req/s")
    for each in outcomes:
        if isinstance(each, str):
            console.print(each, markup=False)
            continue
        question = each.question
        for answer in each.answers:
            rates = ("-" if rate is None else f"{rate:.3g}" for rate in (answer.twofold, answer.aisimulate))
            drawn.add_row(question.model, question.machine, question.backend, answer.planner, answer.design, *rates)
    console.print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aisimulate", type=Path, required=True, help="AISimulate's command")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--trials", type=int, default=20, help="designs that AISimulate tries")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--machines", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--backends", nargs="+", choices=PERFORMANCE, default=list(PERFORMANCE))
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument(
        "--folder", type=Path, default=Path("plans"), help="keep traces, configurations and answers here"
    )
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    given.aisimulate, given.folder = given.aisimulate.absolute(), given.folder.absolute()
    questions = [
        Question(model=model, machine=machine, backend=backend)
        for model, machine, backend in product(given.models, given.machines, given.backends)
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        outcomes = []
        for outcome in pool.map(partial(run, given=given), questions):
            outcomes.append(outcome)
            show([outcome])
    show(outcomes)
    if given.json is not None:
        given.json.write_text(json_text(outcomes), "utf-8")


if __name__ == "__main__":
    main()
