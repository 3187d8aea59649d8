"""Requests complete with every registered router, batcher, performance model, trace format, engine and transport."""

import asyncio
import json
from importlib.util import find_spec
from itertools import cycle

import msgspec
import pytest

from support.api_client import all_blocks_free, complete_all, metric_reaches
from support.flags import ENGINE, SPLIT
from support.forked_service import forked_service
from support.traces import ask
from twofold.bench.services import free_port, served
from twofold.cli.simulate.settings import OWN_LOADS
from twofold.cluster.spec import RULES
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.kvcache.eviction import EVICTIONS
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.scheduling.admission.overload import OVERLOAD_RULES
from twofold.scheduling.batchers import BATCHERS, INLINED
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES
from twofold.scheduling.routers import CELL_ROUTERS, LIVE_ROUTERS, ROUTERS
from twofold.transport.registry import DEFAULT_TRANSPORT, TRANSPORTS, check_transport
from twofold.workload.distributions import ARRIVALS
from twofold.workload.trace import FORMATS, WRITABLE, write_trace

DEFAULT_ENGINE = "torch"
PROMPTS = [[7] * (20 + 300 * number) for number in range(6)]
MODEL = {"model": "opt-13b", "performance": "roofline", "router": "jsq"}
PREFILL, DECODE, MIXED = (
    {"machines": 1, "machine": "dgx-a100", "tensor_parallel": 1, "instances": 2, "role": role}
    for role in ("prefill", "decode", "mixed")
)
SIMULATED_ONLY = ("cells", "kv_cache")  # fields; a service has --kv-eviction, and each of its hosts is a cell
PUBLISHED = {  # performance models of other models and machines
    "splitwise-published": ("llama2-70b", {"tensor_parallel": 8, "machines": 2}),
    "fitted": ("llama2-70b", {"tensor_parallel": 8, "machines": 2}),
}


def policy(registry, name, *flags, pools=(PREFILL, DECODE), serve=(), **fields):
    """Return a test case for one policy."""
    return pytest.param(MODEL | {"pools": pools} | fields, flags, serve, id=f"{registry}-{name}")


def routers():
    """Yield a test case for each router of live services."""
    for name, handoff, eviction in zip(LIVE_ROUTERS, cycle(HANDOFF_POLICIES), cycle(EVICTIONS), strict=False):
        caches = ("--enable-prefix-caching", "--kv-eviction", eviction)
        cells = {"cells": 2} if name in CELL_ROUTERS else {}
        kv_cache = {"dram": "1GiB", "eviction": eviction}
        yield policy(
            f"{handoff}-{eviction}", name, serve=caches, router=name, handoff=handoff, kv_cache=kv_cache, **cells
        )


def batchers():
    """Yield a test case for each batcher, in a pool whose role the batcher supports."""
    for name, batcher in BATCHERS.items():
        prefill = (PREFILL | {"batcher": name}) if batcher.prefills else PREFILL
        decode = (DECODE | {"batcher": name}) if batcher.decodes else DECODE
        mixed = batcher.prefills and batcher.decodes
        bound = {"inline_tbt_s": 0.1} if name == INLINED else {}
        yield policy("batcher", name, pools=[MIXED | {"batcher": name}] if mixed else [prefill, decode], **bound)


def performance_models():
    """Yield a test case for each performance model."""
    for name, rule in zip(PERFORMANCE_MODELS, cycle(OVERLOAD_RULES), strict=False):
        if name.startswith("aiconfigurator") and find_spec("aiconfigurator_core") is None:
            continue  # an extra
        model, size = PUBLISHED.get(name, ("llama-3.1-8b" if name.startswith("aiconfigurator") else "opt-13b", {}))
        pools = [{**pool, **size} for pool in (PREFILL, DECODE)]
        flags = ("--overload", rule, "--slo", "ttft=30,tpot=1")
        yield policy(rule, name, *flags, pools=pools, model=model, performance=name)


POLICIES = [*routers(), *batchers(), *performance_models()]


@pytest.fixture
def completed(twofold, tmp_path):
    """Return a function that simulates six requests and returns the number of completed requests."""

    def run(*flags, trace_format="twofold"):
        path = tmp_path / f"trace{FORMATS[trace_format].suffix}"
        write_trace([ask(number, number * 0.5) for number in range(6)], path, FORMATS[trace_format])
        ended = twofold("simulate", path, "--json", *flags)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)["counts"]["completed"]

    return run


