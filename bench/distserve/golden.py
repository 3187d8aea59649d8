"""Compare Twofold's simulator with the output of DistServe's own simulator.

    python bench/distserve/golden.py [FILE …] [--slo-ms TTFT,TPOT]

Each FILE is the output of one run of DistServe's simulator. Without a FILE, the script compares every file in
the folder golden/distserve of the data directory TWOFOLD_DATA. The name of a file gives the engine, the model
and the parallelism.

Prints the largest relative errors of TTFT and TPOT for each file. Also prints the SLO attainment in both
simulators at 0.5, 0.75, 1 and 1.5 times the bounds of `--slo-ms` (default: 200,100).
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.real_data import data_folder
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Moment, Timeline

NAME = re.compile(r"golden-(?P<engine>distserve|vllm)-(?P<model>.+)-(?P<degrees>\d{4})-r(?P<rate>[\d.]+)-N\d+")
SCALES = (0.5, 0.75, 1.0, 1.5)


class Golden(msgspec.Struct, frozen=True):
    """One request in the output of DistServe's simulator; times are in milliseconds."""

    arrival_ms: float
    prompt_len: int
    output_len: int
    ttft_ms: float
    tpot_ms: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Largest relative latency differences between DistServe's and Twofold's simulator, and SLO attainment in both."""

    requests: int
    ttft_error: float
    tpot_error: float
    attainment: tuple[tuple[float, float], ...]


class _Ends(Observer):
    def __init__(self) -> None:
        self.latencies: dict[str, tuple[float, float]] = {}

    def ended(self, timeline: Timeline, now: float) -> None:
        first_s, last_s = timeline.moments[Moment.FIRST_TOKEN], timeline.moments[Moment.LAST_TOKEN]
        ttft_ms = (first_s - timeline.moments[Moment.ARRIVED]) * 1e3
        self.latencies[timeline.request.id] = ttft_ms, (last_s - first_s) * 1e3 / timeline.output_tokens


def distserve_sim(pools: Sequence[PoolSpec], model: str, *, engine: str = "distserve") -> ClusterSpec:
    """Create a cluster with the timing and rules of DistServe's simulator (OSDI'24).

    With mixed pools and `engine` "vllm", it is the paper's baseline.
    """
    suffix = "" if engine == "distserve" else f"-{engine}"
    return ClusterSpec(
        pools=tuple(pools),
        model=model,
        performance=f"distserve-published{suffix}",
        router="jsq",
        handoff="serialized",
        rules="distserve-published",
    )


def cluster_of(name: str) -> ClusterSpec:
    """Return the cluster of a DistServe run, parsed from the name of its output file."""
    found = NAME.match(name)
    if found is None:
        raise SystemExit(f"{name} is not named golden-ENGINE-MODEL-TPPPTPPP-rRATE-N…")
    prefill, decode = found["degrees"][:2], found["degrees"][2:]
    if found["engine"] == "vllm":
        return distserve_sim([_pool(Role.MIXED, prefill)], found["model"], engine="vllm")
    return distserve_sim([_pool(Role.PREFILL, prefill), _pool(Role.DECODE, decode)], found["model"])


def _pool(role: Role, degrees: str) -> PoolSpec:
    tensor, stages = map(int, degrees)
    return PoolSpec(
        machines=stages, machine="dgx-a100", role=role, tensor_parallel=tensor, pipeline_parallel=stages, instances=1
    )


def compare(path: Path, slo_ms: tuple[float, float]) -> Comparison:
    """Simulate the requests of an output file of DistServe's simulator, and compare the latencies and the SLO
    attainment.
    """
    theirs = [msgspec.convert(row, Golden) for row in json.loads(path.read_text())]
    requests = [
        Request(
            id=str(number), arrival_s=row.arrival_ms / 1e3, prompt_tokens=row.prompt_len, output_tokens=row.output_len
        )
        for number, row in enumerate(theirs)
    ]
    ends = _Ends()
    simulate(cluster_of(path.name), requests, catalog=load_catalog(), observers=[ends], series=False)
    ours = [ends.latencies[request.id] for request in requests]
    published = [(row.ttft_ms, row.tpot_ms) for row in theirs]
    errors = [(abs(mine[0] / own[0] - 1), abs(mine[1] / own[1] - 1)) for mine, own in zip(ours, published, strict=True)]
    return Comparison(
        requests=len(theirs),
        ttft_error=max(error[0] for error in errors),
        tpot_error=max(error[1] for error in errors),
        attainment=tuple((attained(published, slo_ms, scale), attained(ours, slo_ms, scale)) for scale in SCALES),
    )


def attained(latencies: Sequence[tuple[float, float]], slo_ms: tuple[float, float], scale: float) -> float:
    """Return the share of requests within `scale` times the TTFT and TPOT bounds of `slo_ms`."""
    kept = [ttft <= scale * slo_ms[0] and tpot <= scale * slo_ms[1] for ttft, tpot in latencies]
    return sum(kept) / len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--slo-ms", default="200,100", help="TTFT,TPOT in milliseconds")
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    ttft_ms, tpot_ms = map(float, args.slo_ms.split(","))
    files: list[Path] = args.files or sorted(_folder().glob("golden-*.json"))
    if not files:
        raise SystemExit("no files: set TWOFOLD_DATA or give FILE")
    table = Table(title=f"distserve-published against DistServe's simulator, SLO {ttft_ms:g}/{tpot_ms:g} ms")
    for column in ("file", "requests", "TTFT error", "TPOT error", *(f"attained ×{scale:g}" for scale in SCALES)):
        table.add_column(column, justify="left" if column == "file" else "right")
    compared: dict[str, Comparison] = {}
    for file in files:
        found = compared[file.stem] = compare(file, (ttft_ms, tpot_ms))
        table.add_row(
            file.stem,
            str(found.requests),
            f"{found.ttft_error:.1e}",
            f"{found.tpot_error:.1e}",
            *(f"{own:.1%} / {mine:.1%}" for own, mine in found.attainment),
        )
    Console(width=160).print(table)
    if args.json is not None:
        args.json.write_text(json_text(compared), "utf-8")


def _folder() -> Path:
    return data_folder() / "golden" / "distserve"


if __name__ == "__main__":
    main()
