"""Small virtual clusters with simple timing and little memory, in which rare events are frequent."""

from hypothesis import strategies as st
from msgspec.structs import replace

from twofold.cluster.profiles import InstanceProfile, SwapCapacity
from twofold.cluster.spec import ClusterSpec, InstanceFailure, PoolSpec, cluster_rules
from twofold.cluster.timing import Timing, ps
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.instance import Pipeline
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS, can_swap
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import build_cluster
from twofold.simulation.statistics import RunStatistics, Sampler
from twofold.slo import Slo

CATALOG = load_catalog()
SPLIT_BATCHERS = ("splitwise", "splitwise-sim")


class ToyModel(PerformanceModel):
    """A performance model that predicts round numbers, so that events often coincide in time."""

    name = "toy"
    error = ModelAccuracy(prefill=None, decode=None, basis="made up")
    idle_w = 10.0

    def __init__(self, base=4, per_sequence=1, per_token=0):
        self.base, self.per_sequence, self.per_token = base, per_sequence, per_token

    def prefill_s(self, tokens, squares):
        return (self.base + tokens) / 1e3

    def decode_cost(self, sequences):
        return DecodeCost((self.base + self.per_sequence * sequences) / 1e3, self.per_token / 1e6)

    def mixed_s(self, tokens, squares, sequences, context):
        return (self.base + tokens + self.per_sequence * sequences) / 1e3 + self.per_token * context / 1e6

    def uncontended(self, prompt_tokens, output_tokens):
        cost = self.decode_cost(1)
        return self.prefill_s(prompt_tokens, prompt_tokens**2), cost.base_s + cost.context_s * prompt_tokens

    def prefill_w(self, tokens):
        return 50.0 + tokens / 10

    def decode_w(self, sequences):
        return 20.0 + sequences


class Ends(Observer):
    """An observer that collects the timeline of every request."""

    def __init__(self):
        self.timelines = []

    def ended(self, timeline, now):
        self.timelines.append(timeline)


class ToyRun:
    """A simulation of requests on a toy cluster, with its final state and results."""

    def __init__(
        self,
        spec,
        requests,
        *,
        model,
        capacity=400,
        max_run=1 << 60,
        batchers=None,
        slo=None,
        prepare=None,
        observers=(),
    ):
        how = cluster_rules(spec.rules)
        batchers = batchers or {}
        # One byte per token, and one millisecond per swapped block.
        space = (spec.swap_space_bytes or 0) // spec.block_size
        timing = Timing(model, ps(1e-3))
        kinds = [
            InstanceProfile(
                pool=pool,
                machine=CATALOG.machine(pool.machine),
                tensor_parallel=pool.tensor_parallel or 8,
                batcher=batchers.get(pool.role, pool.batcher),
                model=model,
                timing=timing,
                capacity_tokens=capacity // spec.block_size * spec.block_size,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                swap=SwapCapacity(0 if pool.role is Role.PREFILL else space, spec.block_size, 1e-3),
            )
            for pool in spec.pools
        ]
        self.statistics = RunStatistics(slo or Slo(ttft_s=1), model, over_all_tokens=how.over_all_tokens)
        self.ends = Ends()
        self.cluster = build_cluster(spec, CATALOG, kinds, self.statistics, [self.ends, *observers], max_run)
        self.sampler = Sampler(list(self.cluster.instances.values()))
        if prepare is not None:
            prepare(self.cluster)
        self.cluster.feed(requests)
        self.cluster.kernel.run(until_events=1 << 60)

    def facts(self):
        """Return all results of the simulation in a form that can be compared exactly."""
        statistics = self.statistics
        slow = statistics.slowdowns
        histograms = (
            statistics.ttft, statistics.tpot, statistics.itl, statistics.e2e, statistics.queue, statistics.transfer,
            slow.ttft, slow.tpot, slow.e2e,
        )  # fmt: skip
        return {
            "timelines": {t.request.id: (t.moments, t.finish_reason, t.output_tokens, t.preemptions,
                                         t.prefill_instance, t.decode_instance) for t in self.ends.timelines},
            "histograms": [(dict(sorted(h.counts.items())), h.total, h.low, h.high) for h in histograms],
            "counts": (statistics.arrived, statistics.completed, statistics.rejected, statistics.failed,
                       statistics.slo_met, statistics.handoffs, len(self.cluster.requests)),
            "instances": {name: (i.busy, i.energy, i.iterations, i.sequence_time, i.scheduler.preemptions)
                          for name, i in self.cluster.instances.items()},
            "swaps": {name: (g.swaps, g.blocks_copied) for name, i in self.cluster.instances.items()
                      if (g := i.scheduler.swap) is not None},
        }  # fmt: skip