@pytest.fixture
def cluster_file(tmp_path):
    """Return a function that writes a cluster spec to a file and returns the file's path."""

    def write(cluster):
        path = tmp_path / "cluster.yaml"
        path.write_bytes(msgspec.yaml.encode(cluster))
        return path

    return write


@pytest.mark.parametrize(("cluster", "flags", "_serve"), POLICIES)
def test_policies_are_simulated(completed, cluster_file, cluster, flags, _serve):
    assert completed("--cluster", cluster_file(cluster), *flags) == 6


@pytest.mark.parametrize(("cluster", "flags", "serve"), POLICIES)
def test_policies_are_served(cluster_file, cluster, flags, serve):
    if cluster["pools"][0].get("batcher") == INLINED:
        pytest.skip("an emulated service cannot inline prompts; tests/serving/test_inlined_prefill.py serves a model")
    cluster = {name: value for name, value in cluster.items() if name not in SIMULATED_ONLY}
    with forked_service("--engine", "emulated", "--cluster", cluster_file(cluster), *flags, *serve) as url:
        outputs = asyncio.run(complete_all(url, PROMPTS, at_once=6, max_tokens=4))
        assert [len(output) for output in outputs] == [4] * 6
        assert asyncio.run(all_blocks_free(url))


def test_every_entry_is_walked():
    """The test cases use each hand-off policy, eviction policy and overload rule at least once."""
    assert len(LIVE_ROUTERS) >= max(len(HANDOFF_POLICIES), len(EVICTIONS))
    assert len(PERFORMANCE_MODELS) >= len(OVERLOAD_RULES)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name not in LIVE_ROUTERS])
def test_offline_routers_are_simulated(completed, cluster_file, router):
    assert completed("--cluster", cluster_file(MODEL | {"pools": [PREFILL, DECODE], "router": router})) == 6


@pytest.mark.parametrize("rules", RULES)
def test_rules_are_simulated(completed, rules):
    assert completed("--cluster", "1xa100@1:prefill,1xa100@1:decode", "--model", "opt-13b", "--rules", rules) == 6


@pytest.mark.parametrize("own_load", OWN_LOADS)
def test_own_loads_are_simulated(completed, cluster_file, own_load):
    cluster = cluster_file(MODEL | {"pools": [PREFILL, DECODE]})
    assert completed("--cluster", cluster, "--controllers", 2, "--own-load", own_load) == 6


@pytest.mark.parametrize("trace_format", WRITABLE)
def test_trace_formats_are_simulated(completed, trace_format):
    assert completed("--cluster", "2xh100", "--model", "opt-13b", trace_format=trace_format) == 6


def test_session_files_of_aiperf_are_simulated(twofold, tmp_path):
    path = tmp_path / "sessions.jsonl"
    path.write_text('{"session_id": "a", "input_length": 60, "output_length": 9, "delay": 1000}\n' * 6)
    ended = twofold("simulate", path, "--cluster", "2xh100", "--model", "opt-13b", "--json")
    assert json.loads(ended.out)["counts"]["completed"] == 6, ended.err


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_arrival_processes_are_simulated(twofold, arrival):
    workload = ("512+16", "--rate", 2, "--num-requests", 6, "--arrival", arrival)
    ended = twofold("simulate", *workload, "--cluster", "2xh100", "--model", "opt-13b", "--json")
    assert json.loads(ended.out)["counts"]["completed"] == 6, ended.err


def engines():
    """Yield the default engine with every transport, and every optional engine with the default transport."""
    yield from ((DEFAULT_ENGINE, transport) for transport in TRANSPORTS)
    yield from ((name, DEFAULT_TRANSPORT) for name, engine in ENGINES.items() if engine.runs_model and engine.extra)


@pytest.mark.parametrize(("engine", "transport"), [*engines()])
def test_engines_and_transports_serve_a_model(twofold, model, tmp_path, engine, transport):
    try:
        ENGINES[engine].check_installed()
        check_transport(transport)
    except ConfigurationError as error:
        pytest.skip(str(error))
    flags = ("--engine", engine, "--transport", transport)
    if transport == "curve":  # between hosts
        assert twofold("keygen", tmp_path / "key").code == 0
        flags += ("--listen-workers", f"tcp://127.0.0.1:{free_port()}", "--cluster-key", str(tmp_path / "key"))
    with served(model, (*ENGINE, *SPLIT, *flags)) as url:
        (output,) = asyncio.run(complete_all(url, [[5] * 40], at_once=1, max_tokens=4, ignore_eos=True))
        assert len(output) == 4
        assert metric_reaches(url, "kv_transfer_seconds_count", 1)
