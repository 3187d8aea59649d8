"""Send groups of requests to a live service and record their times, for `twofold calibrate live`."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptMaker, token_range, unlike_lengths
from twofold.bench.services import ServedProcess, metrics, served_process
from twofold.errors import ConfigurationError
from twofold.fidelity.service import ServiceDesign, clients_beside
from twofold.fidelity.worker_log import WorkerLog, read_workers
from twofold.performance.transfer import LinkSpeed
from twofold.request import Request
from twofold.timeline import Timeline

_PROMPTS = (16, 48, 128, 320, 640, 1024, 1536, 2000)
_TOGETHER = ((64, 4), (128, 8), (400, 3), (200, 9))  # (prompt tokens, number of simultaneous prompts)
_CONTEXTS = (32, 256, 1024)  # mean context tokens of a batch
_BATCHES = (1, 2, 3, 5, 7, 11, 19, 29, 45, 61)  # not powers of two, for which kernels are tuned
_MOST_TOKENS = 8192  # per group: larger groups take long and add no information
_DECODES = 24
_REPEATS = 3
_STREAMS = 8
_CALIBRATION = " of the calibration"


class Purpose(StrEnum):
    """Kind of load that a group of requests puts on workers, such as prompts alone or prompts beside decodes."""

    ALONE = "prompts alone"
    TOGETHER = "prompts together"
    DECODES = "decodes"
    CROWD = "prompts beside decodes of another worker"
    SHARED = "prompts beside decodes on one core"
    MIXED = "prompts beside decodes"


class RequestGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are sent together for one measurement."""

    purpose: Purpose
    requests: tuple[Request, ...]


