"""Options that several commands share, each with its name, help text and parser."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from twofold.cli.settings import Flag, Settings, flag, flag_name
from twofold.cluster.spec import parse_cache
from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.kvcache.eviction import EVICTIONS
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.scheduling.admission.overload import OVERLOAD_RULES
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES
from twofold.serving.gateway.tools.families import PARSERS
from twofold.slo import Slo, parse_slo

if TYPE_CHECKING:
    from twofold.serving.config import StoreConfig

AUTO: Final = "auto"
DTYPES: Final = {
    "auto": "The type that the model's configuration names.",
    "float32": "32 bits.",
    "bfloat16": "16 bits with the range of float32.",
    "float16": "16 bits.",
}
LOG_FORMATS: Final = {"text": "A line for each event.", "json": "A JSON object for each event and request."}
# Larger workloads are typing errors.
MAX_SECONDS: Final = 1e9
MAX_REQUESTS: Final = 1e10
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str, flag: str = "--kv-cache-memory-bytes") -> int:
    """Parse a size in bytes, at least 1, such as `1073741824`, `500M` or `2GiB`. Raises ConfigurationError."""
    cleaned = text.strip().upper().removesuffix("B")
    digits = cleaned.rstrip("KMGI")
    unit = cleaned[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    require(size >= 1, f"{flag} {text!r} is not a size: write bytes, or a number with a unit as in 2GiB or 500M")
    return size


def parse_budget(text: str, flag: str) -> int | Literal["auto"]:
    """Parse a token budget: a number of tokens, or `auto`. Raises ConfigurationError."""
    if text == AUTO:
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigurationError(f"{flag} {text!r} is not a number of tokens or {AUTO}")
    return int(text)


def numbers(example: str, below: float) -> Callable[[str, str], tuple[float, ...]]:
    """Return a parser of a comma-separated list of numbers above 0 and below a limit, such as `example`."""

    def parse(text: str, flag: str) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in text.split(","))
        except ValueError:
            found = (0.0,)
        require(all(0 < each < below for each in found), f"{flag} {text!r} is not understood: write {example}")
        return found

    return parse


def parse_batchers(text: str, flag: str) -> dict[Role, str]:
    """Parse batcher names by role. Raises ConfigurationError for an unknown batcher or role.

    `text` is one batcher name for all roles, or a list such as `prefill=NAME,decode=NAME`.
    """
    found: dict[Role, str] = {}
    for part in text.split(","):
        role, equals, name = part.strip().rpartition("=")
        require(name in BATCHERS, f"{flag} {name!r} is unknown: choose one of {', '.join(BATCHERS)}")
        if equals and role not in list(Role):
            raise ConfigurationError(f"{flag} {part!r}: {role!r} is not one of {', '.join(Role)}")
        found |= {Role(role): name} if equals else dict.fromkeys(Role, name)
    return found


def parse_disk(text: str, flag: str) -> tuple[Path, int]:
    """Parse a directory and a size such as `/var/kv:100GiB` into (path, bytes). Raises ConfigurationError."""
    directory, separator, size = text.rpartition(":")
    if not (separator and directory):
        raise ConfigurationError(f"{flag} {text!r} is not a directory and a size: write them as in /var/kv:100GiB")
    return Path(directory).absolute(), parse_size(size, flag)


def check_outputs(written: Mapping[str, Path], read: Iterable[str | Path]) -> None:
    """Raise ConfigurationError if an output file is also an input file or another output file."""
    inputs = {Path(path).resolve() for path in read}
    flags: dict[Path, str] = {}
    for name, path in written.items():
        flag = flag_name(name)
        require(path.resolve() not in inputs, f"{flag} {path} is an input file: name another")
        other = flags.setdefault(path.resolve(), flag)
        require(other == flag, f"{other} and {flag} both write {path}: name two files")


# Workload
WORKLOAD: Final = Flag("Named workload, such as azure-conv, or path of a trace.", positional=True, metavar="WORKLOAD")
RATE: Final = Flag("Requests per second.", names=("--rate", "--request-rate"), gt=0, le=MAX_REQUESTS)
NUM_REQUESTS: Final = Flag("Maximum number of requests.", names=("--num-requests", "--num-prompts"), ge=1)
CONCURRENCY: Final = Flag(
    "Closed loop: this many clients, each of which sends its next request after its last one has ended.", ge=1
)
THINK_TIME: Final = Flag("Seconds between the end of a request and the client's next one; needs --concurrency.", ge=0)
DURATION: Final = Flag("Length of the workload in seconds.", le=MAX_SECONDS)
START: Final = Flag("Skip this many seconds of the trace.")
ARRIVAL: Final = Flag("Arrival process: trace, poisson, gamma or constant.")
BURSTINESS: Final = Flag("Shape of gamma arrivals; 1 is Poisson, less is burstier.", ge=1e-3)
LENGTH_SCALE: Final = Flag("Factor on prompt and output lengths.", gt=0, le=1e6)
CLIP_LENGTH: Final = Flag("Clip requests to this many tokens, prompt and output together.", ge=2)
SEED: Final = Flag("Random seed of arrivals, lengths and prompts.", ge=0)

# Model and machines
MODEL_DIRECTORY: Final = Flag("Model directory.", positional=True, metavar="MODEL")
CATALOG: Final = Flag("Catalog file (TOML) with more machines, models or links; repeatable.", metavar="FILE")
PERFORMANCE: Final = Flag("Performance model.", choices=PERFORMANCE_MODELS)
PROFILE: Final = Flag(
    "Measured profile, as written by `twofold characterize` or `twofold calibrate live`.", metavar="FILE"
)
PROFILES: Final = replace(PROFILE, help=PROFILE.help.replace(".", "; repeatable."), names=("--profile",))
LINK_BANDWIDTH: Final = Flag("Bandwidth of KV transfers in GB/s.")
KV_CACHE_MEMORY: Final = Flag("KV cache memory of each worker, as in 500M.", metavar="SIZE", parse=parse_size)
DTYPE: Final = Flag("Data type of weights and KV cache.", choices=DTYPES)
GPU_MEMORY: Final = Flag("Share of a GPU's memory for the weights and KV cache of all workers on it.", gt=0, le=1)
DEVICE: Final = Flag("Device of each worker: cpu, cuda or cuda:0.")
PIN_CORES: Final = Flag("Pin each worker to its own CPU cores.")

# Scheduling
BATCHER: Final = Flag(
    "Batcher of all instances, or of a role, as in prefill=prefill-balanced,decode=decode.",
    metavar="NAME",
    parse=parse_batchers,
    choices=BATCHERS,
)
KV_CACHE: Final = Flag(
    "Prefix cache of each prefilling machine, as in 128GiB, '3000000 tokens' or dram=512GiB,disk=4TB,eviction=lfu; "
    "used by sessions, and where the trace names prefix blocks.",
    metavar="SIZE",
    parse=lambda text, _: parse_cache(text),
)
HANDOFF: Final = Flag("How the KV cache is transferred.", choices=HANDOFF_POLICIES)
MAX_NUM_SEQS: Final = Flag("Maximum number of sequences in an iteration.", ge=1)
MAX_NUM_BATCHED_TOKENS: Final = Flag(
    "Maximum number of tokens in an iteration; auto: the fewest prompt tokens that keep an instance busy.",
    metavar="TOKENS",
    parse=parse_budget,
)
TENSOR_PARALLEL: Final = Flag("Tensor-parallel size of an instance.", ge=1)
PIPELINE_CHUNK: Final = Flag(
    "Compute longer prompts in chunks of this size, several at once in the stages of a pipeline.",
    ge=1,
    metavar="TOKENS",
)
BLOCK_SIZE: Final = Flag("Tokens in a KV block.", ge=1)
SWAP_SPACE: Final = Flag(
    "Host memory of each decoding instance for swapping, as in 4GiB; KV blocks are then allocated as outputs grow.",
    metavar="SIZE",
    parse=parse_size,
)
OVERLOAD: Final = Flag("Reject requests that are predicted to miss --slo.", choices=OVERLOAD_RULES)

# Objectives
SLO_BOUNDS: Final = Flag(
    "SLO, as in ttft=2,tpot=100ms; seconds without a unit.", metavar="BOUNDS", parse=lambda text, _: Slo.parse(text)
)
ANY_SLO: Final = Flag(
    "SLO, as in ttft=2,tpot=100ms (seconds without a unit), or splitwise for the paper's bounds (table VI).",
    metavar="BOUNDS",
    parse=lambda text, _: parse_slo(text),
)
ATTAINMENT: Final = Flag("Share of requests that must meet the SLO.", gt=0, le=1)
REFERENCE: Final = Flag("Reference machine of slowdowns.", metavar="MACHINE")

# Output
JSON: Final = Flag("Print JSON instead of tables.", names=("--json",))
HTML: Final = Flag("Write an HTML report to this file.", metavar="FILE")


class StoreSettings(Settings, panel="Prefix cache"):
    """Flags for the KV store that a host's workers share, and for the eviction of cached prefixes."""

    kv_store_dram: int | None = flag(
        "Host memory for the KV of prompts, shared by all workers of the host, as in 4GiB.",
        metavar="SIZE",
        parse=parse_size,
    )
    kv_store_disk: tuple[Path, int] | None = flag(
        "Directory and disk space for KV that is evicted from --kv-store-dram, as in /var/kv:100GiB.",
        metavar="DIR:SIZE",
        parse=parse_disk,
    )
    kv_eviction: str | None = flag("Prefix-cache eviction policy.", choices=EVICTIONS)

    def store_config(self) -> "StoreConfig | None":
        """Return the KV store's configuration; None without --kv-store-dram. Raises ConfigurationError."""
        from twofold.serving.config import StoreConfig  # noqa: PLC0415  (slow to import)
        from twofold.serving.store.disk import check_directory  # noqa: PLC0415

        if self.kv_store_dram is None:
            require(self.kv_store_disk is None, "--kv-store-disk extends --kv-store-dram: give that too")
            return None
        if self.kv_store_disk is None:
            return StoreConfig(memory_bytes=self.kv_store_dram)
        path, disk_bytes = self.kv_store_disk
        check_directory(path, disk_bytes)
        return StoreConfig(memory_bytes=self.kv_store_dram, disk_dir=str(path), disk_bytes=disk_bytes)


