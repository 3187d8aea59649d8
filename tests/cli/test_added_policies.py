"""Adding a router or a batcher requires only one new file and one new line in a registry."""

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import twofold
from support.running_service import running_service

ROUTER = """
from twofold.scheduling.routers.draws import InTurn


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
GUIDE = Path(__file__).parents[2] / "docs/how-to/add-a-policy.md"
CLUSTER = """
model: llama2-70b
router: last-first
pools:
- {machines: 1, machine: h100, role: mixed, batcher: added}
"""
WORKLOAD = ("512+16", "--model", "llama2-70b")
POLICIES = ("--router", "last-first", "--batcher", "mixed=added")


def add(folder: Path, module: str, text: str, registry: str, line: str) -> None:
    """Write the module of a router or batcher into `folder`, and register it."""
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
    """Return the directory of a copy of the `twofold` package with an additional router and batcher."""
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
    router, line = (token.content for token in MarkdownIt().parse(GUIDE.read_text()) if token.info == "python")
    add(scheduling / "routers", "by_length", router, "ROUTERS", line)
    add(scheduling / "batchers", "added", BATCHER, "BATCHERS", '    "added": AddedBatcher,')
    return root


@pytest.fixture
def run(package, monkeypatch, tmp_path):
    """Return a function that runs a `twofold` command with the added policies."""
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


def test_the_router_of_the_guide_keeps_long_prompts_apart(run):
    """With only short prompts, the second prefill instance computes nothing."""
    cluster = ("--cluster", "2xh100@8:prefill,1xh100@8:decode", "--rate", 2, "--num-requests", 20)
    run("simulate", *WORKLOAD, *cluster, "--router", "by-length", "--event-log", "events.jsonl")
    events = Path("events.jsonl").read_text()
    assert '"event":"run","instance":"prefill-0"' in events
    assert '"event":"run","instance":"prefill-1"' not in events


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