def split_groups(max_model_len: int, max_num_seqs: int) -> Iterator[RequestGroup]:
    """Yield groups of requests, each for one measurement of a service with separate prefill and decode workers."""
    longest = max_model_len - _DECODES
    prompts = [size for size in _PROMPTS if size < longest]
    for repeat in range(_REPEATS):
        for size in prompts:
            yield _together(Purpose.ALONE, f"alone-{repeat}-{size}", [size], 1)
    for size, count in _TOGETHER:
        if size < longest:
            yield _together(Purpose.TOGETHER, f"together-{size}", [size] * count, 1)
    for batch in (batch for batch in _BATCHES if batch <= max_num_seqs):
        for context in _CONTEXTS:
            if context < longest and batch * context <= _MOST_TOKENS:
                sizes = unlike_lengths(context, batch, longest)
                yield _together(Purpose.DECODES, f"decodes-{batch}-{context}", sizes, _DECODES)
    yield _beside(Purpose.CROWD, "crowd", prompts, output=max_model_len // 8)


def shared_groups(max_model_len: int) -> Iterator[RequestGroup]:
    """Yield groups of requests for measuring how two workers that share a CPU core slow each other down."""
    prompts = [size for size in _PROMPTS if size < max_model_len // 2]
    for number in range(2):  # in pairs: the first goes to the worker with a core of its own
        yield _beside(Purpose.SHARED, f"shared-{number}", prompts, output=max_model_len // 16, together=2)


def mixed_groups(max_model_len: int) -> Iterator[RequestGroup]:
    """Yield groups of requests that make a worker compute prompts and decodes in the same iterations."""
    prompts = [size for size in _PROMPTS if size < max_model_len // 2]
    for number in range(2):
        yield _beside(Purpose.MIXED, f"mixed-{number}", prompts, output=max_model_len // 8)


def _together(purpose: Purpose, name: str, prompts: Sequence[int], output: int) -> RequestGroup:
    requests = tuple(
        Request(id=f"{name}-{number}", arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for number, prompt in enumerate(prompts)
    )
    return RequestGroup(purpose=purpose, requests=requests)


def _beside(purpose: Purpose, name: str, prompts: list[int], output: int, together: int = 1) -> RequestGroup:
    """Return requests with long decodes, and further requests that arrive during these decodes, as one group."""
    streams = _together(purpose, f"{name}-stream", [64] * _STREAMS, output).requests
    short = [size for size in prompts if size <= prompts[-1] // 2] * _REPEATS
    comers = tuple(
        Request(id=f"{name}-{number}-{each}", arrival_s=0.5 + 0.25 * number, prompt_tokens=size, output_tokens=8)
        for number, size in enumerate(short)
        for each in range(together)
    )
    return RequestGroup(purpose=purpose, requests=(*streams, *comers))


SPLIT, COLOCATED = ServiceDesign(prefill=1, decode=1), ServiceDesign(colocated=2)

OnGroup = Callable[[str, int, int], None]  # progress: (service, groups done, all groups)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Timelines of a group of requests, and the CPU time that clients and gateway spent on it."""

    group: RequestGroup
    timelines: list[Timeline]
    front_cpu_s: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of a live service for a calibration."""

    observed: list[GroupResult]
    prefill: WorkerLog  # on other cores than the decode worker
    decode: WorkerLog
    mixed: list[WorkerLog]  # of colocated workers
    shared: dict[str, WorkerLog]  # of the workers of 2P+1D by name, if two of them share a core
    link: LinkSpeed

    def of(self, purpose: Purpose) -> list[GroupResult]:
        return [one for one in self.observed if one.group.purpose is purpose]


def measure(model: Path, flags: Sequence[str], max_num_seqs: int, on_group: OnGroup) -> Measurements:
    """Measure `model` in split and colocated services. Raises ConfigurationError if a service or a request fails."""
    observed: list[GroupResult] = []
    logs: list[dict[str, WorkerLog]] = []
    link: LinkSpeed | None = None
    with tempfile.TemporaryDirectory(prefix="twofold-calibrate-") as name:
        for number, design in enumerate(_designs()):
            directory = Path(name, str(number))
            with served_process(model, (*design.flags, *flags, "--journal", str(directory))) as service:
                endpoint = asyncio.run(discover(service.url))
                groups = _groups(design, endpoint.max_model_len or 2048, max_num_seqs)
                link = link or _link(service.url)
                with clients_beside(design):
                    observed += _run(service, endpoint, groups, partial(on_group, design.name))
            logs.append(read_workers(directory))
    split, colocated, *shared = logs
    assert link is not None  # noqa: S101  (the first design has one)
    return Measurements(
        observed=observed,
        prefill=split["prefill-0"],
        decode=split["decode-0"],
        mixed=list(colocated.values()),
        shared=shared[0] if shared else {},
        link=link,
    )


def _designs() -> list[ServiceDesign]:
    """Return the services to measure."""
    sharing = ServiceDesign(prefill=2, decode=1)  # measured if two of its workers must share a core
    workers = sharing.workers()
    shares = {core for worker in workers for core in worker.cores}
    taken = sum(len(worker.cores) for worker in workers)
    return [SPLIT, COLOCATED, *([sharing] if taken > len(shares) else [])]


def _groups(design: ServiceDesign, max_model_len: int, max_num_seqs: int) -> list[RequestGroup]:
    if design == SPLIT:
        return list(split_groups(max_model_len, max_num_seqs))
    return list((mixed_groups if design == COLOCATED else shared_groups)(max_model_len))


def _run(
    service: ServedProcess, endpoint: Endpoint, groups: Sequence[RequestGroup], on_done: Callable[[int, int], None]
) -> list[GroupResult]:
    config = load_config(endpoint)
    send(config, groups[0].requests, _CALIBRATION)  # warm-up
    observed = []
    for number, group in enumerate(groups):
        on_done(number, len(groups))
        gateway_s, client_s = cpu_s(service.pid), time.process_time()
        timelines = send(config, group.requests, _CALIBRATION)
        spent = cpu_s(service.pid) - gateway_s + time.process_time() - client_s
        observed.append(GroupResult(group, timelines, spent))
    on_done(len(groups), len(groups))
    return observed


def load_config(endpoint: Endpoint) -> LoadConfig:
    """Return the load generator's configuration: random prompts, and outputs of exactly the requested length."""
    lowest, vocabulary = token_range(endpoint.vocab_size)
    prompts = PromptMaker(lowest=lowest, vocabulary=vocabulary)
    return LoadConfig(endpoint=endpoint, prompts=prompts, client=ClientConfig(ignore_eos=True))


def send(config: LoadConfig, requests: Sequence[Request], of: str = "") -> list[Timeline]:
    """Send requests and return their timelines. Raises ConfigurationError if a request fails."""
    result = asyncio.run(run_load(config, requests))
    for request_id, reason in result.errors.items():
        raise ConfigurationError(f"request {request_id}{of} failed: {reason}")
    return result.timelines


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used."""
    process = Path(f"/proc/{pid}")
    if (process / "schedstat").exists():  # in nanoseconds
        threads = process.glob("task/*/schedstat")
        return sum(int(thread.read_text(encoding="utf-8").split()[0]) for thread in threads) / 1e9
    fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _link(url: str) -> LinkSpeed:
    """Return the speed of KV transfers, as the service measured it at startup."""
    found = {
        sample.name.rpartition(":")[2]: sample.value
        for family in text_string_to_metric_families(metrics(url))
        for sample in family.samples
    }
    return LinkSpeed(overhead_s=found["kv_link_overhead_seconds"], bytes_per_s=found["kv_link_bytes_per_second"])
