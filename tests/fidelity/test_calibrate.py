"""A calibration recovers the known timings of a simulated service."""

import msgspec
import pytest

from support.hosts import MODEL, TIMES
from twofold.batch import Batch, BatchItem
from twofold.events import Recorder
from twofold.fidelity.calibrate import calibrate
from twofold.fidelity.measurement import GroupResult, Measurements, Purpose, mixed_groups, split_groups
from twofold.fidelity.worker_log import WorkerLog
from twofold.performance.fitting.iterations import IterationWork, Measurement
from twofold.performance.profile import COLD_AFTER_S
from twofold.performance.transfer import LinkSpeed
from twofold.request import FinishReason, Phase
from twofold.serving.telemetry.journal import JournalEntry

LINK = LinkSpeed(overhead_s=1e-5, bytes_per_s=1e10)
REQUEST_S, PROMPT_TOKEN_S, REQUEST_DELAY_S = 0.0012, 2e-6, 0.0010
STEP_S, TOKEN_S, STEP_DELAY_S = 0.0007, 0.0001, 0.0013
SYNC_S = 0.002
COLD_S = 0.02
CROWDED = {"prefill": 1.3, "decode": 1.2}
SHARED = {"prefill": 1.05, "decode": 1.15}


class Service:
    """Simulated service that writes worker journals."""

    def __init__(self, taken):
        # `taken` maps purposes of requests to the gateway's share of the CPU.
        self.now = 100.0
        self.slower = {purpose: 1.0 / (1.0 - share) for purpose, share in taken.items()}
        self.journals = {"prefill": [], "decode": [], "mixed": []}
        self.observed = []
        self.batches = 0
        self.ended = {}

    def run(self, worker, items, *, crowd=1.0):
        """Run an iteration on a worker; return its end time in s."""
        prompts = [item for item in items if item.phase is Phase.PREFILL]
        work = IterationWork(
            tokens=sum(item.num_tokens for item in prompts),
            squares=sum(item.num_tokens**2 for item in prompts),
            sequences=len(items) - len(prompts),
            context=sum(item.context_tokens for item in items if item.phase is Phase.DECODE),
        )
        one = Measurement(work=(work,), seconds=0.0)
        cold_s = COLD_S if self.now - self.ended.get(worker, 0.0) > COLD_AFTER_S else 0.0
        self.ended[worker] = end = self.now + one.predicted_s(TIMES) * crowd + cold_s
        batch = msgspec.to_builtins(Batch(self.batches, tuple(items)))
        self.journals[worker] += [
            JournalEntry(self.now, "next_batch", {}, batch),
            JournalEntry(end, "complete", {}, []),
        ]
        self.batches += 1
        return end

    def answer(self, group):
        """Run a group of requests: one prefill batch, then decode iterations."""
        mixed, slower = group.purpose is Purpose.MIXED, self.slower.get(group.purpose, 1.0)
        sent, recorder = self.now, Recorder()
        timelines = [recorder.arrive(request, sent) for request in group.requests]
        tokens = sum(request.prompt_tokens for request in group.requests)
        self.now += REQUEST_S + PROMPT_TOKEN_S * tokens + REQUEST_DELAY_S
        items = [BatchItem(r.id, Phase.PREFILL, r.prompt_tokens, 0, True) for r in group.requests]
        end = self.run("mixed" if mixed else "prefill", items, crowd=slower)
        steps, made = 1, len(items)
        self.deliver(recorder, timelines, end)
        if len(items) == 1 and not mixed and group.requests[0].output_tokens > 1:
            self.hand_off(group.requests[0], end)
        self.now = end + 0.008
        longest = max(request.output_tokens for request in group.requests)
        for index in range(1, longest):
            running = [r for r in group.requests if r.output_tokens > index]
            items = [BatchItem(r.id, Phase.DECODE, 1, r.prompt_tokens + index, True) for r in running]
            beside = group.purpose is Purpose.CROWD
            if beside:  # the prefill worker runs a prompt of the same duration
                prompt = BatchItem("x", Phase.PREFILL, 6, 0, False)
                self.run("prefill", [prompt], crowd=CROWDED["prefill"] * slower)
            if mixed and index % 5 == 0:
                items.append(BatchItem("y", Phase.PREFILL, 7 * index, 0, False))
            crowd = slower if mixed else CROWDED["decode"] if beside else 1.0
            end = self.run("mixed" if mixed else "decode", items, crowd=crowd)
            steps, made = steps + 1 + beside, made + len(running)
            self.deliver(recorder, [t for t in timelines if t.request in running], end)
            self.now = end + (0.01 if beside else 0.0)
        for timeline in timelines:
            recorder.end(timeline.request.id, FinishReason.LENGTH)
        spent = 0.004 + REQUEST_S * len(timelines) + STEP_S * steps + TOKEN_S * made
        self.observed.append(GroupResult(group, timelines, spent))
        self.now += 0.01

    def deliver(self, recorder, timelines, end):
        for timeline in timelines:
            recorder.token(timeline.request.id, end + STEP_S + TOKEN_S + STEP_DELAY_S)

    def hand_off(self, request, end):
        tokens = request.prompt_tokens
        path = LINK.transfer(MODEL.kv_bytes_per_token, MODEL.layers)
        prefill_s = TIMES.seconds(tokens, tokens * tokens, 0, 0)
        landed = end + path.layer_wise_s(tokens, prefill_s) - path.sync_s + SYNC_S
        self.journals["decode"].append(JournalEntry(landed, "kv_received", {"request_id": request.id}, True))


