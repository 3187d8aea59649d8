"""Implementation of `twofold serve`: configure the service, listen, start the workers, serve and clean up."""

import os
import tempfile

import msgspec

from twofold.cli.serve.config import public_name, service_config
from twofold.cli.serve.http import find_keys, http_config, listen, serve, start_telemetry
from twofold.cli.serve.ray import launcher_of
from twofold.cli.serve.settings import ServeSettings
from twofold.serving.launch.local_service import LocalService


def run(settings: ServeSettings) -> None:
    """Run the service until Ctrl-C or SIGTERM. Raises ConfigurationError for invalid flags."""
    keys = find_keys(settings)
    config = service_config(settings)
    http = http_config(
        settings, public_name(settings, config), keys, settings.gateway_processes, settings.cache_retention
    )
    telemetry = start_telemetry(settings, http.served_model_name)
    listener = listen(settings, keys)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        config, launcher = launcher_of(settings, msgspec.structs.replace(config, run_dir=run_dir))
        serve(
            lambda on_progress: LocalService(config, http, listener, on_progress, telemetry, launcher),
            config.log_format,
        )
