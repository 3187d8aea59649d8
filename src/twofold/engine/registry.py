"""Registry of engines and their properties. A new engine needs a module in `serving/worker` and an entry here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from twofold.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Properties of an engine, such as its Python package and the environment that it needs."""

    help: str
    module: str  # of `twofold.serving.worker`, with a function `prepare(config, report)`
    package: str | None = None  # imported by the module
    extra: str | None = None  # extra of Twofold that installs the package
    environment: Mapping[str, str] = field(default_factory=dict)  # defaults of environment variables
    runs_model: bool = True  # False: only takes the time that a model would take
    recomputes: bool = False  # may preempt a decode and recompute its KV from the prompt
    block_size: int = 16  # tokens in a KV block by default

    def check_installed(self) -> None:
        """Raise ConfigurationError if the engine's package is not installed."""
        if self.extra is not None and find_spec(str(self.package)) is None:
            raise ConfigurationError(
                f"--engine {self.extra} needs a package that is not installed: pip install 'twofold[{self.extra}]'"
            )


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if no distribution has this name."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


ENGINES: dict[str, EngineTraits] = {
    "torch": EngineTraits(
        help="models of transformers over a paged KV cache",
        module="torch_parts",
        package="torch",
        # Without progress bars; an OpenMP pool must not exist when workers are forked.
        environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"},
    ),
    "vllm": EngineTraits(
        help="vLLM, with KV hand-off between its instances",
        module="vllm.parts",
        package="vllm",
        extra="vllm",
        # In the worker's process, on the worker's cores, and logging errors only.
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # which has another interface for logits processors
            "OMP_NUM_THREADS": "1",
        },
        recomputes=True,
        block_size=32,  # as vLLM's own default on a CPU
    ),
    "emulated": EngineTraits(
        help="takes the time of the machines in --cluster, and computes nothing",
        module="emulated_parts",
        runs_model=False,
    ),
}
