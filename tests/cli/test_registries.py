"""Every registered policy runs; a router and a batcher are added by one file and one registry line each."""

import json
import shutil
import subprocess
import sys
import urllib.request
from itertools import zip_longest
from pathlib import Path

import pytest

import twofold
from support.running_service import running_service
from twofold.cli.simulate.settings import OWN_LOADS
from twofold.cluster.rules import RULES
from twofold.kvcache.eviction import EVICTIONS
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.scheduling.admission.overload import OVERLOAD_RULES
from twofold.scheduling.batchers import BATCHERS, INLINED
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES
from twofold.scheduling.routers import CELL_ROUTERS, FIXED_ROLE_ROUTERS, LIVE_ROUTERS, ROUTERS
from twofold.workload.distributions import ARRIVALS

ROUTER = """
from twofold.scheduling.routers.in_turn import InTurn


class LastFirst(InTurn):
    \"\"\"Instances in turn, for a test.\"\"\"

    def __init__(self) -> None:
        super().__init__(lambda turn: turn if turn >= 0 else ~turn)
"""
BATCHER = """
from twofold.scheduling.batchers.mixed import MixedContinuous


class AddedBatcher(MixedContinuous):
    \"\"\"Whole prompts beside decodes, for a test.\"\"\"
"""
CLUSTER = """
model: llama2-70b
router: last-first
pools:
- {machines: 1, machine: h100, role: mixed, batcher: added}
"""
WORKLOAD = ("512+16", "--model", "llama2-70b")
POLICIES = ("--router", "last-first", "--batcher", "mixed=added")


def add(folder: Path, module: str, text: str, registry: str, line: str) -> None:
    """Write the file of a policy, and its line in the registry."""
    (folder / f"{module}.py").write_text(text)
    name = next(word for word in text.split("class ")[1].replace("(", " ").split())
    path = folder / "__init__.py"
    lines = path.read_text().splitlines()
    at = next(number for number, each in enumerate(lines) if each.startswith(f"{registry}: "))
    lines.insert(at + 1, line)
    package = f"twofold.scheduling.{folder.name}.{module}"
    first = next(number for number, each in enumerate(lines) if each.startswith("from twofold."))
    lines.insert(first, f"from {package} import {name}")
    path.write_text("\n".join([*lines, ""]))


def answer_of(url):
    body = json.dumps({"model": "llama2-70b", "prompt": [1, 2, 3], "max_tokens": 4}).encode()
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
        return json.load(response)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with one more router and one more batcher."""
    root = tmp_path_factory.mktemp("added")
    shutil.copytree(
        Path(twofold.__file__).parent, root / "twofold", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    scheduling = root / "twofold/scheduling"
    add(
        scheduling / "routers",
        "last_first",
        ROUTER,
        "ROUTERS",
        '    "last-first": RegisteredRouter(LastFirst, "an added router"),',
    )
    add(scheduling / "batchers", "added", BATCHER, "BATCHERS", '    "added": AddedBatcher,')
    return root


@pytest.fixture
def run(package, monkeypatch, tmp_path):
    """Run a command of the copy, and return what it prints."""
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "twofold.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return command


@pytest.mark.parametrize("name", ["serve", "simulate", "plan"])
def test_help_names_added_policies(run, name):
    shown = run(name, "--help")
    assert "last-first:" in shown
    assert "added:" in shown


def test_added_policies_are_simulated(run):
    cluster = ("--cluster", "2xh100:mixed", "--rate", 2, "--num-requests", 20)
    report = json.loads(run("simulate", *WORKLOAD, *cluster, *POLICIES, "--json"))
    assert report["counts"]["completed"] == 20


def test_added_policies_are_planned_with(run):
    budget = ("--max-machines", 2, "--machines", "h100", "--jobs", 1, "--min-requests", 20)
    slo = ("--slo", "ttft=30,tpot=1", "--tolerance", 0.5, "--duration", 10)
    plan = run("plan", *WORKLOAD, *budget, *slo, *POLICIES, "--json")
    assert "h100 added" in plan


def test_added_policies_are_served(package, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(package))
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    with running_service(None, "--engine", "emulated", "--cluster", path) as (_, url):
        assert answer_of(url)["usage"]["completion_tokens"] == 4


# -- every entry of every registry -------------------------------------------------------------------------------------

SPLIT = "1xh100:prefill,1xh100:decode"
MODELS = {  # machine and model that a published performance model covers
    "splitwise-published": ("h100", "llama2-70b"),
    "distserve-published": ("a100@4", "opt-66b"),
    "distserve-published-vllm": ("a100@4", "opt-66b"),
}
SLO = ("--slo", "ttft=30,tpot=1")
SIMULATED = [
    *(("--router", name) for name in ROUTERS),
    *(("--handoff", name) for name in HANDOFF_POLICIES),
    *(("--overload", name, *SLO) for name in OVERLOAD_RULES),
    *(("--rules", name) for name in RULES),
    *(("--kv-cache", f"dram=1GiB,eviction={name}") for name in EVICTIONS),
    *(("--arrival", name) for name in ARRIVALS),
    *(("--controllers", "2", "--own-load", name) for name in OWN_LOADS),
]


def pools_of(batcher):
    """A cluster file's pools for a batcher: one for its phase beside one for the other, or one for both."""
    kind, name = BATCHERS[batcher], f"batcher: {batcher}"
    if kind.prefills and kind.decodes:
        return f"- {{machines: 1, machine: h100, role: mixed, {name}}}\n"
    prefill, decode = (f", {name}" if runs else "" for runs in (kind.prefills, kind.decodes))
    return (
        f"- {{machines: 1, machine: h100, role: prefill{prefill}}}\n"
        f"- {{machines: 1, machine: h100, role: decode{decode}}}\n"
    )


