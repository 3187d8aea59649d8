"""The flags of `twofold serve --inline-tbt`, and what workers make of them."""

from dataclasses import dataclass
from pathlib import Path

from twofold.cli.serve_simulated import measured_host
from twofold.errors import ConfigurationError
from twofold.serving.config import InlineConfig, ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineFlags:
    """Seconds that an iteration may take, and what says how long one takes."""

    tbt_s: float
    profile: Path | None = None


def inline_config(config: ServiceConfig, flags: InlineFlags) -> InlineConfig:
    """The times of the profile's host while all its workers are busy; raises ConfigurationError where none is known."""
    if config.network is not None:
        raise ConfigurationError("--inline-tbt knows the workers of one host: leave --listen-workers out")
    host = measured_host(config, flags.profile, "--inline-tbt")
    alone = len(config.workers) == 1
    times = host.engine if alone else host.engine.slower(host.prefill.crowded, host.decode.crowded)
    return InlineConfig(times=times, tbt_s=flags.tbt_s)
