"""A search for a better plan, in a process of its own: it takes seconds of computing, and streams must not wait for it.

`main` is that process: it reads a `SearchJob` from its standard input and writes `Findings` to its standard output.
It is as nice as can be, and ends with the service.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from twofold.errors import SearchError, TwofoldError
from twofold.hardware.catalog import load_catalog
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.replan_log import Findings
from twofold.scheduling.split import Split
from twofold.scheduling.traffic import Traffic
from twofold.serving.config import ReplanConfig
from twofold.serving.offspring import die_with_parent

_NICE = 19


class SearchJob(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Planner.search`, and what the planner is made of."""

    config: ReplanConfig
    traffic: Traffic
    running: Split
    stock: int


async def search(job: SearchJob) -> Findings:
    """Run the job; raises SearchError if it fails or takes longer than it may. A search that is cancelled is ended."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "twofold.serving.replan_search")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise SearchError(f"the search could not be started: {error.strerror}") from error
    limit_s = job.config.search_limit_s
    try:
        said, errors = await asyncio.wait_for(process.communicate(msgspec.json.encode(job)), limit_s)
    except TimeoutError:
        raise SearchError(f"the search was ended after {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise SearchError(reason[-1] if reason else f"the search ended with code {process.returncode}")
    return msgspec.json.decode(said, type=Findings)


def main() -> None:
    die_with_parent(signal.SIGKILL, os.getppid())
    os.nice(_NICE)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchJob)
    config = job.config
    try:
        catalog = load_catalog([Path(file) for file in config.catalog])
        planner = SplitPlanner(
            config.cluster, catalog, config.slo, attainment=config.attainment, replicas=config.replicas
        )
        findings = planner.search(job.traffic, job.running, job.stock)
    except TwofoldError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
