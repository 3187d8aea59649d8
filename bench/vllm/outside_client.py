"""Measure the latency and goodput of a service with the client `vllm bench serve`."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from stock_vllm import SERVED_NAME, VLLM, StockVllm

from twofold.errors import ConfigurationError

WARM_UPS = 3
# Number of compared characters at the end of an answer: vLLM prepends the prompt if it ends within a
# character, and greedy answers that diverge stay different.
COMPARED = 64
SETTLE_S = 600.0  # timeout for client startup and delayed answers


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the client: ranges of prompt and output lengths, duration in seconds, and SLO."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seconds: float
    ttft_s: float
    tpot_s: float
    seed: int

    def requests(self, rate: float) -> int:
        return max(2, round(rate * self.seconds))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The client's results at one rate. Latencies are in milliseconds."""

    rate: float
    sent: int
    completed: int
    duration_s: float
    goodput: float  # requests/s that meet the SLO
    output_tokens_per_s: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    p50_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    answers: list[str]  # digest of the end of each answer, in request order

    @property
    def attainment(self) -> float:
        """Return the share of requests that were answered within the SLO."""
        return self.goodput * self.duration_s / self.sent


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the result file of `vllm bench serve`."""

    completed: int
    duration: float
    request_goodput: float
    output_throughput: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    p50_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    generated_texts: list[str]


def measure(url: str, stock: StockVllm, load: Load, rate: float, folder: Path, cores: Sequence[int]) -> Measured:
    """Run `vllm bench serve` at one rate. Raises ConfigurationError if it fails or does not end."""
    result, log = folder / "client.json", folder / "client.log"
    result.unlink(missing_ok=True)
    command = [
        "taskset",
        "--cpu-list",
        ",".join(map(str, cores)),
        *VLLM,
        "bench",
        "serve",
        "--backend",
        "openai",
        "--base-url",
        url,
        "--model",
        SERVED_NAME,
    ]
    command += ["--tokenizer", str(stock.model), "--dataset-name", "random", *_lengths(load)]
    command += ["--num-prompts", str(load.requests(rate)), "--request-rate", str(rate), "--seed", str(load.seed)]
    command += ["--temperature", "0", "--ignore-eos", "--num-warmups", str(WARM_UPS), "--disable-tqdm"]
    command += ["--goodput", f"ttft:{load.ttft_s * 1e3:g}", f"tpot:{load.tpot_s * 1e3:g}"]
    command += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", result.name]
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **stock.environment, "OMP_NUM_THREADS": "1"},
                timeout=SETTLE_S + 5 * load.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"the client did not finish within {error.timeout:.0f} s") from error
    if done.returncode or not result.exists():
        raise ConfigurationError(f"the client failed: {log.read_text(errors='replace')[-2000:]}")
    return _measured(msgspec.json.decode(result.read_bytes(), type=_Result), rate, load.requests(rate))


def _measured(result: _Result, rate: float, sent: int) -> Measured:
    return Measured(
        rate=rate,
        sent=sent,
        completed=result.completed,
        duration_s=result.duration,
        goodput=result.request_goodput,
        output_tokens_per_s=result.output_throughput,
        p50_ttft_ms=result.p50_ttft_ms,
        p99_ttft_ms=result.p99_ttft_ms,
        p50_tpot_ms=result.p50_tpot_ms,
        p99_tpot_ms=result.p99_tpot_ms,
        p50_itl_ms=result.p50_itl_ms,
        p99_itl_ms=result.p99_itl_ms,
        answers=[hashlib.sha256(text[-COMPARED:].encode()).hexdigest()[:16] for text in result.generated_texts],
    )


def _lengths(load: Load) -> list[str]:
    # The client takes the mean and the relative half-width of each range of lengths.
    (prompt, prompt_share), (output, output_share) = (
        ((low + high) / 2, (high - low) / (high + low)) for low, high in (load.prompt_tokens, load.output_tokens)
    )
    shares = msgspec.json.encode({"input": prompt_share, "output": output_share}).decode()
    lengths = ["--random-input-len", f"{prompt:.0f}", "--random-output-len", f"{output:.0f}"]
    return [*lengths, "--random-range-ratio", shares]
