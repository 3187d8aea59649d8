"""What the flags of `http_flags` ask for: the outside of a service, and what is told of it."""

from twofold.cli.sizes import parse_size
from twofold.scheduling.admission_limits import AdmissionLimits
from twofold.serving.gateway.keys import KeyRing
from twofold.serving.gateway.limits import Limits
from twofold.serving.local_service import HttpConfig
from twofold.serving.telemetry import TelemetryConfig
from twofold.slo import Slo


def http_config(
    name: str,
    keys: KeyRing | None,
    *,
    max_running: int,
    max_waiting: int,
    request_timeout: float,
    max_prompt_tokens: int | None,
    max_body_bytes: str,
    cache_retention: float = Limits().longest_retention_s,
) -> HttpConfig:
    """Who may use a model called `name`, and how much of it; times in seconds. Raises ConfigurationError."""
    return HttpConfig(
        served_model_name=name,
        keys=keys,
        limits=Limits(
            body_bytes=parse_size(max_body_bytes, "--max-body-bytes"),
            # One request with more could never be taken whole.
            generations=min(Limits().generations, max_running + max_waiting),
            prompt_tokens=max_prompt_tokens,
            timeout_s=request_timeout,
            longest_retention_s=cache_retention,
        ),
        admission=AdmissionLimits(
            max_running=max_running,
            max_waiting=max_waiting,
            timeout_s=request_timeout,
            keys={} if keys is None else keys.limits,
        ),
    )


def telemetry_config(slo: str | None, otlp_endpoint: str | None) -> TelemetryConfig:
    """What the flags ask for; raises ConfigurationError on an SLO that is not understood."""
    return TelemetryConfig(otlp_endpoint=otlp_endpoint or None, slo=Slo() if slo is None else Slo.parse(slo))