@st.composite
def workloads(draw, most=30, outputs=(1, 2, 3, 7, 20, 45)):
    """Hypothesis strategy that generates lists of small, large and simultaneous requests."""
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 13, 40, 200]), min_size=1, max_size=most))
    requests, at = [], 0
    for number, gap in enumerate(gaps):
        at += gap
        prompt = draw(st.sampled_from([1, 3, 17, 40, 64, 65, 130, 350]))
        output = draw(st.sampled_from(outputs))
        requests.append(Request(id=str(number), arrival_s=at / 1e3, prompt_tokens=prompt, output_tokens=output))
    return requests


def pools(*shape):
    return tuple(PoolSpec(machines=n, machine="dgx-h100", role=role) for n, role in shape)


@st.composite
def clusters(draw, swapping=False, failures=True):
    """Hypothesis strategy for random clusters with valid combinations of settings."""
    split = draw(st.booleans())
    rule = "twofold" if swapping else draw(st.sampled_from(["twofold", "twofold", "splitwise-sim"]))
    if split:
        routers = ["jsq", "jsq-requests", "round-robin", "random"]
        router = draw(st.sampled_from(routers if swapping else ["splitwise", "splitwise-sim", *routers]))
        shape = [(draw(st.integers(1, 3)), Role.PREFILL), (draw(st.integers(1, 3)), Role.DECODE)]
        if draw(st.booleans()) and router == "splitwise":
            shape.append((1, Role.MIXED))
        if router.startswith("splitwise"):
            name = draw(st.sampled_from(SPLIT_BATCHERS))
            batchers = dict.fromkeys(Role, name)
        else:
            prefill = draw(st.sampled_from(["prefill", "prefill", "prefill-balanced", "prefill-chunks"]))
            batchers = {Role.PREFILL: prefill, Role.DECODE: "decode", Role.MIXED: "mixed"}
    else:
        router = draw(st.sampled_from(["jsq", "jsq-pending", "jsq-requests", "round-robin", "random"]))
        shape = [(draw(st.integers(1, 3)), Role.MIXED)]
        known = filter(can_swap, BATCHERS) if swapping else BATCHERS
        both = sorted(set(known) - {"prefill", "prefill-balanced", "prefill-chunks", "decode"})
        batchers = {Role.MIXED: draw(st.sampled_from(both))}
    lost = ()
    if failures and draw(st.integers(0, 3)) == 0:
        number, role = shape[0]
        at = draw(st.sampled_from([0.0, 0.005, 0.05, 0.4]))
        back = draw(st.none() | st.just(at + 0.1))
        lost = (InstanceFailure(instance=f"{role.value}-{number - 1}", at_s=at, back_s=back),)
    spec = ClusterSpec(
        pools=pools(*shape),
        model="llama2-70b",
        router=router,
        handoff=draw(st.sampled_from(["serialized", "layer-wise", "by-size", "pull"])),
        max_num_batched_tokens=draw(st.sampled_from([64, 100])),
        max_num_seqs=draw(st.sampled_from([3, 8, 64])),
        block_size=draw(st.sampled_from([1, 16])),
        contention=draw(st.booleans()),
        link_bytes_per_s=draw(st.sampled_from([1e8, 1e10, 4e11])),
        rules=rule,
        swap_space_bytes=draw(st.sampled_from([600, 2000, 10_000])) if swapping else None,
        failures=lost,
    )
    model = ToyModel(draw(st.sampled_from([1, 4])), draw(st.sampled_from([0, 1])), draw(st.sampled_from([0, 1, 7])))
    return spec, batchers, model, draw(st.sampled_from([400, 600, 5000]))


@st.composite
def pipelines(draw, failures=True):
    """Hypothesis strategy for clusters whose instances have two or three pipeline stages."""
    spec, batchers, first, capacity = draw(clusters(failures=failures))
    batchers = {role: "splitwise" if not BATCHERS[name].pipelined else name for role, name in batchers.items()}
    stages = draw(st.integers(2, 3))
    later = ToyModel(draw(st.sampled_from([1, 4, 9])), first.per_sequence, first.per_token)
    piped = tuple(replace(pool, machines=pool.machines * stages, pipeline_parallel=stages) for pool in spec.pools)
    model = Pipeline("toy", ToyModel.error, first, later, stages)
    return replace(spec, pools=piped), batchers, model, capacity


def run(drawn, requests, **how):
    spec, batchers, model, capacity = drawn
    return ToyRun(spec, requests, model=model, capacity=capacity, batchers=batchers, **how)
