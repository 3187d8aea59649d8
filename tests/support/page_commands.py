"""Runs the commands of documentation pages in a short form, on this host."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

import httpx
from msgspec.structs import replace

from support import sglang_server
from support.documented import PAGES, Page, Statement, runs, yaml_blocks
from support.hosts import profile
from support.running_service import running_service
from support.waiting import until
from twofold.bench.services import free_port, stop
from twofold.hardware.hf_config import read_model
from twofold.performance.profile import dump_profile

SERVICES = {"serve", "route", "join"}
MEMORY = "--kv-cache-memory-bytes 64MiB --max-num-seqs 8"
SEARCH = "--draws 0 --min-requests 20 --duration 2 --tolerance 0.5 --jobs 1"
# Flags that shorten a command. Those in a page's `<!-- short: … -->` follow them, and the last of a flag counts.
SHORT = {
    "serve": f"--dtype float32 --max-model-len 2048 {MEMORY} --port {{port}}",
    "serve --engine": "--port {port}",  # the emulated one
    "serve --cluster": "--dtype float32 --kv-cache-memory-bytes 64MiB --port {port}",
    "route": "--probe-timeout 600 --port {port}",
    "join": "--address 127.0.0.1 --kv-cache-memory-bytes 64MiB",
    "chat": "--base-url {url} --max-tokens 8",
    "bench agent": "--base-url {url} --rate 20 --duration 10 --num-requests 4",
    "bench": "--base-url {url} --rate 4 --duration 2 --num-requests 4 --length-scale 0.01 --max-model-len 256",
    "pools": "--base-url {url}",
    "torture": "--duration 2 --concurrency 2 --num-prompts 4 --max-prompt-tokens 64 --longest-prompt 64",
    "characterize": "--budget 3 --threads 1 --max-num-batched-tokens 256 " + MEMORY,
    "characterize URL": "--budget 3 --model-sizes {model} --kv-capacity-tokens 10000",
    "verify": f"--num-requests 4 --rate 4 --replays 1 --max-model-len 256 --dtype float32 {MEMORY}",
    "verify URL": "--num-requests 4 --rate 4 --replays 1 --max-model-len 256",
    "simulate agent": "--duration 100 --num-requests 8",
    "simulate": "--duration 2",
    "plan": SEARCH,
    "plan --profile": f"{SEARCH} --length-scale 0.01 --slo ttft=60,tpot=10",
}
# Statements that no test runs here, by a regex of their text, with the reason.
ELSEWHERE = {
    r"^make ": "installs packages, or runs tests and benchmarks",
    r"^pip install|peers/bin/pip": "installs packages",
    r"^docker build": "needs Docker",
    r"^kubectl": "needs a Kubernetes cluster",
    r"^helm install": "needs a Kubernetes cluster",
    r"^ray start|--launcher ray|--ray ": "needs Ray: tests/serving/launch/ray and tests/planning/executors",
    r"vllm serve|^python -m (sglang|llama_cpp)": "servers of other projects: tests/serving/upstream",
    r"--(decode-)?engine-args|--lora-modules|--engine vllm -- ": "options of vLLM: tests/serving/vllm",
    r"by-length|RegisteredRouter|class ByLength": "tests/cli/test_added_policies.py follows the guide",
    r"^twofold model get": "downloads a model: tests/cli/test_model.py",
    r"characterize .*--(engine vllm|device cuda)": "needs vLLM or a GPU: docs/characterize.md runs it without",
    r"characterize http://10\.": "a server of the reader: docs/characterize.md runs it with a service",
    r"tools/evidence\.py|&& python bench/": "runs benchmarks: tests/tools/test_evidence.py",
    r"^twofold calibrate live": "takes minutes: tests/cli/test_verify.py",
    r"^twofold characterize MODEL": "docs/characterize.md has the same command",
    r"aiconfigurator|catalog operators": "needs an extra: tests/performance/test_aiconfigurator.py",
    r"iptables": "needs other servers and root",
    r"data/profiles|measurements\.csv": "needs public data: tests/cli/test_characterize.py",
}
# Stand-ins by regex: for models, hosts and folders of the reader, for hardware that is not here, and for arguments
# that make a Python snippet long.
STAND_INS = {
    r"\$\(twofold model get smollm2\)|\bQwen/Qwen3-0\.6B|/models/[\w.-]+|\bMODEL\b": "{model}",
    r"tcp://10\.0\.0\.1:7600": "tcp://127.0.0.1:{workers_port}",
    r"http://10\.0\.0\.9:8000|http://127\.0\.0\.1:8000|\bURL\b": "{url}",
    r"\bTRACE\b": "trace.jsonl",
    r"--cluster FILE\b": "--cluster cluster.yaml",
    r"/var/kv:100GiB": "{folder}/kv:64MiB",
    r"--kv-store-dram 4GiB": "--kv-store-dram 64MiB",
    r" --kill '[^']*'": "",  # tests/torture causes faults: these commands could end workers of other tests
    r"\bduration=120\b": "duration=5",
    r"\bmax_machines=4\b": "max_machines=4, draws=0, min_requests=20, tolerance=0.5",
    r" --device cuda(:\d)?| --transport nixl| --engine vllm": "",
}
# Files that the reader of a page has, and the commands that make such files. `_write` makes the others.
FILES = {
    "trace.csv": "twofold trace generate azure-conv --rate 20 --duration 30 --to azure --output trace.csv",
    "plan.yaml": f"twofold plan azure-conv --model llama-3.1-8b --max-machines 1 --output plan.yaml {SEARCH}",
}


def elsewhere(statement: Statement) -> str | None:
    """Return the reason why no test runs a statement here."""
    return next((reason for pattern, reason in ELSEWHERE.items() if re.search(pattern, statement.text)), None)


OTHER_FILES = {"host.yaml", "server.yaml", "mine.yaml", "trace.jsonl", "mooncake.jsonl", "cluster.yaml"}
CLUSTER = """
model: {model}
router: jsq
pools:
- {{machines: 1, machine: h100, tensor_parallel: 1, instances: 1, role: prefill}}
- {{machines: 1, machine: h100, tensor_parallel: 1, instances: 1, role: decode}}
"""


class CommandFailedError(AssertionError):
    """A command of a page that ended with an error; has its text and what it wrote."""


@dataclass
class Started:
    """A process of a page: a service, or a host that joins one and has no URL."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    ready: bool = False


