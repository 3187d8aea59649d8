"""Compare the parts of the TTFT that a service reports with the TTFT that its client measures.

Without --url, a colocated and a split service of a small model are started in turn. Exits with 1 if the parts do not
sum to the client's mean TTFT within 5%.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec

from twofold.bench.endpoint import discover
from twofold.bench.load import LoadConfig, LoadResult, run_load
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.cli.bench import BenchReport
from twofold.engine.model_factory import ModelSpec, create_model
from twofold.errors import UserError
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds
from twofold.request import Request

SERVICES = {"split": ("--prefill", "1", "--decode", "1"), "colocated": ("--colocated", "1")}
TOLERANCE = 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--url", help="measure this service alone, which must be one of Twofold's")
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=2, help="clients, each with one request at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=16, help="tokens")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("serve", nargs="*", help="further flags of `twofold serve`, after --")
    return parser.parse_args()


async def load(url: str, given: argparse.Namespace) -> tuple[LoadConfig, LoadResult]:
    """Send the requests and return the options and the result of the load. Raises ConfigurationError."""
    endpoint = await discover(url)
    lowest, vocabulary = token_range(endpoint.vocab_size)
    config = LoadConfig(
        endpoint=endpoint,
        prompts=PromptMaker(lowest=lowest, vocabulary=vocabulary),
        concurrency=given.concurrency,
        warmup=2,
    )
    lengths = {"prompt_tokens": given.prompt, "output_tokens": given.output}
    requests = [Request(id=f"r{number}", arrival_s=0.0, **lengths) for number in range(given.requests)]
    return config, await run_load(config, requests)


class Sums(msgspec.Struct, frozen=True):
    """Mean TTFT in seconds: the sum of the parts, and as the client measured it."""

    parts_s: float
    client_s: float

    @property
    def agree(self) -> bool:
        return abs(self.client_s / self.parts_s - 1.0) <= TOLERANCE


def measure(name: str, url: str, given: argparse.Namespace) -> Sums | None:
    """Print the parts, their sum and the client's TTFT. Return the sums, or None if an answer has no timings."""
    config, result = asyncio.run(load(url, given))
    BenchReport.of(name, config, result, None, per_request=False).show()
    pairs = [(timings.ttft_s or 0.0, ttft_s) for timings, ttft_s in result.timings]
    if len(pairs) < given.requests:
        print(f"{name}: only {len(pairs)} of {given.requests} answers have timings")
        return None
    parts_s, client_s = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    worst = max(ttft_s / parts_s - 1.0 for parts_s, ttft_s in pairs)
    print(
        f"{name}: parts {seconds(parts_s)}, client's TTFT {seconds(client_s)}, difference "
        f"{seconds(client_s - parts_s)} ({client_s / parts_s - 1.0:.2%}; largest of a request {worst:.2%})"
    )
    return Sums(parts_s, client_s)


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="twofold-parts-") as folder:
        model = given.model or Path(folder) / "model"
        if given.url is None and given.model is None:
            create_model(model, ModelSpec())
        found: dict[str, Sums | None] = {}
        for name, flags in {"service": ()}.items() if given.url else SERVICES.items():
            service = nullcontext(given.url) if given.url else served(model, [*flags, *given.serve])
            try:
                with service as url:
                    found[name] = measure(name, url, given)
            except UserError as error:
                sys.exit(f"{name}: {error}")
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    sys.exit(0 if all(sums is not None and sums.agree for sums in found.values()) else 1)


if __name__ == "__main__":
    main()
