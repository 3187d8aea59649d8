"""Measure by how much the KV transfer delays the second token, with GPU workers.

The benchmark starts a colocated service, then one prefill and one decode worker for each pair of transport
and hand-off mode. The delay is the extra time from the first token to the second, relative to the colocated
service.

`--device cuda:0` puts all workers on one GPU; `--device cuda` gives each worker its own GPU. Without
`--model`, the benchmark creates a model of 16 layers with random bfloat16 weights and the width of Llama 3.1
8B.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from second_token import ask
from twofold.bench.services import served
from twofold.errors import UserError
from twofold.reporting.output import json_text

COLOCATED = "not split"
WAYS = {
    f"{transport}, {mode}": ("--prefill", "1", "--decode", "1", "--transport", transport, "--handoff", mode)
    for transport in ("nixl", "shared_memory")
    for mode in ("layer-wise", "serialized", "pull")
}
SERVICES = {COLOCATED: ("--colocated", "1"), **WAYS}
SHAPE = {"hidden-size": 4096, "layers": 16, "heads": 32, "kv-heads": 8, "max-model-len": 16384}


class TokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median TTFT, first ITL and later ITL, in seconds, of one service at one prompt length."""

    service: str
    prompt_tokens: int
    ttft_s: float
    second_s: float
    step_s: float


def measure(model: Path, service: str, given: argparse.Namespace) -> list[TokenTimes]:
    flags = ["--device", given.device, "--kv-cache-memory-bytes", given.kv, "--no-enable-prefix-caching"]
    found = []
    with served(model, (*SERVICES[service], *flags)) as url:
        for tokens in given.prompts:
            timelines = asyncio.run(ask(url, tokens))
            found.append(
                TokenTimes(
                    service=service,
                    prompt_tokens=tokens,
                    ttft_s=statistics.median(each.ttft_s or 0.0 for each in timelines),
                    second_s=statistics.median(each.itl_s[0] for each in timelines),
                    step_s=statistics.median(gap for each in timelines for gap in each.itl_s[1:]),
                )
            )
    return found


def table(seen: list[TokenTimes], device: str) -> Table:
    """Return a table of the delay of the second token, with a row per service and a column per prompt length."""
    lengths = sorted({each.prompt_tokens for each in seen})
    plain = {each.prompt_tokens: each for each in seen if each.service == COLOCATED}
    drawn = Table(
        title=f"Delay of the second token relative to a colocated service, ms ({device}; in brackets its own step, ms)"
    )
    drawn.add_column("")
    for length in lengths:
        drawn.add_column(f"{length:,}", justify="right")
    drawn.add_row(
        f"{COLOCATED}: first token, ms", *(f"{plain[n].ttft_s * 1e3:.0f} [{_step(plain[n])}]" for n in lengths)
    )
    for service in dict.fromkeys(each.service for each in seen if each.service != COLOCATED):
        rows = {each.prompt_tokens: each for each in seen if each.service == service}
        later = [rows[n].second_s - plain[n].second_s for n in lengths]
        drawn.add_row(service, *(f"{s * 1e3:+.1f} [{_step(rows[n])}]" for n, s in zip(lengths, later, strict=True)))
    return drawn


def _step(seen: TokenTimes) -> str:
    return f"{seen.step_s * 1e3:.1f}"


def device_name(device: str) -> str:
    import torch  # noqa: PLC0415  (slow import, needed for the device name only)

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def create_model(model: Path) -> None:
    """Create the benchmark's model in a directory."""
    shape = [part for key, value in SHAPE.items() for part in (f"--{key}", str(value))]
    command = ["model", "create", str(model), *shape, "--dtype", "bfloat16"]
    subprocess.run([sys.executable, "-m", "twofold.cli.main", *command], check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a model is created)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192], help="tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kv", default="4GiB", help="KV cache of each worker")
    parser.add_argument("--json", type=Path, help="file for all results, written after each service")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-gpu-")))
        model = given.model or folder / "model"
        if given.model is None:
            create_model(model)
        seen: list[TokenTimes] = []
        for service in (COLOCATED, *given.ways):
            try:
                seen += measure(model, service, given)
            except UserError as error:
                sys.exit(f"{service}: {error}")
            print(f"{service}: done", flush=True)
            if given.json is not None:
                given.json.write_text(json_text(seen), "utf-8")
    Console(width=140).print(table(seen, device_name(given.device)))


if __name__ == "__main__":
    main()