def simulated(twofold, model, *flags):
    shape = ("512+16", "--model", model, "--rate", 2, "--num-requests", 20)
    done = twofold("simulate", *shape, *flags, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["counts"]["completed"]


@pytest.mark.parametrize("flags", SIMULATED, ids=" ".join)
def test_every_policy_is_simulated(twofold, flags):
    cells = ("--cells", 1) if flags[1] in CELL_ROUTERS else ()
    router = () if "--router" in flags else ("--router", "jsq")
    assert simulated(twofold, "llama2-70b", "--cluster", SPLIT, *flags, *router, *cells) == 20


@pytest.mark.parametrize("name", BATCHERS)
def test_every_batcher_is_simulated(twofold, tmp_path, name):
    path = tmp_path / "cluster.yaml"
    bound = "inline_tbt_s: 0.2" if name == INLINED else ""
    path.write_text(f"model: llama2-70b\nrouter: jsq\n{bound}\npools:\n{pools_of(name)}")
    assert simulated(twofold, "llama2-70b", "--cluster", path) == 20


@pytest.mark.parametrize("name", PERFORMANCE_MODELS)
def test_every_performance_model_is_simulated(twofold, name):
    machine, model = MODELS.get(name, ("h100", "llama2-70b"))
    pools = f"1x{machine}:prefill,1x{machine}:decode"
    assert simulated(twofold, model, "--cluster", pools, "--router", "jsq", "--performance", name) == 20


MOVED = [name for name in LIVE_ROUTERS if name not in FIXED_ROLE_ROUTERS]
FIXED = [name for name in LIVE_ROUTERS if name in FIXED_ROLE_ROUTERS]
EMULATED_BATCHERS = [name for name in BATCHERS if name != INLINED]  # an emulated service cannot inline prompts
# One service has an entry of each registry, so that each entry is served once. Routers that read prefix caches come
# first, with batchers that reuse prefixes.
SERVED = [
    *zip_longest(
        sorted(FIXED, key=lambda name: not ROUTERS[name].kind.reads_prefix_caches),
        sorted(EMULATED_BATCHERS, key=lambda name: not BATCHERS[name].reuses_prefix),
        HANDOFF_POLICIES,
    ),
    *((name, "splitwise", None) for name in MOVED),
]


@pytest.mark.parametrize(("router", "batcher", "handoff"), SERVED)
def test_every_policy_is_served(tmp_path, router, batcher, handoff):
    router, batcher, handoff = router or "jsq", batcher or "mixed", handoff or "by-size"
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: llama2-70b\nrouter: {router}\nhandoff: {handoff}\npools:\n{pools_of(batcher)}")
    caching = ("--enable-prefix-caching",) if ROUTERS[router].kind.reads_prefix_caches else ()
    with running_service(None, "--engine", "emulated", "--cluster", path, *caching) as (_, url):
        assert answer_of(url)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", OVERLOAD_RULES)
def test_every_overload_rule_is_served(tmp_path, name):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: llama2-70b\nrouter: jsq\npools:\n{pools_of('prefill')}")
    flags = ("--engine", "emulated", "--cluster", path, "--overload", name, *SLO)
    with running_service(None, *flags) as (_, url):
        assert answer_of(url)["usage"]["completion_tokens"] == 4
