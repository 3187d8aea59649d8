"""Flags of `twofold characterize`."""

import math
from pathlib import Path
from typing import Final

from twofold.cli import options
from twofold.cli.settings import Settings, flag

ENGINES: Final = {"torch": "The built-in engine, in this process.", "vllm": "vLLM, in this process."}
CSV: Final = ".csv"
CHUNK: Final = 2048
_WORKLOADS: Final = ("azure-conv", "azure-code")


class TargetSettings(Settings):
    """Flags for the instance to measure, its hardware, and the duration of the measurement."""

    target: str = flag(
        "Model directory, URL of an OpenAI endpoint, or a measured profile (CSV), which is only analysed.",
        ...,
        positional=True,
        metavar="TARGET",
    )
    output: Path | None = flag(
        "Profile to write (YAML). Its measurements are kept beside it (CSV); a repeated command continues them.",
        names=("--output", "-o"),
        metavar="FILE",
    )
    budget: float = flag("Seconds to measure.", 240.0, gt=0)
    hardware: tuple[str, ...] = flag(
        "Name of the hardware of one instance, as cluster files name it. For a CSV: analyse only this; repeatable.",
        (),
        unset="host; all of a CSV",
    )
    tp: int | None = flag("Tensor-parallel size. For a CSV: analyse only this.", ge=1, unset="1; all of a CSV")
    catalog: tuple[Path, ...] = options.CATALOG.field(())


class LocalEngineSettings(Settings, panel="Engine of a model directory"):
    """Flags of a local engine that `twofold characterize` measures."""

    engine: str = flag("Engine.", "torch", choices=ENGINES)
    device: str = options.DEVICE.field("cpu")
    dtype: str = options.DTYPE.field("auto")
    threads: int | None = flag("Number of CPU threads.", ge=1, unset="that of the engine")
    kv_cache_memory_bytes: int = options.KV_CACHE_MEMORY.field(1 << 30, "1GiB")
    max_num_seqs: int = options.MAX_NUM_SEQS.field(64)
    max_num_batched_tokens: int | None = flag(
        "Maximum number of tokens in an iteration, by which prompts are chunked.",
        ge=1,
        unset=f"{CHUNK}; for a URL, not chunked",
    )
    max_model_len: int | None = flag("Maximum context length in tokens.", ge=16, unset="that of the model")
    power_caps: tuple[float, ...] = flag(
        "Power caps of the hardware in watts. Each is measured for --budget seconds, too, into a profile of its own.",
        (),
        metavar="W,W",
        parse=options.numbers("watts as in 300,400", math.inf),
        unset="none",
    )


class EndpointSettings(Settings, panel="Endpoint"):
    """Flags for measuring a running server by its URL."""

    model: str | None = flag(
        "Served model. For a CSV: analyse only this.", unset="the first one of the endpoint; all of a CSV"
    )
    model_sizes: str | None = flag(
        "Model of the catalog, or directory with a config.json, with the sizes of the served model.",
        metavar="MODEL",
        unset="the directory that the endpoint names",
    )
    api_key: str | None = flag("API key.", env="OPENAI_API_KEY", metavar="KEY")
    disaggregated: bool = flag(
        "The endpoint decodes on other instances: measure KV transfers, and add them to the profile of an instance.",
        False,
    )
    text: bool = flag("Send prompts as text, to endpoints that take no token ids.", False)
    kv_capacity_tokens: int | None = flag(
        "KV capacity of an instance in tokens.", ge=1, unset="that of the server's metrics"
    )


class CostSettings(Settings, panel="Costs"):
    """Flags for the price and power of the hardware of one instance."""

    price_per_h: float = flag("Dollars per hour.", 0.0, ge=0)
    tdp_w: float = flag("Provisioned power in watts.", 0.0, ge=0)
    idle_w: float = flag("Power without load in watts.", 0.0, ge=0)


class FigureSettings(Settings, panel="Report"):
    """Flags for the report of `twofold characterize`."""

    html: Path | None = options.HTML.field()
    plots: Path | None = flag("Write the charts as PNG files to this directory.", metavar="DIR")
    against: tuple[Path, ...] = flag("Profile to compare with; repeatable.", (), metavar="FILE")
    workload: tuple[str, ...] = flag(
        "Named workload or path of a trace for the insights; repeatable.", _WORKLOADS, unset=" and ".join(_WORKLOADS)
    )


class CharacterizeSettings(FigureSettings, CostSettings, EndpointSettings, LocalEngineSettings, TargetSettings):
    """All flags of `twofold characterize`."""

    @property
    def is_csv(self) -> bool:
        return Path(self.target).suffix.lower() == CSV

    @property
    def is_endpoint(self) -> bool:
        return self.target.startswith(("http://", "https://"))

    def output_under(self, cap: float | None) -> Path | None:
        """Return the path of the profile measured under a power cap in watts (None: no cap)."""
        if self.output is None or cap is None:
            return self.output
        return self.output.with_stem(f"{self.output.stem}-{cap:g}w")