@dataclass
class PageRun:
    """Run of a page's commands in an empty folder. `shared` keeps services that several pages start."""

    model: Path
    folder: Path
    environment: dict[str, str]
    shared: "SharedServices"
    url: str = ""
    _workers_port: int = 0
    _started: list[Started] = field(default_factory=list)
    _servers: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._workers_port = free_port()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_services()
        self._stack.close()

    def run_all(self, statements: list[Statement]) -> None:
        """Run statements in order, and wait until the last services are ready."""
        for statement in statements:
            self.run(statement)
        self.settle()

    def run(self, statement: Statement) -> None:
        """Run one statement: start a service, or run a command to its end."""
        name = name_of(statement)
        if name not in SERVICES and not self.url and _asks(statement):
            self._start("serve", Statement(statement.page, "twofold serve MODEL --prefill 1 --decode 1"))
        if name in SERVICES:
            self._start(name, statement)
        elif statement.python:
            self.settle()
            self._run([sys.executable, "-c", self._placed(statement.text)], statement.text)
        else:
            self.settle()
            self._files(statement)
            self._run(["bash", "-ec", self.shortened(statement)], statement.text)

    def shortened(self, statement: Statement) -> str:
        """Return the text of a statement with its stand-ins and short flags."""
        lines = []
        for line in statement.text.splitlines():
            text = self._placed(line.split(" #")[0].split(" |")[0].rstrip())
            if text.lstrip().startswith("twofold "):
                given = statement.short if text.split()[1] in {"bench", "plan", "simulate"} else ""
                text = f"{text} {self._placed(_short(text))} {given}"
            lines.append(text)
        return "\n".join(lines)

    def _placed(self, text: str) -> str:
        for pattern, stand_in in STAND_INS.items():
            text = re.sub(pattern, stand_in.replace("\\", ""), text)
        for name in ("model", "url", "folder"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        text = text.replace("{workers_port}", str(self._workers_port))
        for host in re.findall(r"http://10\.0\.0\.\d+:\d+", text):
            text = text.replace(host, self._server(host, text))
        return text

    def _server(self, host: str, text: str) -> str:
        """Start a server with SGLang's protocol in place of a server of the reader."""
        role = next((each for each in ("prefill", "decode") if f"--{each} {host}" in text), "null")
        name = f"{role} {host}"
        if name not in self._servers:
            flags = ("--role", role, "--bootstrap-port", str(free_port()))
            running = running_service(self.model, *flags, program=(sglang_server.__file__,))
            self._servers[name] = self._stack.enter_context(running)[1]
        return self._servers[name]

    def _files(self, statement: Statement) -> None:
        """Write the files that a statement reads and no earlier one wrote."""
        words = self._placed(statement.text).split()
        outputs = {after for before, after in pairwise(words) if before in {"--output", "-o"}}
        for name in ({*words} - outputs) & {*FILES, *OTHER_FILES}:
            if not (self.folder / name).exists():
                self._write(name, statement.page)

    def _write(self, name: str, page: Path) -> None:
        if name in FILES:
            self._run(["bash", "-ec", FILES[name]], FILES[name])
            return
        if name.endswith(".jsonl"):
            text = "".join(_trace())
        elif name == "cluster.yaml":
            text = CLUSTER.format(model=self.model)
        elif name == "mine.yaml" and (blocks := yaml_blocks(page)):
            text = blocks[0]
        else:
            text = dump_profile(replace(profile(), model=read_model(self.model)))
        (self.folder / name).write_text(text, encoding="utf-8")

    def _run(self, command: list[str], shown: str) -> None:
        ended = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, input="Hello\n"
        )
        verdict = "twofold verify" in shown and ended.returncode == 1 and not ended.stderr.startswith("twofold:")
        if ended.returncode != 0 and not verdict:  # a short run of `verify` may miss its tolerances
            raise CommandFailedError(f"{shown}\n{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")

    def _start(self, name: str, statement: Statement) -> None:
        if name != "join":
            self.settle()
            self._end_services()
        self._files(statement)
        text = self.shortened(statement)
        shared = text.startswith(self._placed(SharedServices.COMMAND + " " + SHORT["serve"]))
        if shared and (known := self.shared.url(text)):
            self.url = known
            return
        port = free_port()
        log = self.folder / f"{name}-{port}.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text.replace('{port}', str(port))}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
            )
        self._started.append(Started(process, "" if name == "join" else f"http://127.0.0.1:{port}", log))
        self.url = self._started[-1].url or self.url
        if shared:
            self.settle()
            self.shared.keep(text, self._started.pop().process, self.url)

    def settle(self) -> None:
        """Wait until the started services are ready, and request a completion of each."""
        for each in self._started:
            if each.url and not each.ready:
                until(lambda url=each.url: self._healthy(url))
                _complete(each.url)
                each.ready = True

    def _healthy(self, url: str) -> bool:
        """Return whether a service answers. Raises AssertionError if a process has ended."""
        running = all(it.process.poll() is None for it in self._started)
        assert running, "\n".join(it.log.read_text() for it in self._started)
        try:
            return httpx.get(f"{url}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def _end_services(self) -> None:
        while self._started:
            stop(self._started.pop().process)


class SharedServices:
    """The service that most pages start, kept until `close`."""

    COMMAND = "twofold serve {model} --prefill 1 --decode 1"

    def __init__(self) -> None:
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def url(self, command: str) -> str | None:
        return self._running[command][1] if command in self._running else None

    def keep(self, command: str, process: subprocess.Popen[bytes], url: str) -> None:
        self._running[command] = (process, url)

    def close(self) -> None:
        for process, _ in self._running.values():
            stop(process)


def name_of(statement: Statement) -> str:
    """Return the name of a statement's first `twofold` command, or an empty string."""
    return next((words[1] for words in statement.commands()), "")


def _trace() -> Iterator[str]:
    """Yield the lines of a trace in Mooncake's format: four conversations with a common beginning."""
    for number in range(60):
        ids = [0, 1, *range(number % 4 * 10 + 2, number % 4 * 10 + 4)]
        fields = {"timestamp": 500 * number, "input_length": 2048, "output_length": 16, "hash_ids": ids}
        yield json.dumps(fields) + "\n"


def _asks(statement: Statement) -> bool:
    """Whether a statement needs a running service."""
    text = "\n".join([statement.text, *(SHORT.get(words[1], "") for words in statement.commands())])
    return bool(re.search(r"\{url\}|127\.0\.0\.1:8000|\bURL\b", text))


def _short(text: str) -> str:
    words = text.split()
    command = words[1]
    names = [f"{command} agent"] if "agent" in words else []
    names += [f"{command} URL"] if len(words) > 2 and re.match(r"http://|URL", words[2]) else []
    flags = [f"{command} {flag}" for flag in ("--engine", "--cluster", "--profile") if flag in words]
    known = (SHORT[name] for name in [*names, *flags, " ".join(words[1:3]), command] if name in SHORT)
    return next(known, "")


def _complete(url: str) -> None:
    model = httpx.get(f"{url}/v1/models", timeout=600).json()["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text


def _runnable(page: Page) -> list[Statement]:
    """Return the statements of a page that run here."""
    ours = (it for it in page.statements if it.python or (name_of(it) and not it.benchmark))
    return [it for it in ours if runs(it) and not elsewhere(it)]


def needs_services(statements: list[Statement]) -> bool:
    """Whether statements start services, or load one."""
    return any(name_of(it) in SERVICES or _asks(it) for it in statements)


RUNNABLE = {page.path: found for page in PAGES if (found := _runnable(page))}
