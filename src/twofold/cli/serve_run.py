"""What `twofold serve` does once its flags are read: check, listen, start, serve, and leave nothing behind."""

import os
import tempfile

import msgspec
import uvloop

from twofold.cli.http import find_keys, listen, serve
from twofold.cli.serve_config import public_name, service_of
from twofold.cli.serve_flags import Flags
from twofold.cli.serve_overload import OverloadFlags
from twofold.cli.serve_ray import Launch, launch_of, ray_flags
from twofold.cli.serve_replan import ReplanFlags
from twofold.cli.store_flags import store_config
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.local_service import HttpConfig, LocalService
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.telemetry.telemetry import TelemetryConfig, make_telemetry

__all__ = [
    "Flags",
    "OverloadFlags",
    "ReplanFlags",
    "find_keys",
    "launch_of",
    "public_name",
    "ray_flags",
    "run",
    "service_of",
    "store_config",
]


def run(
    config: ServiceConfig,
    http: HttpConfig,
    telemetry: TelemetryConfig,
    *,
    host: str,
    port: int,
    allow_anonymous: bool,
    launch: Launch,
) -> None:
    """Serve until Ctrl-C or SIGTERM, with sockets in a directory of its own; raises ConfigurationError."""
    configure_logs(config.log_format)
    observed = make_telemetry(http.served_model_name, telemetry)
    listener = listen(host, port, exposable=allow_anonymous or http.keys is not None)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        config, launcher = launch(msgspec.structs.replace(config, run_dir=run_dir))
        uvloop.run(
            serve(
                lambda said: LocalService(config, http, listener, said, observed, launcher), config.log_format
            )
        )