def shared_logs():
    """Return the logs of two workers that share a CPU core, and of an idle worker."""
    service = Service({})
    for index in range(30):
        items = [BatchItem("d", Phase.DECODE, 1, 100 + index, True)] * 4
        end = service.run("decode", items, crowd=2 * SHARED["decode"])
        service.run("prefill", [BatchItem("p", Phase.PREFILL, 5, 0, False)], crowd=2 * SHARED["prefill"])
        service.now = end
    logs = {name: WorkerLog(entries) for name, entries in service.journals.items()}
    return {"prefill-0": logs["mixed"], "prefill-1": logs["prefill"], "decode-0": logs["decode"]}


def answered(taken):
    service = Service(taken)
    for group in [*split_groups(4096, 64), *mixed_groups(4096)]:
        service.answer(group)
    return service


def share(service, purpose):
    """Return the CPU time of gateway and clients divided by the elapsed time."""
    of = [one for one in service.observed if one.group.purpose is purpose]
    spans = [
        max(t.token_times_s[-1] for t in one.timelines) - min(min(t.moments.values()) for t in one.timelines)
        for one in of
    ]
    return sum(one.front_cpu_s for one in of) / sum(spans)


@pytest.fixture(scope="module")
def found():
    first = answered({})
    # On two cores, the gateway shares the prefill core of a split service and both cores of a colocated one.
    taken = {Purpose.CROWD: share(first, Purpose.CROWD), Purpose.MIXED: share(first, Purpose.MIXED) / 2}
    service = answered(taken)
    logs = {name: WorkerLog(entries) for name, entries in service.journals.items()}
    measured = Measurements(
        observed=service.observed,
        prefill=logs["prefill"],
        decode=logs["decode"],
        mixed=[logs["mixed"]],
        shared=shared_logs(),
        link=LINK,
    )
    return calibrate(measured, MODEL, cores=2, threads=1, kv_capacity_tokens=1000, source="a test", date="2026-01-01")


def test_fits_iterations_of_every_kind(found):
    for one in ((300, 90_000, 0, 0), (0, 0, 5, 2000), (100, 10_000, 8, 1000)):
        assert found.times.seconds(*one) == pytest.approx(TIMES.seconds(*one), rel=0.02)
    errors = found.times.prefill_error, found.times.decode_error, found.times.mixed_error
    assert all(error is not None and error < 0.02 for error in errors)


def test_separates_the_cost_of_cold_iterations(found):
    assert found.times.cold_s == pytest.approx(COLD_S, rel=0.1)


def test_fits_contention_between_workers(found):
    # The CPU time that the gateway takes from workers is excluded.
    assert found.host.prefill.crowded == pytest.approx(CROWDED["prefill"], rel=0.02)
    assert found.host.decode.crowded == pytest.approx(CROWDED["decode"], rel=0.02)


def test_fits_the_overhead_of_sharing_a_core(found):
    # The slowdown beyond a factor of two, because two workers share the core.
    assert found.host.prefill.shared == pytest.approx(SHARED["prefill"], rel=0.03)
    assert found.host.decode.shared == pytest.approx(SHARED["decode"], rel=0.03)


def test_fits_gateway_cpu_times_and_delays(found):
    front = found.host.front
    assert front.request_s == pytest.approx(REQUEST_S, rel=0.05)
    assert front.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.05)
    assert front.request_delay_s == pytest.approx(REQUEST_DELAY_S, rel=0.1)
    assert front.step_s == pytest.approx(STEP_S, rel=0.05)
    assert front.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert front.step_delay_s == pytest.approx(STEP_DELAY_S, rel=0.05)


def test_fits_the_synchronisation_time_of_handoffs(found):
    # Copied from a separate measurement of the link, not fitted.
    assert (found.link.bytes_per_s, found.link.latency_s) == (LINK.bytes_per_s, LINK.overhead_s)
    assert found.link.sync_s == pytest.approx(SYNC_S, rel=0.05)


def test_profile_has_the_given_model_cores_and_capacity(found):
    assert (found.model, found.host.cores, found.host.threads, found.kv_capacity_tokens) == (MODEL, 2, 1, 1000)
