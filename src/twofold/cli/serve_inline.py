"""What `twofold serve --inline-tbt` makes of a profile: the times by which workers let prompts join decodes."""

from pathlib import Path

from twofold.cli.serve_simulated import measured_host, needed_profile
from twofold.errors import ConfigurationError
from twofold.serving.config import InlineConfig, ServiceConfig


def inline_config(config: ServiceConfig, tbt_s: float | None, profile: Path | None) -> InlineConfig | None:
    """The times of the profile's host, with all its workers busy; None is no bound for an iteration.

    Raises ConfigurationError where no times are known.
    """
    if tbt_s is None:
        return None
    if config.network is not None:
        raise ConfigurationError("--inline-tbt knows the workers of one host: leave --listen-workers out")
    host = measured_host(config, needed_profile(profile, "--inline-tbt"))
    alone = len(config.workers) == 1
    times = host.engine if alone else host.engine.slower(host.prefill.crowded, host.decode.crowded)
    return InlineConfig(times=times, tbt_s=tbt_s)
