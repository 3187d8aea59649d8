"""Program that runs one worker of the service on a Ray node. Standard input contains the job as JSON (HostJob)."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from twofold.errors import UserError
from twofold.security.key import held_key
from twofold.security.network import HostNetwork, TcpEndpoint
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.child_process import die_with_parent, take_stdout
from twofold.serving.launch.joined_host import HostOffer, JoinedHost
from twofold.serving.launch.model_source import find_model, model_fingerprint
from twofold.serving.launch.ray.launcher import HostJob
from twofold.serving.telemetry.logs import configure_logs


def main() -> None:
    die_with_parent(signal.SIGTERM, os.getppid())
    say = take_stdout()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostJob)
    configure_logs(job.log_format)
    try:
        with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
            uvloop.run(_run(job, folder))
    except UserError as error:
        say(str(error).encode())
        sys.exit(2)


async def _run(job: HostJob, folder: str) -> None:
    model = find_model(job.model)
    with held_key(job.key) as key_file:
        network = HostNetwork(
            host=job.worker,
            address=TcpEndpoint.parse(job.controller, "the service's address").own_address(),
            key_file=str(key_file),
            controller=job.controller,
        )
        host = JoinedHost(
            network,
            HostOffer(model=model_fingerprint(model), workers={job.role: 1}),
            lambda config: _adapted(config, job, network, model),
            lambda what: print(f"{job.worker}: {what}", file=sys.stderr, flush=True),  # noqa: T201  (progress)
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.stop)
        await host.run(folder)


def _adapted(config: ServiceConfig, job: HostJob, network: HostNetwork, model: Path) -> ServiceConfig:
    # Not pinned to cores, because Ray assigns none.
    workers = tuple(msgspec.structs.replace(worker, threads=job.threads) for worker in config.workers)
    engine = msgspec.structs.replace(config.engine, model=str(model), tokenizer=None)
    return msgspec.structs.replace(
        config, engine=engine, workers=workers, network=network, log_format=job.log_format, store=None
    )


if __name__ == "__main__":
    main()
