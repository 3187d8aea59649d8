"""Send requests with AIPerf, and measure what AIPerf adds to the times of Twofold's own client."""

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import psutil
from stock_vllm import SERVED_NAME

from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import OfferedLoad, replay_on
from twofold.performance.profile import MeasuredProfile
from twofold.request import FinishReason, Request
from twofold.timeline import Moment, Timeline
from twofold.workload.mooncake import MOONCAKE
from twofold.workload.trace import write_trace

SETTLE_S = 900.0
SAMPLED_S = 0.5  # time between samples of AIPerf's CPU time
# Requests to the idle service, one at a time: first with one output token each, and after a pause, with many.
PROBES = 16
SPACING_S = 1.5
PAUSE_S = 12.0
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 48


class ClientTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times that AIPerf adds to those of Twofold's client, in seconds."""

    delay_s: float  # of the first token, in addition to `request_s`
    request_s: float  # CPU time per request before its first token
    token_s: float  # CPU time per output token

    def extend(self, profile: MeasuredProfile) -> MeasuredProfile:
        """Return a copy of a profile of a shared host, whose requests come from AIPerf."""
        host = profile.shared_host
        front = msgspec.structs.replace(
            host.front,
            request_delay_s=host.front.request_delay_s + self.delay_s,
            request_s=host.front.request_s + self.request_s,
            token_s=host.front.token_s + self.token_s,
        )
        return msgspec.structs.replace(profile, host=msgspec.structs.replace(host, front=front))


class AIPerf:
    """AIPerf's command, with a folder for its files. `model` is the directory of the served model."""

    def __init__(self, command: Path, model: Path, folder: Path) -> None:
        self._command, self._model, self._folder = command, model, folder
        self._runs = 0

    def send(self, url: str, requests: Sequence[Request]) -> list[Timeline]:
        """Send requests to a service at their arrival times. Raises ConfigurationError on failure."""
        return self._run(url, requests)[0]

    def times(self, url: str) -> ClientTimes:
        """Measure what AIPerf adds on an idle service. Raises ConfigurationError on failure."""
        first_s, second_s = 0.0, PROBES * SPACING_S + PAUSE_S
        short, long = _probes(first_s, 1), _probes(second_s, OUTPUT_TOKENS)
        before = replay_on(url, OfferedLoad(requests=short))
        sent, used = self._run(url, [*short, *long])
        after = replay_on(url, OfferedLoad(requests=short))
        # CPU seconds in three spans of time: with the first requests, in the pause, and with the others.
        ends = sent[0].moments[Moment.ARRIVED] + np.array(
            (first_s, second_s - PAUSE_S, second_s, second_s + PROBES * SPACING_S)
        )
        first, pause, second = np.diff(np.interp(ends, *np.transpose(used))).tolist()
        token_s = max(0.0, (second - first) / (PROBES * (OUTPUT_TOKENS - 1)))
        later_s = max(0.0, _ttft_s(sent) - _ttft_s([*before, *after]))
        # AIPerf also computes after the first token, when it records the request.
        request_s = min(later_s, max(0.0, first / PROBES - pause * SPACING_S / PAUSE_S - token_s))
        return ClientTimes(delay_s=later_s - request_s, request_s=request_s, token_s=token_s)

    def _run(self, url: str, requests: Sequence[Request]) -> tuple[list[Timeline], list[tuple[float, float]]]:
        # Returns the timelines, and AIPerf's CPU time at some times of time.time().
        self._runs += 1
        artifacts, log = self._folder / f"aiperf-{self._runs}", self._folder / "aiperf.log"
        trace = self._folder / "trace.jsonl"
        write_trace(requests, trace, MOONCAKE)
        # AIPerf shares the two cores with the service, so it runs without monitors of its own. At a low priority, it
        # would wait for a core while all instances are busy, and record tokens late and in bursts.
        command = [str(self._command), "profile", "--ui", "none"]
        command += ["--model", SERVED_NAME, "--url", url]
        command += ["--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1", "--record-processors", "1"]
        command += ["--stats-interval", "0"]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
        command += ["--tokenizer", str(self._model.absolute()), "--artifact-dir", str(artifacts)]
        command += ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
        command += ["--fixed-schedule", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            used = _cpu_times(process)
        if process.returncode:
            raise ConfigurationError(f"{' '.join(command[:4])} … failed: {log.read_text(errors='replace')[-2000:]}")
        records = (artifacts / "profile_export.jsonl").read_bytes().splitlines()
        if len(records) != len(requests):
            raise ConfigurationError(f"AIPerf has results of {len(records)} of {len(requests)} requests")
        sent = [msgspec.json.decode(line, type=_Record).timeline() for line in records]
        return sorted(sent, key=lambda each: each.moments[Moment.ARRIVED]), used


def _probes(at_s: float, output_tokens: int) -> list[Request]:
    return [
        Request(
            id=f"{output_tokens}-{number}",
            arrival_s=at_s + number * SPACING_S,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
        )
        for number in range(PROBES)
    ]


def _ttft_s(sent: Sequence[Timeline]) -> float:
    return median(each.moments[Moment.FIRST_TOKEN] - each.moments[Moment.ARRIVED] for each in sent)


def _cpu_times(process: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
    """Wait for the process. Return pairs of a time of time.time(), and CPU seconds of all its processes until then."""
    root, spent = psutil.Process(process.pid), dict[int, float]()
    samples: list[tuple[float, float]] = []
    deadline = time.monotonic() + SETTLE_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise ConfigurationError(f"AIPerf took more than {SETTLE_S:g} s")
        with suppress(psutil.NoSuchProcess):
            for each in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    spent[each.pid] = times.user + times.system
        samples.append((time.time(), sum(spent.values())))
        time.sleep(SAMPLED_S)
    return samples


class _Metric(msgspec.Struct):
    value: float


class _Metrics(msgspec.Struct):
    """Metrics of one request in AIPerf's `profile_export.jsonl`; times in milliseconds."""

    time_to_first_token: _Metric
    request_latency: _Metric
    input_sequence_length: _Metric
    output_sequence_length: _Metric


class _Metadata(msgspec.Struct):
    request_start_ns: int


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics | None = None

    def timeline(self) -> Timeline:
        """Return the timeline of the request. Raises ConfigurationError if the request failed."""
        found, start_s = self.metrics, self.metadata.request_start_ns / 1e9
        if found is None:
            raise ConfigurationError("a request of AIPerf failed: see profile_export.jsonl")
        prompt, output = (int(each.value) for each in (found.input_sequence_length, found.output_sequence_length))
        return Timeline(
            request=Request(id=f"{start_s}", arrival_s=start_s, prompt_tokens=prompt, output_tokens=output),
            moments={
                Moment.ARRIVED: start_s,
                Moment.FIRST_TOKEN: start_s + found.time_to_first_token.value / 1e3,
                Moment.LAST_TOKEN: start_s + found.request_latency.value / 1e3,
            },
            output_tokens=output,
            finish_reason=FinishReason.LENGTH,
        )