class ApiSettings(Settings, panel="Endpoint"):
    """Flags that name an OpenAI-compatible endpoint and its model."""

    base_url: str = flag("URL of the endpoint.", "http://127.0.0.1:8000", metavar="URL")
    model: str | None = flag("Served model.", unset="the first one of the endpoint")
    api_key: str | None = flag("API key.", env="OPENAI_API_KEY", metavar="KEY")


class HttpSettings(Settings, panel="HTTP"):
    """Flags for the address, the model name and the API keys of a service."""

    host: str = flag("Address to listen on.", "127.0.0.1")
    port: int = flag("Port to listen on; 0 picks a free port.", 8000, ge=0, le=65535)
    served_model_name: str | None = flag(
        "Name of the model in the API.", metavar="NAME", unset="the directory or id of the model"
    )
    api_key: tuple[str, ...] = flag(
        "API key that clients must send; repeatable.", (), env="TWOFOLD_API_KEY", metavar="KEY"
    )
    api_keys: Path | None = flag(
        "File with a key per line: name key [max_concurrent] [requests_per_minute].", metavar="FILE"
    )
    allow_anonymous: bool = flag("Let other machines connect without a key.", False)
    gateway_processes: int = flag("Number of processes that serve HTTP.", 1, ge=1)


class AnswerSettings(Settings, panel="Answers"):
    """Flags for the form of chat answers, and for their storage."""

    tool_parser: str = flag("Format of tool calls in chat answers.", AUTO, choices=PARSERS)
    reasoning_parser: str = flag("Format of reasoning in chat answers.", AUTO, choices=PARSERS)
    response_store: int = flag(
        "Memory for responses that `previous_response_id` can continue.",
        256 << 20,
        metavar="SIZE",
        parse=parse_size,
        unset="256MiB",
    )
    response_lifetime: float = flag("Seconds for which these responses are kept.", 86_400.0, ge=0.0)


class LimitSettings(AnswerSettings, panel="Limits"):
    """Flags that set limits of the gateway."""

    max_running: int = flag("Maximum number of running requests.", 1024, ge=1)
    max_waiting: int = flag("Maximum number of queued requests.", 1024, ge=0)
    request_timeout: float = flag("Timeout of requests that set none, in seconds.", 1800.0, ge=0.001)
    max_prompt_tokens: int | None = flag("Maximum prompt length in tokens.", ge=1, unset="the context of the model")
    max_body_bytes: int = flag(
        "Maximum size of a request body.", 32 << 20, metavar="SIZE", parse=parse_size, unset="32MiB"
    )
    max_connections_per_address: int | None = flag(
        "Maximum number of open connections from one client address.", ge=1, unset="no limit"
    )


class TelemetrySettings(Settings, panel="Telemetry"):
    """Flags for metrics, logs and traces of a service."""

    slo: Slo | None = SLO_BOUNDS.field()
    log_requests: bool = flag("Log a line for each request that ends.", False)
    log_format: str = flag("Log format.", "text", choices=LOG_FORMATS)
    otlp_endpoint: str | None = flag(
        "OTLP/HTTP collector for traces.", env="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL"
    )
