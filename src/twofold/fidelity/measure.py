"""Measure a live service: run groups of requests through it and keep what its workers and its clients saw."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import ServedProcess, metrics, served_process
from twofold.errors import ConfigurationError
from twofold.fidelity.grid import Group, Purpose, mixed_groups, shared_groups, split_groups
from twofold.fidelity.journals import WorkerLog, read_workers
from twofold.fidelity.service import Design, clients_beside
from twofold.performance.measured import LinkSpeed
from twofold.timeline import Timeline

SPLIT, COLOCATED = Design(prefill=1, decode=1), Design(colocated=2)

OnGroup = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Observed:
    """A group as its clients saw it, and the CPU time that it cost them and the gateway."""

    group: Group
    timelines: list[Timeline]
    front_cpu_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a calibration rests on.

    `prefill` and `decode` are workers with cores of their own, `mixed` colocated ones; `shared` are two prefill workers
    and a decode worker, by name, where so many have to take turns on some core.
    """

    observed: list[Observed]
    prefill: WorkerLog
    decode: WorkerLog
    mixed: list[WorkerLog]
    shared: dict[str, WorkerLog]
    link: LinkSpeed

    def of(self, purpose: Purpose) -> list[Observed]:
        return [one for one in self.observed if one.group.purpose is purpose]


def measure(model: Path, flags: Sequence[str], max_num_seqs: int, on_group: OnGroup) -> Measured:
    """Serve `model` split, then colocated, with these flags besides, and measure each.

    `on_group` is told of which service how many groups of how many are done. Raises ConfigurationError where a service
    does not start or a request fails.
    """
    observed: list[Observed] = []
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
    return Measured(
        observed=observed,
        prefill=split["prefill-0"],
        decode=split["decode-0"],
        mixed=list(colocated.values()),
        shared=shared[0] if shared else {},
        link=link,
    )


def _designs() -> list[Design]:
    """Workers with cores of their own, and where the next more would have to share one, that too."""
    sharing = Design(prefill=2, decode=1)
    workers = sharing.workers()
    shares = {core for worker in workers for core in worker.cores}
    taken = sum(len(worker.cores) for worker in workers)
    return [SPLIT, COLOCATED, *([sharing] if taken > len(shares) else [])]


def _groups(design: Design, max_model_len: int, max_num_seqs: int) -> list[Group]:
    if design == SPLIT:
        return list(split_groups(max_model_len, max_num_seqs))
    return list((mixed_groups if design == COLOCATED else shared_groups)(max_model_len))


def _run(
    service: ServedProcess, endpoint: Endpoint, groups: Sequence[Group], on_done: Callable[[int, int], None]
) -> list[Observed]:
    config = load_config(endpoint)
    _send(config, groups[0])  # what happens the first time is of no interest
    observed = []
    for number, group in enumerate(groups):
        on_done(number, len(groups))
        gateway_s, client_s = cpu_s(service.pid), time.process_time()
        timelines = _send(config, group)
        spent = cpu_s(service.pid) - gateway_s + time.process_time() - client_s
        observed.append(Observed(group, timelines, spent))
    on_done(len(groups), len(groups))
    return observed


def load_config(endpoint: Endpoint) -> LoadConfig:
    """Requests of random tokens, answered in full length."""
    lowest, vocabulary = token_range(endpoint.vocab_size)
    prompts = PromptMaker(lowest=lowest, vocabulary=vocabulary)
    return LoadConfig(endpoint=endpoint, prompts=prompts, client=ClientConfig(ignore_eos=True))


def _send(config: LoadConfig, group: Group) -> list[Timeline]:
    result = asyncio.run(run_load(config, group.requests))
    for request_id, reason in result.errors.items():
        raise ConfigurationError(f"request {request_id} of the calibration failed: {reason}")
    return result.timelines


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, over all its threads: to the nanosecond where the kernel counts that."""
    process = Path(f"/proc/{pid}")
    if (process / "schedstat").exists():
        threads = process.glob("task/*/schedstat")
        return sum(int(thread.read_text(encoding="utf-8").split()[0]) for thread in threads) / 1e9
    fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _link(url: str) -> LinkSpeed:
    """What the service measured of its one link when it started."""
    found = {
        sample.name.rpartition(":")[2]: sample.value
        for family in text_string_to_metric_families(metrics(url))
        for sample in family.samples
    }
    return LinkSpeed(
        overhead_s=found["kv_link_overhead_seconds"], bytes_per_s=found["kv_link_bytes_per_second"]
    )
